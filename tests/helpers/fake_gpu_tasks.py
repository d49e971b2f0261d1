"""The tasks of ``gpu_tasks.py``, in processes whose GPU is the fake one."""

import fake_gpu
from gpu_tasks import FaultyTask, HasExtraState, HugeGradient, ReferenceTask

__all__ = ["FaultyTask", "HasExtraState", "HugeGradient", "ReferenceTask"]

fake_gpu.install()

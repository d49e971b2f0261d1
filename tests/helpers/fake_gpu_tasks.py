"""Tasks in processes whose GPU is the fake one."""

import fake_gpu
from gpu_tasks import FailsAtBatch as FailsAtBatch, FaultyTask as FaultyTask, ReferenceTask as ReferenceTask

fake_gpu.install()

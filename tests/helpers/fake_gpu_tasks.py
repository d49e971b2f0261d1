"""Tasks of ``tasks.py`` in processes whose GPUs are fake ones."""

import fake_gpu
from tasks import ReferenceTask

fake_gpu.install()


class OnFakeGpu(ReferenceTask):
    """Nothing else."""

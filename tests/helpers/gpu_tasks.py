"""Tasks of other modules that are trained on GPUs."""

from invalid_tasks import FailsAtBatch as FailsAtBatch
from tasks import FaultyTask as FaultyTask, ReferenceTask as ReferenceTask

"""Tasks that are trained on GPUs."""

from tasks import FaultyTask, ReferenceTask

__all__ = ["FaultyTask", "HugeGradient", "ReferenceTask"]


class HugeGradient(ReferenceTask):
    """One matrix has a gradient that float16 cannot hold."""

    def training_step(self, model, batch, batch_idx):
        return super().training_step(model, batch, batch_idx) + 1e9 * model.first.weight.sum()

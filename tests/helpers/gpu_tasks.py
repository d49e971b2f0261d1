"""Tasks that are trained on GPUs."""

from tasks import CountsForwards, FaultyTask, ReferenceTask
from torch import nn

__all__ = ["FaultyTask", "HasExtraState", "HugeGradient", "ReferenceTask"]


class HugeGradient(ReferenceTask):
    """One matrix has a gradient that float16 cannot hold."""

    def training_step(self, model, batch, batch_idx):
        return super().training_step(model, batch, batch_idx) + 1e9 * model.first.weight.sum()


class CountsOnDevice(CountsForwards):
    """Its extra state is on the device of its input."""

    def forward(self, x):
        self.device = x.device
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": super().get_extra_state()["calls"].to(getattr(self, "device", "cpu"))}


class HasExtraState(ReferenceTask):
    """A model with a module whose forward changes its extra state."""

    def build_model(self):
        return nn.Sequential(super().build_model(), CountsOnDevice())

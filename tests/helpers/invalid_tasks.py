"""Tasks with something wrong in them, for tests/integration/test_bad_input.py."""

import resource
import shutil
import subprocess
from pathlib import Path

import torch
from tasks import ReferenceTask
from torch import nn

from paramserver import Task, context


class Unmakeable(ReferenceTask):
    def __init__(self):
        raise RuntimeError("there are no labels")


class Unfinished(Task):
    def build_model(self):
        return nn.Linear(2, 2)


class FailsAtBatch(ReferenceTask):
    """Does ``what`` when batch ``at`` is computed."""

    def __init__(self, what, at=5, **options):
        super().__init__(**options)
        self.what, self.at = what, at

    def training_step(self, model, batch, batch_idx):
        loss = super().training_step(model, batch, batch_idx)
        return getattr(self, self.what)(loss) if batch_idx == self.at else loss

    def nan(self, loss):
        return loss * float("nan")

    def gradient(self, loss):
        """The same loss, with a gradient of 0 times infinity."""
        return loss + (0 * loss).sqrt()

    def huge(self, loss):
        return loss * 1e9

    def leave(self, loss):
        raise SystemExit(0)

    def vector(self, loss):
        return loss.repeat(3)

    def number(self, loss):
        return loss.item()

    def refuse_writes(self, loss):
        """From here on the disk takes no byte more in any file, as one that is full."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return loss


class NamesFloat64(ReferenceTask):
    """Samples are dictionaries, as those of simulations; the parameters are float64 and the model is not."""

    def build_model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 5))

    def _data(self, samples, seed):
        return [{"parameters": torch.zeros(36, dtype=torch.float64), "label": 0} for _ in range(samples)]

    def training_step(self, model, batch, batch_idx):
        return nn.functional.cross_entropy(model(batch["parameters"]), batch["label"])


class Diverges(ReferenceTask):
    """Its parameters grow beyond all measure."""

    def build_optimizer(self, model):
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e7)


class Changes(ReferenceTask):
    """Sample ``at`` has another shape than the others."""

    def __init__(self, at=20, **options):
        super().__init__(**options)
        self.at = at

    def train_source(self, partition):
        data = self._data(64, 1)
        return ((image[:, :3] if i == self.at else image, label) for i, (image, label) in enumerate(data))


class ChangesInValidation(ReferenceTask):
    def validation_source(self, partition):
        return [(torch.zeros(1, 6, 6 + i // 3), 0) for i in range(5)]


class Grows(ReferenceTask):
    """Stores more in each checkpoint."""

    saved = 0

    def on_checkpoint(self, state):
        self.saved += 1
        state["ballast"] = torch.zeros(self.saved * 2**20, dtype=torch.uint8)

    def on_resume(self, state):
        self.saved = 0


class Wide(ReferenceTask):
    """A model whose width is an argument; at one batch the loss may be three numbers."""

    def __init__(self, width=8, extra=False, vector_at=None, **options):
        super().__init__(**options)
        self.width, self.extra, self.vector_at = width, extra, vector_at

    def training_step(self, model, batch, batch_idx):
        loss = super().training_step(model, batch, batch_idx)
        return loss.repeat(3) if batch_idx == self.vector_at else loss

    def build_model(self):
        layers = [nn.Flatten(), nn.Linear(36, self.width), nn.Linear(self.width, 5)]
        return nn.Sequential(*layers, *[nn.LayerNorm(5)] * self.extra).to(self.dtype)


class FullDisk(ReferenceTask):
    """From step 5 on rank 0's disk takes no byte more in any file; ``log_records``: trainers send records too."""

    def __init__(self, log_records=False, **options):
        super().__init__(**options)
        self.log_records = log_records

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate_at)

    def _rate_at(self, step):
        # In mode rpc the schedule runs on the server, which has no trainer.
        if step == 5 and (self.trainer is None or self.trainer.trainer_index == 0):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return 1.0

    def training_step(self, model, batch, batch_idx):
        loss = super().training_step(model, batch, batch_idx)
        if self.log_records:
            self.log("loss", loss.item())
        return loss


class ChangesRunFolder(ReferenceTask):
    """After three batches, trainer 0 does ``what`` to the folder of its run and writes ``mark``."""

    def __init__(self, what, run_dir, mark, **options):
        super().__init__(**options)
        self.what = what
        self.run_dir = Path(run_dir)
        self.mark = Path(mark)

    def on_batch_end(self, batch_idx):
        if batch_idx == 3 and self.trainer.trainer_index == 0:
            getattr(self, self.what)()
            self.mark.write_text(self.what)

    def remove_all(self):
        shutil.rmtree(self.run_dir)

    def move_all(self):
        self.run_dir.rename(self.run_dir.with_name("moved"))

    def remove_records(self):
        (self.run_dir / "metrics.jsonl").unlink()

    def replace_records(self):
        self.remove_records()
        (self.run_dir / "metrics.jsonl").write_text("")

    def remove_checkpoints(self):
        shutil.rmtree(self.run_dir / "checkpoints")

    def remove_logs(self):
        shutil.rmtree(self.run_dir / "logs")

    def make_immutable(self):
        subprocess.run(["chattr", "+i", self.run_dir], check=True)

    def remove_tensorboard(self):
        shutil.rmtree(self.run_dir / "tensorboard")


class DiffersBetweenTrainers(ReferenceTask):
    """Trainer 1 has another model, data set or validation set than trainer 0."""

    def __init__(self, what, **options):
        super().__init__(**options)
        self.what = what

    def build_model(self):
        model = super().build_model()
        if context._role.trainer_index == 1:
            if self.what == "shape":
                model.extra = nn.Linear(3, 2)
            if self.what == "dtype":
                model = model.double()
            if self.what == "buffer":
                model.register_buffer("extra", torch.zeros(2))
        elif self.what == "shape":
            model.extra = nn.Linear(2, 2)
        return model

    def train_source(self, partition):
        if self.what == "kind" and partition.index == 1:
            return iter([])
        if self.what == "iterables":
            return list(self._data(200 + partition.index, 1)).__iter__()
        return self._data(self.samples - (self.what == "samples") * partition.index, 1)

    def validation_source(self, partition):
        return self._data(self.validation - (self.what == "validation") * partition.index, 2)


class Nonfinite(ReferenceTask):
    """``places`` are pairs of trainer and batch at which the loss is NaN, or only the gradient if ``what`` says so."""

    def __init__(self, places, what="loss", sequential=False, left_out=(), **options):
        super().__init__(**options)
        self.places, self.what = [tuple(place) for place in places], what
        self.sequential, self.left_out = sequential, left_out

    def train_source(self, partition):
        data = super().train_source(partition)
        kept = [index for index in range(len(data)) if index not in self.left_out]
        return torch.utils.data.Subset(data, kept)

    def sampler(self, partition):
        return torch.utils.data.SequentialSampler(self.train_source(partition)) if self.sequential else None

    def training_step(self, model, batch, batch_idx):
        place = (self.trainer.trainer_index, batch_idx)
        if place not in self.places and (-1, batch_idx) not in self.places:
            return super().training_step(model, batch, batch_idx)
        images, labels = batch
        if self.what == "loss":  # of the module buffers too
            return super().training_step(model, (images * float("nan"), labels), batch_idx)
        loss = super().training_step(model, batch, batch_idx)
        return loss + (0 * loss).sqrt()


class Overflows(ReferenceTask):
    """At ``places``, pairs of trainer and batch, the gradient of an output is too large for float16 if it is scaled."""

    def __init__(self, places, plain=False, derives=False, **options):
        super().__init__(**options)
        self.places, self.plain, self.derives = [tuple(place) for place in places], plain, derives

    def build_model(self):
        if not self.plain:
            return super().build_model()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.Tanh(), nn.Linear(16, 5))

    def sampler(self, partition):
        return torch.utils.data.SequentialSampler(self.train_source(partition)) if self.plain else None

    def training_step(self, model, batch, batch_idx):
        images, labels = batch
        output = model(images)
        loss = nn.functional.cross_entropy(output, labels)
        if self.derives:
            weight = self.trainer.unwrapped_model.last.weight
            (gradient,) = torch.autograd.grad(loss, [weight], retain_graph=True)
            assert 1e-3 < float(gradient.abs().max()) < 10.0, gradient
        if (self.trainer.trainer_index, batch_idx) in self.places:
            loss = loss + 60.0 * output[0, 0]
        return loss

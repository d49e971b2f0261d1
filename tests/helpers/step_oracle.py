"""A ledger of what every step of a run used and pushed, and a replay of that run in one process.

The replay is plain PyTorch: one model, one optimizer, a dictionary of versions. It shares with the run the task alone.
"""

import contextlib
import copy
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import torch
from tasks import ReferenceModel, ReferenceTask
from torch import nn
from torch.utils.data import TensorDataset

from paramserver.distributed.timeouts import poll_until
from paramserver.rng import seed_all
from paramserver.trainers import RpcTrainer

# The task.


class EmbeddingModel(ReferenceModel):
    """Also with an embedding and a product of elements."""

    def __init__(self, dropout, unused, batch_norm=True):
        super().__init__(dropout, unused, batch_norm)
        self.words = nn.Embedding(36, 16)
        self.gate = nn.Parameter(torch.ones(16))

    def forward(self, x):
        words = self.words(x.flatten(1).topk(3).indices).mean(1)
        x = self.bn(self.conv(x)).relu().flatten(1)
        x = self.drop(self.norm(self.first(x)) * self.gate + words)
        x = self.frozen(self.tied(self.square(x).tanh())) * self.scale
        return self.last(x)


class PacedTask(ReferenceTask):
    """Samples with a number each, in batches that take their time.

    Args:
        pace_ms: a batch takes up to so long, drawn from (trainer, batch).
        slow: a trainer that takes ``slow_ms`` longer.
        stops: trainer and batch at which it gets SIGTERM; with ``parent`` its supervisor does.
        changes: a trainer that changes a parameter in place at batch 3.
        alternate: a parameter has a gradient at every second batch only.
        fifo: a named pipe to which trainer 0 writes at its tenth batch.
        gate: a file that is there once another trainer begins its seventh batch; ``slow`` waits for it in its first.
    """

    def __init__(
        self,
        pace_ms=0.0,
        slow=None,
        slow_ms=30.0,
        stops=(),
        changes=None,
        alternate=False,
        fifo=None,
        gate=None,
        **options,
    ):
        super().__init__(**options)
        self.pace_ms, self.slow, self.slow_ms = pace_ms, slow, slow_ms
        self.stops, self.changes, self.alternate = [tuple(stop) for stop in stops], changes, alternate
        self.fifo, self.gate = fifo, gate

    def build_model(self):
        return EmbeddingModel(**self.options).to(self.dtype)

    def _data(self, samples, seed):
        return TensorDataset(*super()._data(samples, seed).tensors, torch.arange(samples))

    def on_batch_start(self, batch_idx):
        index = self.trainer.trainer_index
        if (index, batch_idx) in self.stops:
            os.kill(os.getpid(), signal.SIGTERM)
        if (index, batch_idx, "parent") in self.stops:
            os.kill(os.getppid(), signal.SIGTERM)
        if self.fifo is not None and (index, batch_idx) == (0, 10):
            Path(self.fifo).write_text("here")
            assert Path(self.fifo).with_suffix(".applied").read_text() == "applied"
        if self.gate is not None and index == self.slow and batch_idx == 0:
            assert poll_until(time.monotonic() + 60, lambda: Path(self.gate).exists() or None, threading.Event())
        elif self.gate is not None and batch_idx == 6:
            Path(self.gate).touch()
        if index == self.changes and batch_idx == 3:
            with torch.no_grad():
                self.trainer.unwrapped_model.gate.mul_(2.0)
        pace_ms = random.Random(f"{index} {batch_idx}").uniform(0, self.pace_ms)
        pace_ms += self.slow_ms if index == self.slow else 0.0
        if pace_ms:
            time.sleep(pace_ms / 1000)  # stands for the work of a batch

    def training_step(self, model, batch, batch_idx):
        loss = super().training_step(model, batch[:2], batch_idx)
        return loss + model.unused.square().sum() if self.alternate and batch_idx % 2 else loss

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        return super().validation_step(model, batch[:2], valid_batch_idx, batch_idx)


# The run.


class LedgerTrainer(RpcTrainer):
    """Records each of its steps: what it used, what it pushed, when it was inside backward."""

    def on_after_setup_optimizers(self):
        self.first, self.ledger, self.batches = self.step, [], []

    def agree(self):
        self.batches.clear()  # those of a validation
        return super().agree()

    def on_before_forward(self, batch):
        self.batches.append(batch)
        return super().on_before_forward(batch)

    def load_version(self):
        super().load_version()
        self.random, self.inside = torch.get_rng_state(), []
        self.first_batch = self.progress.batch_idx

    def on_before_backward(self, loss):
        self.inside.append(time.monotonic())

    def on_after_backward(self):
        self.inside.append(time.monotonic())

    def step_optimizer(self, report):
        model = self.unwrapped_model
        entry = {
            "trainer": self.trainer_index,
            "version": report.version,
            "batches": list(self.batches),
            "first_batch": self.first_batch,
            "random": self.random,
            "gradients": gradients_of(model),
            "buffers": {n: b.clone() for n, b in model.named_buffers()},
            "inside": list(self.inside),
        }
        result = super().step_optimizer(report)
        self.ledger.append({**entry, "step": result.step, "dropped": result.dropped})
        return result

    def leave(self, totals, decision):
        logging = self.config.logging
        file = Path(logging.run_dir) / f"{logging.name}.{self.trainer_index}.{self.first}.ledger"
        torch.save({"way": self.pull.transport.name, "entries": self.ledger}, file)
        super().leave(totals, decision)


class DelayedPull(LedgerTrainer):
    """Trainer 1 is granted a version, and loads its parameters when trainer 0 is at its tenth batch.

    Trainer 0 goes on when what trainer 1 computed then is applied.
    """

    def receive_model(self, reply):
        if self.trainer_index == 1:
            assert Path(self.task.fifo).read_text() == "here"
        super().receive_model(reply)

    def step_optimizer(self, report):
        result = super().step_optimizer(report)
        if self.trainer_index == 1 and len(self.ledger) == 1:
            Path(self.task.fifo).with_suffix(".applied").write_text("applied")
        return result


def gradients_of(model):
    """By name, without those that have none."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# The ledger.


@dataclass(frozen=True)
class Entry:
    """One push of one trainer."""

    trainer: int
    version: int
    batches: list
    first_batch: int
    random: torch.Tensor
    gradients: dict
    buffers: dict
    inside: list
    step: int
    dropped: bool

    @property
    def staleness(self):
        return self.step - 1 - self.version

    @property
    def samples(self):
        return [int(number) for _, _, numbers in self.batches for number in numbers]


@dataclass(frozen=True)
class Ledger:
    """All entries of the trainers of a run, resumed parts included."""

    ways: set
    entries: list

    @classmethod
    def of(cls, finished):
        folder, name = finished.run_dir.parent, finished.run_dir.name
        parts = [torch.load(file, weights_only=True) for file in sorted(folder.glob(f"{name}.*.ledger"))]
        return cls({part["way"] for part in parts}, [Entry(**entry) for part in parts for entry in part["entries"]])

    @property
    def applied(self):
        """In the order in which they were."""
        return sorted((e for e in self.entries if not e.dropped), key=lambda e: (e.step, e.trainer))

    @property
    def dropped(self):
        return [e for e in self.entries if e.dropped]

    def updates(self):
        """Steps with the entries that made each, in the order of trainers."""
        return [(step, list(entries)) for step, entries in groupby(self.applied, lambda e: e.step)]

    def clocks(self, version, trainers, since=0):
        """How many updates of each trainer had made this version, where each of them makes one."""
        made = [e.trainer for e in self.applied if since < e.step <= version]
        return [made.count(trainer) for trainer in range(trainers)]

    def most_inside(self):
        """How many trainers were inside backward at once, at most."""
        moments = [(t, 1 - 2 * (place % 2)) for e in self.entries for place, t in enumerate(e.inside)]
        inside = most = 0
        for _, change in sorted(moments):
            inside += change
            most = max(most, inside)
        return most


# The replay.


@dataclass
class Replay:
    """A run, computed again by one process from its ledger.

    Args:
        task: a new one, with the arguments of the run's.
        seed: the run's.
        clip_grad_norm, stale_scaling: its config's.
    """

    task: ReferenceTask
    seed: int = 0
    clip_grad_norm: float | None = None
    stale_scaling: str = "none"
    wrong: list = field(default_factory=list)

    def __post_init__(self):
        self.task.devices = (torch.device("cpu"),)
        seed_all(self.seed)
        self.model = self.task.build_model()
        self.optimizer = self.task.build_optimizer(self.model)
        built = self.task.build_scheduler(self.optimizer)
        self.schedule, self.every = (built["scheduler"], built["every"]) if isinstance(built, dict) else (built, "step")
        self.samples = self.epoch = 0
        self.scratch = copy.deepcopy(self.model)
        self.versions = [copy.deepcopy(self.model.state_dict())]

    def run(self, ledger):
        """Compute every update again; ``wrong`` names each push that this process computes differently."""
        with one_thread():
            for step, entries in ledger.updates():
                assert step == len(self.versions), "a version is left out"
                self.apply([self.compute(entry) for entry in entries], entries)
            for entry in ledger.dropped:
                self.compute(entry)
        return self

    def compute(self, entry):
        """The gradients of a push, at the version that the push names."""
        self.scratch.load_state_dict(self.versions[entry.version])
        self.scratch.zero_grad()
        torch.set_rng_state(entry.random)
        for place, batch in enumerate(entry.batches):
            loss = self.task.training_step(self.scratch, batch, entry.first_batch + place)
            (loss / len(entry.batches)).backward()
        found = gradients_of(self.scratch)
        self.compare("gradient", entry, found, entry.gradients)
        self.compare("buffer", entry, dict(self.scratch.named_buffers()), entry.buffers)
        return found

    def compare(self, what, entry, mine, theirs):
        names = mine.keys() ^ theirs.keys() | {
            n for n in mine.keys() & theirs.keys() if not torch.equal(mine[n], theirs[n])
        }
        self.wrong += [
            f"{what} of {n}, trainer {entry.trainer}, {entry.version} to {entry.step}" for n in sorted(names)
        ]

    def apply(self, gradients, entries):
        """One update: the mean in the order of trainers, and the module buffers of the first of them."""
        while self.every == "epoch" and self.epoch < self.samples // self.task.samples:
            self.epoch += 1
            self.schedule.step()
        self.samples += sum(len(e.samples) for e in entries)
        for name, parameter in self.model.named_parameters():
            parameter.grad = self.mean([g.get(name) for g in gradients], [e.staleness for e in entries])
        if self.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], self.clip_grad_norm)
        self.optimizer.step()
        if self.schedule is not None and self.every == "step":
            self.schedule.step()
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(entries[0].buffers[name])
        self.versions.append(copy.deepcopy(self.model.state_dict()))

    def validated(self, version):
        """The means over all validation samples at a version."""
        self.scratch.load_state_dict(self.versions[version])
        self.scratch.eval()
        with torch.no_grad():
            values = self.task.validation_step(self.scratch, self.task.validation_source(None)[:], 0, 0)
        self.scratch.train()
        return {name: float(value) for name, value in values.items()}

    def mean(self, gradients, staleness):
        if all(g is None for g in gradients):
            return None
        like = next(g for g in gradients if g is not None)
        gradients = [torch.zeros_like(like) if g is None else g.clone() for g in gradients]
        if self.stale_scaling == "inverse":
            gradients = [g * (1 / (1 + s)) for g, s in zip(gradients, staleness, strict=True)]
        total = gradients[0]
        for other in gradients[1:]:
            total = total + other
        return total / len(gradients)


@contextlib.contextmanager
def one_thread():
    """As the ranks compute: another number of threads rounds differently."""
    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_rng_state(state)

"""A task in which one fault fires once, in a chosen process at a chosen phase of the run; it leaves what it saw."""

import ctypes
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from threading import Event

import torch
from supervised_tasks import ranks_of
from tasks import ReferenceTask
from torch import nn

from paramserver.distributed.timeouts import poll_until

SIGNALS = {"kill": signal.SIGKILL, "stop_10s": signal.SIGSTOP, "stop": signal.SIGSTOP}
FIRST_BATCH, MIDDLE_BATCH = 0, 6
HOLD_S = 10


class Injected(ReferenceTask):
    """Writes ``<folder>/rows``: time, pid, rank and step of each batch that begins; and ``<folder>/mark``: the fault.

    An empty file ``<folder>/joined-<rank>-<pid>`` shows that a process has joined.

    A fault of a server is that of its optimizer or schedule, or a signal that trainer 0 sends at that moment.

    Args:
        folder: of these files.
        fault: ``kill``, ``stop_10s``, ``stop``, ``hold``, ``raise``, ``exit`` or ``disk``; None for none.
        target: the rank that it befalls; -1 for the supervisor.
        phase: ``joining``, ``first_step``, ``mid_step``, ``validation``, ``checkpoint`` or ``shutdown``.
        compute_s: seconds that each batch takes.
        after: a pattern of a file in the folder, for which the fault waits.
    """

    def __init__(self, folder, fault=None, target=0, phase="mid_step", compute_s=0.01, after=None, **options):
        super().__init__(**options)
        self.folder = Path(folder)
        self.fault, self.target, self.phase, self.compute_s = fault, target, phase, compute_s
        self.after = after
        self.rank = int(sys.argv[sys.argv.index("--rank") + 1]) if "--rank" in sys.argv else None
        self.updates = 0

    # Where it fires.

    def _reach(self, phase):
        """In a process of the run, at a phase: fire the fault if it belongs here and has not fired."""
        if phase != self.phase or self.fault is None or (self.folder / "mark").exists():
            return
        if self.rank == self.target:
            self._fire(os.getpid())
        elif self._fires_for_another(phase):
            if self.target == -1:
                self._fire(os.getppid())
            elif (process := ranks_of(os.getppid()).get(self.target)) is not None:  # a server may fire it just now
                self._fire(process.pid)

    def _fires_for_another(self, phase):
        by_signal = self.fault in SIGNALS or self.fault == "disk"
        if phase == "joining":
            return self.target == -1 and self._trainer_index() == 1
        return by_signal and self._targets_no_trainer() and self._trainer_index() == 0

    def _trainer_index(self):
        return getattr(getattr(self, "trainer", None), "trainer_index", None)

    def _targets_no_trainer(self):
        return self.target < self.config.cluster.num_servers if self.config.mode == "rpc" else self.target == -1

    def _fire(self, pid):
        if self.after is not None:
            poll_until(time.monotonic() + 30, lambda: any(self.folder.glob(self.after)) or None, Event())
        try:
            mark = os.open(self.folder / "mark", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(mark, json.dumps({"time": time.time(), "pid": pid, "by": os.getpid()}).encode() + b"\n")
        os.close(mark)
        if self.fault in SIGNALS:
            os.kill(pid, SIGNALS[self.fault])
        elif self.fault == "hold":
            ctypes.PyDLL(None).usleep(HOLD_S * 1_000_000)  # keeps the interpreter's lock
        elif self.fault == "raise":
            raise RuntimeError("the injected error")
        elif self.fault == "exit":
            os._exit(7)
        else:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))

    # The hooks of each phase.

    def build_model(self):
        joined = self.folder / f"joined-{self.rank}-{os.getpid()}"
        if not joined.exists():  # otherwise in another generation
            joined.touch()
        self._reach("joining")
        return super().build_model()

    def build_optimizer(self, model):
        optimizer = super().build_optimizer(model)
        if self._trainer_index() is None:
            optimizer.__class__ = type(optimizer.__class__.__name__, (Observed, optimizer.__class__), {"task": self})
            # A hook, as an optimizer with a ``state_dict`` of its own is refused with several servers.
            optimizer.register_state_dict_pre_hook(lambda _: self._reach("checkpoint"))
        return optimizer

    def build_scheduler(self, optimizer):
        return {"scheduler": SteppedByValidations(optimizer, self), "every": "validation"}

    def _update(self):
        self.updates += 1
        if self.updates - 1 in (FIRST_BATCH, MIDDLE_BATCH):
            self._reach("first_step" if self.updates - 1 == FIRST_BATCH else "mid_step")

    def on_batch_start(self, batch_idx):
        row = f"{time.time()} {os.getpid()} {self.rank} {self.trainer.step}\n"
        with (self.folder / "rows").open("a") as file:
            file.write(row)

    def training_step(self, model, batch, batch_idx):
        time.sleep(self.compute_s)  # stands for work, and leaves the cores to the other runs
        if batch_idx == FIRST_BATCH:
            self._reach("first_step")
        loss = super().training_step(model, batch, batch_idx)
        if batch_idx == MIDDLE_BATCH:
            loss.register_hook(lambda _: self._reach("mid_step"))  # inside the backward
        return loss

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        self._reach("validation")
        return super().validation_step(model, batch, valid_batch_idx, batch_idx)

    def on_checkpoint(self, state):
        self._reach("checkpoint")

    def on_train_end(self):
        self._reach("shutdown")


class Observed:
    """A server's optimizer, whose steps are phases."""

    updates_each = "element"  # it is still one of torch's

    def step(self, closure=None):
        self.task._update()
        return super().step(closure)


class SteppedByValidations(torch.optim.lr_scheduler.LambdaLR):
    """Keeps the learning rate; a step of it, after its own start, is a validation on the server."""

    def __init__(self, optimizer, task):
        self.task = None
        super().__init__(optimizer, lambda _: 1.0)
        self.task = task

    def step(self, *arguments):
        if self.task is not None and self.task._trainer_index() is None:
            self.task._reach("validation")
        super().step(*arguments)

    def state_dict(self):
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state):
        self.last_epoch = state["last_epoch"]


class InjectedLarge(Injected):
    """With tensors that are large enough to be stored where they were copied, in a checkpoint in memory."""

    def build_model(self):
        model = super().build_model()
        model.first = nn.Sequential(nn.Linear(4 * 36, 256), nn.Linear(256, 16))
        return model

    def build_optimizer(self, model):
        return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)

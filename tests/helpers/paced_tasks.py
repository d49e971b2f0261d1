"""Tasks whose batches take long, and of which a process dies once."""

import os
import signal

import torch
from ddp_fault_tasks import FaultAtBatch
from tasks import KillsItsServer, Slow


class PacedKillsItsServer(Slow, KillsItsServer):
    """The server is killed at its sixth step, once."""

    def build_scheduler(self, optimizer):
        def rate(step):
            if step == 6 and not self.mark.exists():
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return 1.0

        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


class PacedFaultAtBatch(Slow, FaultAtBatch):
    """Trainer 1 is killed at a batch."""

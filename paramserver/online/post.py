"""What the source of a trainer must know to receive samples."""

from __future__ import annotations

from dataclasses import dataclass

from paramserver.online.plan import Plan


@dataclass(frozen=True)
class Post:
    """The place of one trainer in an online run.

    Attributes:
        desk: address of the desk: ``tcp://host:port``.
        token: secret of the run, which the desk made.
        plan: what is sent.
        trainer_index: which trainer this is.
        trainers: how many there are.
        host: the address of this machine on which clients reach the trainer.
        timeout_s: how long the desk may be silent.
    """

    desk: str
    token: bytes
    plan: Plan
    trainer_index: int
    trainers: int
    host: str = "127.0.0.1"
    timeout_s: float = 60.0

    @property
    def keys(self) -> str | None:
        """Folder of the run's keys; None = without, on loopback."""
        return self.plan.config.keys

"""The limits of the waits of a run that follow from its config."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from paramserver.config.schema import Config

SILENT_SHARE = 0.7
"""A supervisor asks a rank for its stacks after this share of ``server.lost_after_s`` without a sign of life."""

START_GRACE_S = 5.0
"""Until a rank reports signs of life, the CPU time that it takes is one; for so much longer it may take none.

It imports torch then, which may hold the interpreter's lock for seconds and may come from a slow disk.
"""

GRACE_S = 5.0
"""For a rank to end after it could have noticed a failure elsewhere."""

HURRY_S = 1.0
"""After the limit of a request to stop, for a hook that may be about to return."""

SAME_SIGNAL_S = 1.0
"""A launcher and a supervisor may both send the one signal of a user or a scheduler, within this time."""

END_S = 10.0
"""For a rank to end after the run has."""

FROZEN_S = 2.0
"""TCPStore ends its own waits, except where its host is frozen. They are abandoned this much later."""

LAST_WRITE_S = 600.0
"""For the last checkpoint of a run, which is written while no other process is left."""


def _limit(text: str) -> float:
    limit: float = field(metadata={"text": text})
    return limit


@dataclass(frozen=True)
class Deadlines:
    """Seconds after which each kind of wait ends. ``of`` derives them from a config."""

    heartbeat_s: float = _limit("between two heartbeats of a process")
    silent_s: float = _limit("without a heartbeat, a process counts as lost (server.lost_after_s)")
    stacks_s: float = _limit("without a sign of life, a rank writes its stacks to its log")
    starting_s: float = _limit("without CPU time while it starts, a rank of the supervisor is ended")
    wait_s: float = _limit(
        "for all ranks to join, for an answer, and for a lost process to be replaced (cluster.timeout_s)"
    )
    store_s: float = _limit("for an answer of the store of rank 0 whose host is frozen")
    join_s: float = _limit(
        "for the answer to a trainer that joins, which may wait for the loss of another to be noticed"
    )
    failed_s: float = _limit("after a rank failed, the supervisor ends those that have not ended")
    ended_s: float = _limit("after the end of the run, the supervisor ends ranks that have not ended")
    last_write_s: float = _limit("for the last checkpoint and the last simulations, if rank 0 is the only rank left")

    @classmethod
    def of(cls, config: Config) -> Deadlines:
        silent_s, wait_s = config.server.lost_after_s, config.cluster.timeout_s
        simulations_s = 0.0 if config.simulations is None else config.simulations.timeout_s
        return cls(
            heartbeat_s=config.server.heartbeat_s,
            silent_s=silent_s,
            stacks_s=silent_s * SILENT_SHARE,
            starting_s=silent_s + START_GRACE_S,
            wait_s=wait_s,
            store_s=wait_s + FROZEN_S,
            join_s=wait_s + silent_s + config.server.heartbeat_s,
            failed_s=silent_s + GRACE_S,
            ended_s=silent_s + END_S,
            last_write_s=LAST_WRITE_S + silent_s + END_S + simulations_s,
        )

    def texts(self) -> dict[str, tuple[float, str]]:
        """Return the seconds and the meaning of each deadline, by name."""
        return {one.name: (getattr(self, one.name), one.metadata["text"]) for one in fields(self)}

"""How far a trainer has come: part of what it stores in a checkpoint."""

from dataclasses import dataclass


@dataclass
class Counters:
    """``batch_idx`` is the next batch's; ``seconds`` are those of training before this process resumed the run.

    ``steps`` are the steps that this trainer has made or waited for.
    """

    batch_idx: int = 0
    samples_served: int = 0
    epoch: int = 0
    epoch_open: bool = False
    seconds: float = 0.0
    steps: int = 0

"""Optimizer steps on the server and its shards, and the DistributedOptimizer of the trainers."""

from typing import TYPE_CHECKING

from paramserver._lazy import attach

if TYPE_CHECKING:
    from paramserver.optim.row_wise_adagrad import RowWiseAdagrad as RowWiseAdagrad
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)

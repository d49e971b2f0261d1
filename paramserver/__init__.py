"""A parameter-server trainer on torch.distributed.rpc. Names load on first use, so that importing costs nothing."""

from typing import TYPE_CHECKING

from paramserver.first_use import on_first_use
from paramserver.version import __version__

if TYPE_CHECKING:
    from paramserver.api import run
    from paramserver.errors import TrainingError, UnsupportedConfiguration
    from paramserver.launch import Result
    from paramserver.roles import rank_zero_only
    from paramserver.server import ParameterServer
    from paramserver.sources.base import Partition
    from paramserver.task import Task

_HOMES = {
    "ParameterServer": "server",
    "Partition": "sources.base",
    "Result": "launch",
    "Task": "task",
    "TrainingError": "errors",
    "UnsupportedConfiguration": "errors",
    "rank_zero_only": "roles",
    "run": "api",
}

__all__ = [
    "ParameterServer",
    "Partition",
    "Result",
    "Task",
    "TrainingError",
    "UnsupportedConfiguration",
    "__version__",
    "rank_zero_only",
    "run",
]

__getattr__ = on_first_use(__name__, _HOMES)

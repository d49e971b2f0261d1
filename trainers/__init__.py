"""How a step is done in each mode. Made to be subclassed; named in the config as ``trainer: module:Class``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.base import Trainer
    from trainers.ddp import DdpTrainer
    from trainers.local import LocalTrainer
    from trainers.rpc import RpcTrainer
    from trainers.served import ServedTrainer

__all__ = ["DdpTrainer", "LocalTrainer", "RpcTrainer", "ServedTrainer", "Trainer"]

_HOMES = {
    "Trainer": "base",
    "DdpTrainer": "ddp",
    "LocalTrainer": "local",
    "RpcTrainer": "rpc",
    "ServedTrainer": "served",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

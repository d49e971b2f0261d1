"""How a step is done in each mode. Made to be subclassed; named in the config as ``trainer: module:Class``."""

from typing import TYPE_CHECKING

from paramserver.first_use import on_first_use

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

__getattr__ = on_first_use(__name__, _HOMES)

"""The trainers of each mode, made to be subclassed; a config names another as ``trainer: module:Class``."""

from typing import TYPE_CHECKING

from paramserver._lazy import attach

if TYPE_CHECKING:
    from trainers.base import Trainer as Trainer
    from trainers.ddp import DdpTrainer as DdpTrainer
    from trainers.local import LocalTrainer as LocalTrainer
    from trainers.rpc import RpcTrainer as RpcTrainer
    from trainers.server_forward import ServedTrainer as ServedTrainer
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)

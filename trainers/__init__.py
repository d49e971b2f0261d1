"""The trainers of each mode, made to be subclassed; a config names another as ``trainer: module:Class``."""

from typing import TYPE_CHECKING

from paramserver._lazy import attach

if TYPE_CHECKING:
    from paramserver.trainers.base import Trainer as Trainer
    from paramserver.trainers.ddp import DdpTrainer as DdpTrainer
    from paramserver.trainers.local import LocalTrainer as LocalTrainer
    from paramserver.trainers.rpc import RpcTrainer as RpcTrainer
    from paramserver.trainers.server_forward import ServedTrainer as ServedTrainer
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
    if __name__ == "trainers":
        # The top folder of a checkout is on sys.path, and this name was imported before paramserver.
        import sys
        from importlib import import_module
        from pathlib import Path

        from paramserver._trainers import FORMER_FOLDERS

        FORMER_FOLDERS.add(Path(__file__).resolve().parent)
        del sys.modules[__name__]
        import_module(__name__)

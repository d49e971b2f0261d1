"""A parameter-server trainer on torch.distributed.rpc. Names are imported on first use, so that importing is cheap."""

from typing import TYPE_CHECKING

from paramserver._commands import install_command_modules
from paramserver._lazy import attach
from paramserver._trainers import install_finder

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paramserver.api import Result as Result, run as run
    from paramserver.context import rank_zero_only as rank_zero_only
    from paramserver.errors import TrainingError as TrainingError, UnsupportedConfiguration as UnsupportedConfiguration
    from paramserver.server.parameter_server import ParameterServer as ParameterServer
    from paramserver.sources.base import Partition as Partition
    from paramserver.subscriber import Subscriber as Subscriber
    from paramserver.task import Callback as Callback, Task as Task
else:
    install_finder()
    install_command_modules()
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
    __all__ = sorted([*__all__, "__version__"])

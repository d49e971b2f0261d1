"""Who receives the records of a run. Names load on first use: TensorBoard and tqdm only where they are wanted."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paramserver.sinks.base import Fan, Record, Sink
    from paramserver.sinks.jsonlines import JsonLines
    from paramserver.sinks.progress import Progress
    from paramserver.sinks.tensorboard import TensorBoard

_HOMES = {
    "Fan": "base",
    "Record": "base",
    "Sink": "base",
    "JsonLines": "jsonlines",
    "Progress": "progress",
    "TensorBoard": "tensorboard",
}

__all__ = ["Fan", "JsonLines", "Progress", "Record", "Sink", "TensorBoard"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

"""Who receives the records of a run. Names load on first use: TensorBoard and tqdm only where they are wanted."""

from typing import TYPE_CHECKING

from paramserver.first_use import on_first_use

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

__getattr__ = on_first_use(__name__, _HOMES)

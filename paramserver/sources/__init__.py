"""Where samples come from: a data set, an iterable, simulations, other programs. Names load on first use."""

from typing import TYPE_CHECKING

from paramserver.first_use import on_first_use

if TYPE_CHECKING:
    from paramserver.sources.base import Leftover, Partition, Source
    from paramserver.sources.dataset import DatasetSource
    from paramserver.sources.factory import make_source
    from paramserver.sources.feeder import Feeder
    from paramserver.sources.iterable import IterableSource
    from paramserver.sources.share import Share, deal
    from paramserver.sources.stream import Simulations, Stream

_HOMES = {
    "DatasetSource": "dataset",
    "Feeder": "feeder",
    "IterableSource": "iterable",
    "Leftover": "base",
    "Partition": "base",
    "Share": "share",
    "Simulations": "stream",
    "Source": "base",
    "Stream": "stream",
    "deal": "share",
    "make_source": "factory",
}

__all__ = [
    "DatasetSource",
    "Feeder",
    "IterableSource",
    "Leftover",
    "Partition",
    "Share",
    "Simulations",
    "Source",
    "Stream",
    "deal",
    "make_source",
]

__getattr__ = on_first_use(__name__, _HOMES)

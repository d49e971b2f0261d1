"""Where samples come from: a data set, an iterable."""

from __future__ import annotations

from paramserver.sources.base import Partition, Source
from paramserver.sources.dataset import DatasetSource, deal
from paramserver.sources.factory import make_source
from paramserver.sources.feeder import Feeder
from paramserver.sources.iterable import IterableSource

__all__ = ["DatasetSource", "Feeder", "IterableSource", "Partition", "Source", "deal", "make_source"]

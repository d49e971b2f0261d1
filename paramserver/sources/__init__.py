"""Sample sources: a data set, an iterable or running simulations, and the feeder thread that fills a buffer."""

from typing import TYPE_CHECKING

from paramserver._lazy import attach

if TYPE_CHECKING:
    from paramserver.sources.base import Partition as Partition, ResumePosition as ResumePosition, Source as Source
    from paramserver.sources.dataset import (
        DatasetSource as DatasetSource,
        PartitionOrder as PartitionOrder,
        deal as deal,
    )
    from paramserver.sources.factory import make_source as make_source
    from paramserver.sources.feeder import Feeder as Feeder
    from paramserver.sources.iterable import IterableSource as IterableSource
    from paramserver.sources.stream import Simulations as Simulations, Stream as Stream
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)

"""Records of a run and the sinks that receive them. TensorBoard and tqdm are imported only if used."""

from typing import TYPE_CHECKING

from paramserver._lazy import attach

if TYPE_CHECKING:
    from paramserver.metrics.prometheus import Prometheus as Prometheus
    from paramserver.metrics.sinks import (
        FanOut as FanOut,
        JsonLines as JsonLines,
        Record as Record,
        Sink as Sink,
        make_sinks as make_sinks,
    )
    from paramserver.metrics.tensorboard import Csv as Csv, TensorBoard as TensorBoard, scalars as scalars
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)

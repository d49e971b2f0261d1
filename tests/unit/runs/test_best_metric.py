"""The value that ``checkpoint.best`` follows."""

import pytest

from paramserver.config import CheckpointConfig, Config
from paramserver.config.schema import BestConfig
from paramserver.errors import TaskError
from paramserver.metrics import FanOut
from paramserver.metrics.records import WeightedSums
from paramserver.runs.monitor import RunMonitor


@pytest.mark.parametrize(
    ("values", "samples", "sentence"),
    [
        ({"loss": 0.5}, 2, "it returns loss; return it there, in a LightningModule by self.log in validation_step: "),
        ({}, 2, "it returns nothing; return it there, in a LightningModule by self.log in validation_step: "),
        ({}, 0, "it returns nothing: validation_source gave no samples"),
    ],
)
def test_a_metric_that_a_validation_lacks_is_named_with_the_cure(tmp_path, values, samples, sentence):
    config = Config(checkpoint=CheckpointConfig(best=BestConfig(metric="f1", mode="max")))
    monitor, sums = RunMonitor(config, FanOut([]), tmp_path / "summary.json"), WeightedSums()
    sums.add(values, samples)
    with pytest.raises(TaskError, match=f"checkpoint.best.metric .f1. must be among .*; {sentence}"):
        monitor.record_validation(1, sums)

"""What a task may return as its data."""

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from paramserver.config import Config, TrainingConfig
from paramserver.errors import TaskError
from paramserver.sources import Partition, make_source

NUMBERS = [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (SequentialSampler(NUMBERS), "train_source returned SequentialSampler, a sampler; return the data set"),
        (BatchSampler(SequentialSampler(NUMBERS), 2, drop_last=False), "train_source returned BatchSampler, a sampler"),
        (3, "train_source returned int; it must return a map-style data set"),
    ],
)
def test_what_is_no_data_set_is_refused(data, message):
    with pytest.raises(TaskError, match=f"^{message}"):
        make_source(data, Partition(0, 1), Config(training=TrainingConfig(max_steps=3)))

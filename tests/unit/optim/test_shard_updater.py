"""The factor by which a stale gradient is multiplied."""

import pytest

from paramserver.errors import UnsupportedConfiguration
from paramserver.optim.shard_updater import staleness_factor


@pytest.mark.parametrize(("staleness", "inverse"), [(0, 1.0), (1, 0.5), (3, 0.25), (9, 0.1)])
def test_a_stale_gradient_is_scaled_by_the_rule(staleness, inverse):
    assert staleness_factor(staleness, "inverse") == inverse
    assert staleness_factor(staleness, "none") == 1.0


def test_a_rule_that_is_not_there_is_refused():
    with pytest.raises(UnsupportedConfiguration, match=r"stale_scaling \(linear\) must be none or inverse"):
        staleness_factor(1, "linear")

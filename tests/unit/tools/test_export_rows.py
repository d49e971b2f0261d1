"""What a file of the rows that have changed holds: ``paramserver export --rows_since``."""

import pytest
import torch

from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.export import _content


@pytest.mark.parametrize("name", ["step", "table.weight.rows", "a.values"])
def test_a_tensor_with_the_name_of_another_entry_is_refused(name):
    weights = {"a": torch.zeros(3, 1), name: torch.tensor([7]), "table.weight": torch.zeros(4, 2)}
    with pytest.raises(UnsupportedConfiguration, match=f"writes an entry {name} of its own"):
        _content(100, weights, {"table.weight": torch.tensor([1]), "a": torch.tensor([0])})

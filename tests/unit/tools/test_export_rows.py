"""What a file of the rows that have changed holds: ``paramserver export --rows_since``."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.export import _content


@pytest.mark.parametrize("name", ["step", "table.weight.rows", "a.values"])
def test_a_tensor_with_the_name_of_another_entry_is_refused(name):
    weights = {"a": torch.zeros(3, 1), name: torch.tensor([7]), "table.weight": torch.zeros(4, 2)}
    with pytest.raises(UnsupportedConfiguration, match=f"writes an entry {name} of its own"):
        _content(100, weights, {"table.weight": torch.tensor([1]), "a": torch.tensor([0])})


def test_the_program_of_the_documentation_takes_over_every_tensor():
    text = (Path(__file__).parents[3] / "docs/tables.md").read_text()
    program = re.search(r"```python\nnew = np.load.*?\n(.*?)```", text, re.DOTALL)[1]
    model = nn.ModuleDict({name: nn.Embedding(4, 2) for name in "ab"})
    model["b"].weight = model["a"].weight
    model["dense"], model["empty"] = nn.BatchNorm1d(3), nn.Embedding(4, 0)
    weights = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    model["a"].weight.data[1:3] += 1.0
    model["dense"].weight.data += 1.0
    changed = {"a.weight": torch.tensor([1, 2]), "empty.weight": torch.tensor([3])}
    content = _content(100, model.state_dict(), changed)
    exec(program, {"weights": weights, "new": {name: value.numpy() for name, value in content.items()}})
    assert weights.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(torch.from_numpy(weights[name]), value), name

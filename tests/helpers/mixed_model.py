"""A model whose parameters differ in dtype, layout and size."""

import torch
from torch import nn


class MixedModel(nn.Module):
    """Two dtypes or, with a complex parameter, three; channels_last, a scalar, one without elements, large ones."""

    def __init__(self, has_complex=False):
        super().__init__()
        self.conv = nn.Conv2d(8, 12, 3).to(memory_format=torch.channels_last)
        self.large = nn.Parameter(torch.randn(600, 64).t())
        self.narrow = nn.Linear(64, 33).bfloat16()
        if has_complex:
            self.waves = nn.Parameter(torch.randn(9000, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0))
        self.linear = nn.Linear(300, 77)

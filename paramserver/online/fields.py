"""What a sample of a simulation must be: its fields, declared beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paramserver.errors import UnsupportedConfiguration
from paramserver.online.messages import DTYPES, Shaped

RESERVED = ("simulation", "step", "parameters")
"""What a sample holds beside its fields; no field may be called so."""

_KEYS = ("shape", "dtype", "finite")


@dataclass(frozen=True)
class Field:
    """One array of every sample.

    Attributes:
        name: its key in a sample.
        dtype: as numpy writes it, little-endian: ``<f4``.
        shape: of a whole sample.
        finite: refuse what holds a NaN or an infinity.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    finite: bool = False

    @property
    def shaped(self) -> Shaped:
        return Shaped(self.name, self.dtype, self.shape)


def read_fields(declared: Mapping[str, Any]) -> tuple[Field, ...]:
    """The fields that ``simulations.fields`` declares.

    ``name: [100, 100]`` is float32 of this shape; ``name: {shape: [100, 100], dtype: float64, finite: true}`` says all.

    Raises:
        UnsupportedConfiguration: none, a name that is taken, a key, shape or dtype that is none.
    """
    if not declared:
        raise UnsupportedConfiguration(
            "simulations.fields must name what a sample holds; for example {temperature: [100, 100]}"
        )
    return tuple(_read_field(str(name), value) for name, value in declared.items())


def _read_field(name: str, value: Any) -> Field:
    key = f"simulations.fields.{name}"
    if name in RESERVED:
        raise UnsupportedConfiguration(f"{key} must not be one of {', '.join(RESERVED)}; rename it")
    options = value if isinstance(value, Mapping) else {"shape": value}
    unknown = [option for option in options if option not in _KEYS]
    if unknown:
        raise UnsupportedConfiguration(f"{key}.{unknown[0]} is no key; known are {', '.join(_KEYS)}")
    finite = options.get("finite", False)
    if not isinstance(finite, bool):
        raise UnsupportedConfiguration(f"{key}.finite ({finite}) must be true or false")
    return Field(name, _dtype(key, options.get("dtype", "float32")), _shape(key, options.get("shape")), finite)


def _dtype(key: str, word: Any) -> str:
    try:
        name: str = np.dtype(word).newbyteorder("<").str
    except TypeError:
        name = ""
    if name not in DTYPES:
        raise UnsupportedConfiguration(f"{key}.dtype ({word}) must be bool, an integer or a float; for example float32")
    return name


def _shape(key: str, sizes: Any) -> tuple[int, ...]:
    if isinstance(sizes, Sequence) and not isinstance(sizes, str) and all(type(n) is int and n > 0 for n in sizes):
        return tuple(sizes)
    raise UnsupportedConfiguration(f"{key}.shape ({sizes}) must be a list of positive whole numbers; [] is one number")

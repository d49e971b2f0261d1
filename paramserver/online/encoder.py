"""A sample as frames, checked against what the run declared before any of it leaves.

Numbers that a client is given: of simulations, steps and processes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserver.errors import ClientError
from paramserver.online.protocol import ArrayDescriptor, describe


class SampleEncoder:
    """Packs the samples of one member.

    Args:
        declared: the fields of a whole sample.
        members: processes of the simulation's group. With more than one, each array is this member's part of the field
            along the first dimension.
    """

    def __init__(self, declared: Sequence[ArrayDescriptor], members: int) -> None:
        self._declared = {field.name: field for field in declared}
        self._dtypes = {field.name: np.dtype(field.dtype) for field in declared}
        self._members = members
        self._described: dict[tuple[tuple[int, ...], ...], bytes] = {}

    def pack(self, fields: Mapping[str, Any]) -> list[Any]:
        """The descriptor and one frame for each field, which are views of the arrays where these lie as they travel.

        Raises:
            ClientError: a field is missing or unknown, or has another shape, or a dtype or value that does not fit.
        """
        if fields.keys() != self._declared.keys():
            self._refuse_names(fields)
        arrays = [self._fitted(field, fields[name]) for name, field in self._declared.items()]
        shapes = tuple([array.shape for array in arrays])
        if shapes not in self._described:
            self._described = {shapes: describe(dict(zip(self._declared, arrays, strict=True)))}
        # The dtypes that are declared are all little-endian, so what lies in C order lies as it travels.
        return [self._described[shapes], *[np.ascontiguousarray(array).data for array in arrays]]

    def _refuse_names(self, fields: Mapping[str, Any]) -> None:
        unknown = [name for name in fields if name not in self._declared]
        if unknown:
            raise ClientError(
                f"field ({unknown[0]}) must be one of {', '.join(self._declared)}; rename or leave it out"
            )
        missing = [name for name in self._declared if name not in fields]
        raise ClientError(f"field ({missing[0]}) must be in every sample, it is missing; send it too")

    def _fitted(self, field: ArrayDescriptor, value: Any) -> npt.NDArray[Any]:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ClientError(f"field {field.name} must be an array of numbers ({error}); convert it") from error
        self._check_shape(field, array.shape)
        wanted = self._dtypes[field.name]
        return array if array.dtype == wanted else _cast(field.name, array, wanted)

    def _check_shape(self, field: ArrayDescriptor, shape: tuple[int, ...]) -> None:
        if self._members == 1:
            if shape != field.shape:
                raise ClientError(
                    f"field {field.name} must have the shape {field.shape}, this one has {shape}; reshape it"
                )
            return
        fits = len(shape) == len(field.shape) > 0 and shape[1:] == field.shape[1:] and 0 < shape[0] <= field.shape[0]
        if not fits:
            raise ClientError(
                f"field {field.name} must be a part of the shape {field.shape} along its first dimension, this one has "
                f"{shape}; send this member's part"
            )


def _cast(name: str, array: npt.NDArray[Any], wanted: np.dtype[Any]) -> npt.NDArray[Any]:
    """The same numbers in the dtype that was declared; what is rounded may lose digits, not its size."""
    if not np.can_cast(array.dtype, wanted, casting="same_kind"):
        raise ClientError(f"field {name} must be {wanted}, {array.dtype} does not become that by itself; convert it")
    if np.can_cast(array.dtype, wanted, casting="safe"):
        return array.astype(wanted)
    with np.errstate(over="ignore"):
        cast = array.astype(wanted)
    kept = np.isfinite(cast) == np.isfinite(array) if wanted.kind == "f" else cast == array
    if not np.all(kept):
        value = array.reshape(-1)[int(np.argmin(kept))]
        raise ClientError(f"field {name} ({value}) must fit into {wanted}; scale it, or declare a larger dtype")
    return cast


# Below these, as a header holds them.
_MOST = {"simulation_id": 2**63, "step": 2**63, "member": 65535, "members": 65536, "attempt": 2**32}


def whole(name: str, value: Any, least: int = 0) -> int:
    """The number.

    Raises:
        ClientError: no whole number, or one that no header holds.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not least <= number < _MOST[name]:
        raise ClientError(f"{name} ({value}) must be a whole number from {least}, below {_MOST[name]}; correct it")
    return number


class SentSteps:
    """Which steps of a simulation were sent: all below ``_low``, and those ahead of it."""

    def __init__(self) -> None:
        self._low = 0
        self._ahead: set[int] = set()

    def check(self, step: Any, steps: int | None) -> int:
        """The number of a step that may be sent.

        Args:
            step: which.
            steps: how many the simulation has; None = not known.

        Raises:
            ClientError: it is none, beyond the last, or was sent.
        """
        number = whole("step", step)
        if steps is not None and number >= steps:
            raise ClientError(f"step ({number}) must be below the steps of a simulation ({steps}); count from 0")
        if number < self._low or number in self._ahead:
            raise ClientError(f"step ({number}) must be sent once, it was sent before; number the samples")
        return number

    def add(self, number: int) -> None:
        self._ahead.add(number)
        while self._low in self._ahead:
            self._ahead.remove(self._low)
            self._low += 1

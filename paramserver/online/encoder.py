"""The client's checks before anything is sent: ``SampleEncoder`` for arrays, ``SentSteps`` for step numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserver.errors import ClientError
from paramserver.online.protocol import VERSION_ROW, ArrayDescriptor, pack_descriptor


class SampleEncoder:
    """Encodes the samples of one member as frames, checked against the fields that the run declares.

    ``declared`` are the fields of a whole sample. With more than one member, each array is this member's part of the
    field along the first dimension. What is ``optional`` a sample may have in addition, each member the whole of it.
    """

    def __init__(
        self, declared: Sequence[ArrayDescriptor], members: int, optional: Sequence[ArrayDescriptor] = ()
    ) -> None:
        self._declared = {field.name: field for field in declared}
        self._optional = {field.name: field for field in optional}
        self._dtypes = {field.name: np.dtype(field.dtype) for field in (*declared, *optional)}
        self._members = members
        self._descriptors: dict[tuple[Any, ...], bytes] = {}

    def add_version(self, fields: Mapping[str, Any], version: Any) -> Mapping[str, Any]:
        """Return the fields with the version of the weights with which the sample was made.

        Raises:
            ClientError: it is no version, or the run takes none, or must be given one.
        """
        name = VERSION_ROW.name
        if version is None:
            if self._declared.get(name) == VERSION_ROW and name not in fields:
                raise ClientError(
                    "version (None) must be given, as this run has buffer.max_staleness; give the weights.version of "
                    "its Subscriber"
                )
            return fields
        if VERSION_ROW not in (self._declared.get(name), self._optional.get(name)):
            raise ClientError(
                f"version ({version}) must be left out, as this run takes none: it has no section publish"
            )
        return {**fields, name: [*check_version(version)]}

    def encode(self, fields: Mapping[str, Any]) -> list[Any]:
        """Return the descriptor and one frame per field. The frames are views of the arrays, copied only to convert.

        Raises:
            ClientError: a field is missing or unknown, or its shape, dtype or value does not fit.
        """
        given = self._declared
        if fields.keys() != given.keys():
            given = given | {name: field for name, field in self._optional.items() if name in fields}
            if fields.keys() != given.keys():
                self._refuse_names(fields)
        arrays = [self._convert(field, fields[name]) for name, field in given.items()]
        form = (*given, *[array.shape for array in arrays])
        # One entry: the samples of a member nearly always have the same shapes.
        if form not in self._descriptors:
            self._descriptors = {form: pack_descriptor(dict(zip(given, arrays, strict=True)))}
        # All declared dtypes are little-endian, so an array in C order has the bytes of the message.
        return [self._descriptors[form], *[np.ascontiguousarray(array).data for array in arrays]]

    def _refuse_names(self, fields: Mapping[str, Any]) -> None:
        unknown = [name for name in fields if name not in self._declared | self._optional]
        if unknown:
            raise ClientError(
                f"field ({unknown[0]}) must be one of {', '.join(self._declared)}; rename or leave it out"
            )
        missing = [name for name in self._declared if name not in fields]
        raise ClientError(f"field ({missing[0]}) must be in every sample, it is missing; send it too")

    def _convert(self, field: ArrayDescriptor, value: Any) -> npt.NDArray[Any]:
        if np.ma.is_masked(value):
            raise ClientError(f"field {field.name} must have no masked values, whose numbers mean nothing; fill them")
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ClientError(f"field {field.name} must be an array of numbers ({error}); convert it") from error
        self._check_shape(field, array.shape)
        dtype = self._dtypes[field.name]
        return array if array.dtype == dtype else _cast(field.name, array, dtype)

    def _check_shape(self, field: ArrayDescriptor, shape: tuple[int, ...]) -> None:
        if self._members == 1 or field.name in self._optional:
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


def _cast(name: str, array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The same numbers in the declared dtype. Rounding may lose digits; a number that does not fit is an error."""
    # Whole numbers and booleans are compared below, whichever of them is signed.
    is_whole = array.dtype.kind in "biu" and dtype.kind in "biu"
    if not (is_whole or np.can_cast(array.dtype, dtype, casting="same_kind")):
        raise ClientError(f"field {name} must be {dtype}, {array.dtype} is not converted to it implicitly; convert it")
    if np.can_cast(array.dtype, dtype, casting="safe"):
        return array.astype(dtype)
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    fits = np.isfinite(cast) == np.isfinite(array) if dtype.kind == "f" else cast == array
    if not np.all(fits):
        value = array.reshape(-1)[int(np.argmin(fits))]
        raise ClientError(f"field {name} ({value}) must fit into {dtype}; scale it, or declare a larger dtype")
    return cast


# Exclusive upper bounds, from the widths of the header's fields.
_LIMITS = {
    "simulation_id": 2**63,
    "step": 2**63,
    "generation": 2**63,
    "member": 65535,
    "members": 65536,
    "attempt": 2**32,
}


def check_integer(name: str, value: Any, least: int = 0) -> int:
    """Return ``value`` as an integer that the header can hold.

    Raises:
        ClientError: it is no whole number, or out of range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not least <= number < _LIMITS[name]:
        raise ClientError(f"{name} ({value}) must be a whole number from {least}, below {_LIMITS[name]}; correct it")
    return number


def check_timeout(value: Any, above_zero: bool = False) -> None:
    """Check a number of seconds.

    Raises:
        ClientError: it is none, too small, or not finite.
    """
    if not (isinstance(value, Real) and 0 <= float(value) < math.inf and (value or not above_zero)):
        rule = "above" if above_zero else "at least"
        raise ClientError(f"timeout_s ({value!r}) must be a number of seconds, {rule} 0 and finite; correct it")


def check_version(value: Any) -> tuple[int, int]:
    """Return generation and step of a version of the model.

    Raises:
        ClientError: it is none.
    """
    try:
        generation, step = value
    except (TypeError, ValueError):
        raise ClientError(
            f"version ({value}) must be a pair of generation and step; give the weights.version of a Subscriber"
        ) from None
    return check_integer("generation", generation), check_integer("step", step)


class SentSteps:
    """The steps of a simulation that were sent. Steps sent in order take constant memory."""

    def __init__(self) -> None:
        # All steps below _low were sent, and those in _ahead.
        self._low = 0
        self._ahead: set[int] = set()

    def check(self, step: Any, steps: int | None) -> int:
        """Return the number of a step that may be sent. The simulation has so many ``steps``; None = not known.

        Raises:
            ClientError: it is no number, beyond the last step, or was sent before.
        """
        number = check_integer("step", step)
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

"""The parameters of a version as a trainer loaded them: changes that a task makes to them are refused by name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paramserver.errors import TaskError
from paramserver.parameters.numerics import checksums

# A change through ``data`` shows in the values only. To compare these in each step would cost up to a tenth of it.
_FIRST_WITH_VALUES = 8
_VALUES_EVERY = 64


class LoadedParameters:
    """Notices that a task changes trained parameters, which belong to the servers: the next version would replace it.

    An operation in place and an assignment of ``data`` are noticed in the step in which they happen. A change through
    ``data`` in place (``p.data.clamp_(-1, 1)``) is noticed where values are compared: in the first steps of a process,
    in each 64th, and around the hooks between steps.

    Args:
        parameters: the trained ones of the model, by name.
        owned: their memory is that of this process alone. A change that is undone, as by an optimizer of the task that
            looks at neighbouring points, is then none; in memory of the server other trainers might have read it.

    Example::

        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> loaded = LoadedParameters({"weight": weight}, owned=True)
        >>> loaded.note()
        >>> loaded.check()
        >>> _ = weight.data.clamp_(-0.1, 0.1)
        >>> loaded.check()
        Traceback (most recent call last):
        paramserver.errors.TaskError: parameter weight was changed by the task, and belongs to the servers: ...
    """

    def __init__(self, parameters: Mapping[str, Tensor], owned: bool) -> None:
        self._parameters = dict(parameters)
        self._owned = owned
        self._noted = 0
        self._tensor_versions: list[int] = []
        self._places: list[int] = []
        self._sums: dict[str, int] | None = None
        self._are_restored = False  # the task changes them and restores their values

    def note(self, values: bool = False) -> None:
        """Remember the parameters as they are, after a version was loaded.

        Args:
            values: their values in any case.
        """
        self._noted += 1
        # The writes of a server come from another process and do not count as changes here.
        self._tensor_versions, self._places = self._read()
        is_due = self._noted <= _FIRST_WITH_VALUES or not self._noted % _VALUES_EVERY
        self._sums = checksums(self._parameters) if values or is_due or self._are_restored else None

    def _read(self) -> tuple[list[int], list[int]]:
        parameters = self._parameters.values()
        # On a GPU, modules such as LSTM move their parameters without a change.
        return [p._version for p in parameters], [p.data_ptr() if p.device.type == "cpu" else 0 for p in parameters]

    def check(self, values: bool = True) -> None:
        """Check that the parameters are as they were noted.

        Args:
            values: False where a server may have written to the memory since then.

        Raises:
            TaskError: the task changed one; the message names it.
        """
        if not self._places:
            return
        versions, places = self._read()
        changed, whose = None, ""
        if versions != self._tensor_versions or places != self._places:
            noted = zip(self._parameters, self._tensor_versions, self._places, versions, places, strict=True)
            changed = next(name for name, *before, version, place in noted if before != [version, place])
            if self._owned and values and self._sums is not None:
                changed, self._are_restored = None, True  # unless the values differ
        if changed is None and values and self._sums is not None:
            now = checksums(self._parameters)
            changed = next((name for name in now if now[name] != self._sums[name]), None)
            # Torch counts the changes of this process only. In memory of the server these may be of another trainer,
            # which reads the same version, so either of them may be the first to notice.
            whose = (
                "" if self._owned else "; all trainers of this host read its memory, so another one may have changed it"
            )
        if changed is not None:
            raise TaskError(
                f"parameter {changed} was changed by the task, and belongs to the servers: the next version would "
                "replace it; change parameters in build_model, or in the step of the optimizer (a subclass whose "
                f"step() changes them after super().step()), which every mode makes once{whose}"
            )

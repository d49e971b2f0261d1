"""What a trainer stores, as bytes that ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from typing import Any

import torch

from paramserver.checkpoint.archive import load_archive
from paramserver.errors import TaskError


def pack(state: Mapping[str, Any]) -> bytes:
    """What a trainer stores, as the bytes of a file that ``torch.load(weights_only=True)`` reads."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


def check_storable(state: Mapping[str, Any], task_name: str) -> None:
    """Refuse, when it is stored, what could not be loaded again. Looks at types alone, whatever the size of tensors.

    Args:
        state: private, so that its tensors are plain ones.
        task_name: for the message.

    Raises:
        TaskError: ``on_checkpoint`` put something there that ``torch.load(weights_only=True)`` does not take.
    """
    try:
        unpack(pack(_without_values(state)))
    except Exception as error:  # pickle and torch raise many types for what they cannot take
        raise TaskError(
            f"{task_name}.on_checkpoint stored what cannot be loaded again ({str(error).splitlines()[0]}); "
            "store tensors, numbers, strings, and lists or dicts of them"
        ) from error


def _without_values(state: Any) -> Any:
    """The same nested structure with an empty tensor in the place of each."""
    if isinstance(state, torch.Tensor):
        return torch.empty(0, dtype=state.dtype)
    if isinstance(state, dict):
        fresh = copy.copy(state)
        for key, value in state.items():
            fresh[key] = _without_values(value)
        return fresh
    if type(state) in (list, tuple):
        return type(state)(_without_values(value) for value in state)
    return state


def unpack(part: bytes) -> dict[str, Any]:
    """Take back what ``pack`` made."""
    state: dict[str, Any] = load_archive(io.BytesIO(part))
    return state

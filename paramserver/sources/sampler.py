"""The order that a sampler of the user gives to the passes over a data set."""

from __future__ import annotations

import copy
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from operator import index
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Sampler

from paramserver.errors import TaskError, kind_and_message
from paramserver.importing import name_user_error
from paramserver.rng import GeneratorStates, seed_order

Index: TypeAlias = "int | tuple[int, ...]"
"""Of a sample, or those of a whole batch."""


class SamplerOrder:
    """What a sampler yields in each pass, the same in every process that has the same sampler.

    A pass is drawn once, with the default CPU generators seeded by (seed, epoch), which are as before after it, and
    after ``set_epoch(epoch)`` if the sampler has that. A sampler with a generator of its own continues it from pass to
    pass, like any that keeps a state: to return to an earlier pass, or to a later one in another process, the passes
    from the first on are drawn again by a copy. The user's sampler is never iterated itself.

    Where a pass has an index several times, as with replacement, the length of the data set is added once for the
    second time, twice for the third: the same sample, with a key of its own, so that it is augmented anew each time.
    The sampler may hold the data set of its indices: copies of the sampler share it.
    """

    def __init__(self, sampler: Iterable[Any], dataset: Any, seed: int) -> None:
        if not (hasattr(sampler, "__iter__") or hasattr(sampler, "__getitem__")):
            raise TaskError(
                f"the sampler ({type(sampler).__name__}) must be iterable; return a sampler, or a list of indices"
            )
        self.sampler = sampler
        self.seed = seed
        self._dataset = dataset
        self._length: int | None = None
        self._checksum = ""  # of the first pass; empty = it is not drawn
        self._max_length = max(100 * len(dataset), 10_000_000)
        generator = _generator_of(sampler)
        self._first_state = None if generator is None else generator.get_state()
        self._is_random_access = all(map(_is_stateless, _parts(sampler)))  # to any pass, without those before it
        self._copy: Any = None
        self._next = 0  # the pass that the copy draws next
        self._drawn: dict[int, list[Index]] = {}

    @property
    def name(self) -> str:
        return type(self.sampler).__name__

    @property
    def length(self) -> int:
        """How many entries each pass has; once a pass has been drawn, this draws none."""
        return len(self.indices(0)) if self._length is None else self._length

    @property
    def checksum(self) -> str:
        """Of the first pass; once a pass has been drawn, this draws none."""
        if not self._checksum:
            self.indices(0)
        return self._checksum

    @property
    def description(self) -> str:
        """What must be the same on every trainer."""
        return f"in the order of {self.name} with checksum {self.checksum}"

    @property
    def gives_batches(self) -> bool:
        return any(isinstance(one, tuple) for one in self.indices(0))

    @property
    def repeats_sizes(self) -> bool:
        """Whether the whole batches of each pass are known to have the sizes of those of the first."""
        return all(map(_is_of_torch, _parts(self.sampler))) or isinstance(self.sampler, (list, tuple))

    def indices(self, epoch: int) -> list[Index]:
        """Return the order of a pass.

        Raises:
            TaskError: the sampler yields what is no index, or not as much as in the first pass, or cannot be copied.
        """
        if epoch not in self._drawn:
            last = max(self._drawn, default=-1)
            order = self._draw(epoch)
            if epoch == 0 and not self._checksum:
                self._checksum = f"{zlib.crc32(repr(order).encode()):08x}"
            # Two passes: the one that is read, and the one of which the buffer still holds samples.
            self._drawn = {n: old for n, old in self._drawn.items() if n == last} | {epoch: order}
        return self._drawn[epoch]

    def _draw(self, epoch: int) -> list[Index]:
        if self._copy is None or (epoch < self._next and not self._is_random_access):
            self._restart()
            self._copy = self._copied()
        order: list[Index] = []
        for n in range(epoch if self._is_random_access else self._next, epoch + 1):
            before = GeneratorStates.take(gauss=True)
            try:
                seed_order(self.seed, n)
                for part in _parts(self._copy):
                    if hasattr(part, "set_epoch"):
                        part.set_epoch(n)
                with name_user_error(f"the sampler ({self.name}), in pass {n},"):
                    order = [self._index(item) for item in islice(self._copy, self._max_length + 1)]
            finally:
                before.restore()
            self._next = n + 1
            if self._length is None:
                self._length = len(order)
            if len(order) > self._max_length or len({type(one) for one in order}) > 1:
                what = "has no end" if len(order) > self._max_length else "gave both indices and batches of them"
                raise TaskError(f"the sampler ({self.name}) {what} in pass {n}; a pass must be a list of one kind")
            if len(order) != self._length:
                raise TaskError(
                    f"the sampler ({self.name}) gave {len(order)} indices in pass {n}; it must give as many in each "
                    f"pass as in the first one ({self._length})"
                )
        return self._unique(order)

    def _unique(self, order: list[Index]) -> list[Index]:
        flat = [one for entry in order for one in (entry if isinstance(entry, tuple) else (entry,))]
        length = len(self._dataset)
        if flat and not 0 <= min(flat) <= max(flat) < length:
            wrong = next(one for one in flat if not 0 <= one < length)
            raise TaskError(f"the sampler ({self.name}) gave {wrong}; it must give indices from 0 to {length - 1}")
        if len(set(flat)) == len(flat):
            return order
        times: Counter[int] = Counter()

        def key(index: int) -> int:
            times[index] += 1
            return index + (times[index] - 1) * length

        return [tuple(map(key, entry)) if isinstance(entry, tuple) else key(entry) for entry in order]

    def _index(self, item: Any) -> Index:
        try:
            if not isinstance(item, (list, tuple)):
                return index(item)
            if item:
                return tuple(map(index, item))
        except TypeError:
            pass
        raise TaskError(
            f"the sampler ({self.name}) gave {item!r}; it must give whole numbers, the indices of samples, or lists of "
            "them"
        )

    def _copied(self) -> Any:
        try:
            made = copy.deepcopy(self.sampler, {id(self._dataset): self._dataset})
        except Exception as error:  # copies call methods of the user's classes
            once = isinstance(self.sampler, Iterator)
            cure = "return a list of its indices" if once else "open files and connections in its __iter__"
            raise TaskError(
                f"the sampler ({self.name}) must be an object that can be copied, as a pass is drawn again after a "
                f"resume ({kind_and_message(error)}); {cure}"
            ) from error
        if (generator := _generator_of(made)) is not None and self._first_state is not None:
            generator.set_state(self._first_state)
        return made

    def _restart(self) -> None:
        self._copy, self._next, self._drawn = None, 0, {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_copy": None, "_next": 0, "_drawn": {}}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that a generator of the sampler's own had before the first pass, if it has one."""
        return {} if self._first_state is None else {"generator": self._first_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw the passes of the run whose ``state_dict()`` this is."""
        if self._first_state is not None and "generator" in state:
            if not torch.equal(self._first_state, state["generator"]):
                self._checksum = ""
            self._first_state = state["generator"].clone()
            self._restart()


def _parts(sampler: Any) -> list[Any]:
    """Return a sampler, and the one that it makes batches of."""
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None or inner is sampler else [sampler, inner]


def _generator_of(sampler: Any) -> torch.Generator | None:
    found = [getattr(part, "generator", None) for part in _parts(sampler)]
    return next((one for one in found if isinstance(one, torch.Generator)), None)


def _is_of_torch(sampler: Any) -> bool:
    return isinstance(sampler, Sampler) and type(sampler).__module__.startswith("torch.")


def _is_stateless(sampler: Any) -> bool:
    """Whether the order of a pass is known to depend on nothing but its seed and number."""
    return getattr(sampler, "generator", None) is None and (hasattr(sampler, "set_epoch") or _is_of_torch(sampler))

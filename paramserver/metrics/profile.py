"""Traces of ``torch.profiler`` of some steps of each rank, with spans of what the rank does in a step."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from paramserver.config import ProfileConfig
from paramserver.errors import kind_and_message
from paramserver.fileio import TEMPORARY, atomic_rename

if TYPE_CHECKING:
    from torch.profiler import profile

log = logging.getLogger("paramserver")

P = ParamSpec("P")
T = TypeVar("T")

_NO_SPAN = nullcontext()
_active: StepProfiler | None = None  # records at present; the profiler of torch is one of the process too


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context that a trace shows as a span of this name; one that does nothing while there is no trace."""
    if _active is None:
        return _NO_SPAN
    from torch.profiler import record_function

    return record_function(name)


def spanned(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator: each call of the function is a span."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if _active is None:
                return function(*args, **kwargs)
            with span(name):
                return function(*args, **kwargs)

        return call

    return decorate


class StepProfiler:
    """Traces the steps of the section ``profile``, in all threads of this process. A context manager.

    One thread calls ``enter_step``. What this costs, also when the trace is written, is part of the steps. The trace is
    in the format of Chrome, which Perfetto and TensorBoard's plugin read too.
    """

    def __init__(self, options: ProfileConfig | None = None, file: Path = Path()) -> None:
        self._steps = range(0) if options is None else range(options.start_step, options.start_step + options.steps)
        self._file = file
        self._profile: profile | None = None

    def enter_step(self, step: int) -> None:
        """Note that the update after version ``step`` is made from now on; start or end the trace where it is due."""
        if not self._steps:
            return
        if self._profile is None and step in self._steps:
            self._start()
        elif step >= self._steps.stop:
            self.close()

    def _start(self) -> None:
        global _active
        self._profile = _new_profile()
        self._profile.start()
        _active = self

    def close(self) -> None:
        """End and write the trace, if there is one. A trace that cannot be written is reported in the log."""
        global _active
        ended, self._profile = self._profile, None
        if ended is None:
            return
        _active, self._steps = None, range(0)
        temporary = self._file.with_name(f"{self._file.name}{TEMPORARY}")
        try:
            ended.stop()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            ended.export_chrome_trace(str(temporary))
            atomic_rename(temporary, self._file)
        except (OSError, RuntimeError) as error:
            log.warning("the trace %s was not written (%s)", self._file, kind_and_message(error))

    def __enter__(self) -> StepProfiler:
        if self._steps:
            # The first start takes long, and has to be in the main thread.
            with _new_profile():
                pass
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _new_profile() -> profile:
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import profile

    return profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))

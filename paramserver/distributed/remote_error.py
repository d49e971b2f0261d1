"""An error that crosses the boundary of a process."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from paramserver import errors


@dataclass(frozen=True)
class RemoteError:
    """An error as a value: RPC preserves only a few exception types, so handlers return errors."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException, who: str = "the server") -> RemoteError:
        """Wrap an error of this package as it is, any other with its traceback and the process that raised it."""
        if isinstance(error, errors.ParamserverError):
            known = next(kind for kind in type(error).__mro__ if hasattr(errors, kind.__name__))
            return cls(known.__name__, str(error))
        text = "".join(traceback.format_exception(error))
        return cls("TrainingError", f"{who} raised {errors.kind_and_message(error)}\n{text}")

    @classmethod
    def reported_by(cls, who: str, error: BaseException) -> RemoteError:
        """Wrap the reason why a process of the run fails, for another process; an error of user input stays one."""
        kind = errors.PeerRefused if isinstance(error, errors.UnsupportedConfiguration) else errors.PeerFailed
        self_explanatory = isinstance(error, errors.ParamserverError) and error.self_explanatory
        return cls(kind.__name__, f"{who} failed: {error if self_explanatory else errors.kind_and_message(error)}")

    def error(self) -> errors.ParamserverError:
        """Return the exception to raise."""
        made = getattr(errors, self.kind, errors.TrainingError)(self.message)
        assert isinstance(made, errors.ParamserverError)
        return made

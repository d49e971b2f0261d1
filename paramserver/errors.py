"""Every error that this package raises on purpose.

::

    ParamserverError
    ├── UnsupportedConfiguration      exit 2: what the user gave is wrong
    │   ├── TaskError                 the task cannot be loaded, or breaks the contract of a task
    │   │   └── ModelIsElsewhere      a step needs more of its model than a call, and the model is on the server
    │   ├── CheckpointError           a checkpoint is missing, incomplete, damaged or of something else
    │   └── PeerRefused               another process of the run found the input wrong, and says why
    ├── TrainingError                 exit 1: the run failed
    │   ├── SourceError               a source of samples raised
    │   ├── NotFinite                 a loss, a gradient or a parameter is NaN, infinite or too large for the wire
    │   ├── PeerLost                  another process of the run is gone or silent
    │   │   └── PeerFailed            it failed, and said why
    │   └── DeadlineExceeded          a wait reached its limit
    ├── ClientError                   exit 1: a program that produces samples cannot go on
    │   └── RunOver                   the run wants no more samples
    ├── Interrupted                   exit 3: a signal ended the run, after its checkpoint was written
    └── BufferError
        ├── BufferTimeout             a put or get reached its limit
        ├── BufferExhausted           finished and empty: no more samples will come
        └── BufferClosed              closed while somebody waited, or before

A message names the thing, its value, the rule that it breaks and the cure. Each class takes one string, so that an
error can cross a process boundary as ``(class name, message)``.
"""


class ParamserverError(Exception):
    """Root of the tree. ``exit_code`` is what the command line returns for it."""

    exit_code = 1
    self_explanatory = False  # where it was raised says nothing more, so it is told without a traceback
    relayed = False  # told by another process, with its traceback in the message: this one's says nothing

    def __init__(self, message: str) -> None:
        super().__init__(message)


class UnsupportedConfiguration(ParamserverError):  # noqa: N818 - the name users of Melissa know
    exit_code = 2


class TaskError(UnsupportedConfiguration):
    pass


class ModelIsElsewhere(TaskError, AttributeError):  # noqa: N818 - an AttributeError, for hasattr()
    pass


class CheckpointError(UnsupportedConfiguration):
    pass


class PeerRefused(UnsupportedConfiguration):
    pass


class TrainingError(ParamserverError):
    pass


class SourceError(TrainingError):
    pass


class NotFinite(TrainingError):  # noqa: N818
    self_explanatory = True


class PeerLost(TrainingError):  # noqa: N818
    self_explanatory = True


class PeerFailed(PeerLost):
    pass


class DeadlineExceeded(TrainingError):  # noqa: N818
    pass


class ClientError(ParamserverError):
    pass


class RunOver(ClientError):  # noqa: N818 - how a producer's work may end well
    pass


class Interrupted(ParamserverError):  # noqa: N818
    exit_code = 3


class BufferError(ParamserverError):
    pass


class BufferTimeout(BufferError, TimeoutError):  # noqa: N818
    pass


class BufferExhausted(BufferError):  # noqa: N818
    pass


class BufferClosed(BufferError):  # noqa: N818
    pass


def as_peer_error(error: ParamserverError) -> ParamserverError:
    """What the others are told of it."""
    kind = PeerRefused if isinstance(error, PeerRefused) else PeerFailed
    return kind(f"the run failed elsewhere: {error}")

"""The exception tree: every error that this package raises deliberately, with the exit code of the command line.

::

    ParamserverError
    ├── UnsupportedConfiguration      exit 2: the input of the user is wrong
    │   ├── TaskError                 the task cannot be loaded, or violates the contract of a task
    │   │   ├── ModelIsElsewhere      a step uses the model other than by a call, and the model is on the server
    │   │   └── NoSuchMember          a LightningModule uses a member of self.trainer that a LightningTask does not have
    │   ├── CheckpointError           a checkpoint is missing, incomplete, damaged or does not fit
    │   ├── FolderInUse               another process holds the run folder
    │   └── PeerRefused               another process of the run refused the input; the message states why
    ├── TrainingError                 exit 1: the run failed
    │   ├── SourceError               a source of samples raised
    │   ├── StorageError              a file of the run folder cannot be written, or was removed
    │   ├── NotFinite                 a loss, a gradient or a parameter is NaN, infinite or too large for the wire
    │   ├── PeerLost                  another process of the run died or stopped responding
    │   │   ├── PeerFailed            it failed and reported its error
    │   │   ├── Unreachable           a server that lives accepts no new connection
    │   │   ├── Evicted               this process was taken for lost, and another may have its place
    │   │   ├── GenerationChanged     the servers return to a checkpoint, and all processes join again
    │   │   └── RunEnded              the run had ended before this process joined
    │   └── DeadlineExceeded          a wait reached its limit
    │       └── MissingRanks          rank 0, or other ranks, did not join in time
    ├── ClientError                   exit 1: a program that produces samples cannot continue
    │   └── RunOver                   the run needs no more samples
    ├── Interrupted                   exit 3: a signal ended the run, after its checkpoint was written
    └── BufferError
        ├── BufferTimeout             a put or get reached its limit
        ├── BufferExhausted           finished and empty: no more samples will come
        └── BufferClosed              closed before or during the call

A message has the form "name (value) must rule; cure". Each class takes one string, so that an error can cross a process
boundary as ``(class name, message)``.

Example::

    >>> issubclass(TaskError, UnsupportedConfiguration), TaskError("task (a:B) lacks build_model").exit_code
    (True, 2)
"""


class ParamserverError(Exception):
    """Root of the exception tree. Catch it to handle every error of this package.

    Attributes:
        exit_code: the exit code of the command line for this error.
        self_explanatory: the message is complete; a traceback would add nothing and is not printed.
        relayed: the error was received from another process, with that process's traceback in the message.

    Example::

        >>> try:
        ...     raise PeerLost("rank 1 is lost")
        ... except ParamserverError as error:
        ...     print(error.exit_code, error)
        1 rank 1 is lost
    """

    exit_code = 1
    self_explanatory = False
    relayed = False

    def __init__(self, message: str) -> None:
        super().__init__(message)


class UnsupportedConfiguration(ParamserverError):  # noqa: N818 - the name that users of Melissa know
    """The input of the user is wrong: config, command line, task or checkpoint. Exit code 2.

    Example::

        >>> UnsupportedConfiguration("seed (-1) must be at least 0; give 0 or more").exit_code
        2
    """

    exit_code = 2


class TaskError(UnsupportedConfiguration):
    pass


class ModelIsElsewhere(TaskError, AttributeError):  # noqa: N818 - also an AttributeError, so that hasattr() returns False
    pass


class NoSuchMember(TaskError, AttributeError):  # noqa: N818 - likewise
    pass


class CheckpointError(UnsupportedConfiguration):
    pass


class FolderInUse(UnsupportedConfiguration):
    pass


class PeerRefused(UnsupportedConfiguration):
    pass


class TrainingError(ParamserverError):
    """The run failed. Exit code 1.

    Example::

        >>> isinstance(NotFinite("loss (nan) must be finite"), TrainingError)
        True
    """


class SourceError(TrainingError):
    pass


class StorageError(TrainingError):
    self_explanatory = True


class NotFinite(TrainingError):  # noqa: N818
    self_explanatory = True


class PeerLost(TrainingError):  # noqa: N818
    self_explanatory = True


class PeerFailed(PeerLost):
    pass


class Evicted(PeerLost):
    pass


class GenerationChanged(PeerLost):
    pass


class Unreachable(PeerLost):
    pass


class RunEnded(PeerLost):
    pass


class DeadlineExceeded(TrainingError):  # noqa: N818
    pass


class MissingRanks(DeadlineExceeded):
    self_explanatory = True


class ClientError(ParamserverError):
    pass


class RunOver(ClientError):  # noqa: N818 - not a failure: the run is complete
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


def message_of(error: BaseException) -> str:
    """Return ``str(error)``; where that raises, as it may for a class of the user, the message states that."""
    try:
        return str(error)
    except Exception as raised:  # noqa: BLE001 - what a class of the user raises, and the message names it
        return f"(its message cannot be read: __str__ raises {type(raised).__name__})"


def kind_and_message(error: BaseException) -> str:
    """Return the name of the error's class and its message, as the last line of a traceback shows them."""
    return f"{type(error).__name__}: {message_of(error)}"


def text_of(error: BaseException) -> str:
    """Return the message of an error of this package, and of any other its class too."""
    return str(error) if isinstance(error, ParamserverError) else kind_and_message(error)


def as_peer_error(error: ParamserverError) -> ParamserverError:
    """Return the error that the other processes of a run raise because this process failed with ``error``."""
    if isinstance(error, GenerationChanged):
        return error  # not a failure of the run
    kind = PeerRefused if isinstance(error, PeerRefused) else PeerFailed
    return kind(f"the run failed elsewhere: {error}")

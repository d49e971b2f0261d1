"""For programs that produce samples: ``from paramserver.client import Client``. Needs numpy and pyzmq, nothing else.

::

    with Client("tcp://127.0.0.1:5555").open(3, [300.0, 450.0]) as client:
        for step, field in enumerate(solve(client.parameters)):
            client.send(step, {"temperature": field})

A simulation that the run starts needs no arguments: ``Client().open()`` reads them from its environment.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserver.cluster.simulation import VARIABLES, SimulationEnvironment
from paramserver.errors import ClientError, RunOver
from paramserver.online.connections import zmq
from paramserver.online.protocol import (
    VERSION_ROW,
    ArrayDescriptor,
    Header,
    MalformedMessage,
    MessageKind,
    TrainerDirectory,
    pack_descriptor,
    pack_opening,
    unpack_json,
)
from paramserver.online.sender import CoordinatorConnection, SampleSender


class Client(AbstractContextManager["Client"]):
    """Sends the samples of one simulation, or of one process of its group, to the trainers of a run.

    Use it as a context manager, from one thread. It starts no thread: messages are sent and received inside its calls.
    Leaving ``with`` calls ``close``, which waits until all samples are acknowledged. Leaving it by an exception does
    not: the run then counts the simulation as failed, unless it starts again.

    Args:
        address: of the run, ``tcp://host:port``.
        keys: folder of keys (``paramserver keys``) with server.key and one client's secret key, or that key's file;
            required beyond this machine.
        timeout_s: seconds without any message from the run, or from a trainer that is waited for, before this fails;
            None = 60 s for the first answer of the run, then ``simulations.timeout_s`` of the run. A client may start
            before its run, so without a listener it waits for as long too, and so does one that is open: rank 0 may be
            started again. A client that the run started waits 5 s in ``open``.
        member: index of this process in the simulation's group.
        members: processes in the group, each of which sends its part of every sample.
        attempt: how many times this simulation was started before.

    In a simulation that the run starts, ``address``, ``keys``, ``member``, ``members`` and ``attempt`` are read from
    the environment if they are None. Otherwise None means no keys, and the first attempt of a single process.

    Raises:
        ClientError: an argument is out of range, or the address is missing.
        UnsupportedConfiguration: an environment variable has a value that no run sets.

    Example::

        >>> with Client("tcp://127.0.0.1:5555").open(0, [300.0]) as client:  # doctest: +SKIP
        ...     client.send(0, {"temperature": np.zeros((100, 100), np.float32)})
        >>> Client("tcp://127.0.0.1:5555", member=2, members=2)
        Traceback (most recent call last):
        paramserver.errors.ClientError: member (2) must be below members (2); count from 0
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        keys: str | Path | None = None,
        timeout_s: float | None = None,
        member: int | None = None,
        members: int | None = None,
        attempt: int | None = None,
    ) -> None:
        self._environment = environment = SimulationEnvironment.from_environ()
        self._address = address or environment.address
        self._keys = environment.keys if keys is None else keys
        self._timeout_s = timeout_s
        self.member = check_integer("member", _first(member, environment.member, 0))
        self.members = check_integer("members", _first(members, environment.members, 1), least=1)
        self.attempt = check_integer("attempt", _first(attempt, environment.attempt, 0))
        if self._address is None:
            raise ClientError(
                f"address (None) must be given where the run has not started this process ({VARIABLES['address']} is "
                "not set); take the one that the run prints"
            )
        if self.member >= self.members:
            raise ClientError(f"member ({self.member}) must be below members ({self.members}); count from 0")
        if timeout_s is not None:
            check_timeout(timeout_s, above_zero=True)
        # Three states: created (no sender), open (a sender), ended (_ended: "closed", or the error that ended it). One
        # that has ended keeps its sender, closed, for its counters.
        self._sender: SampleSender | None = None
        self._ended: str | ClientError | None = None
        self._sent_steps = SentSteps()
        self._parameters: npt.NDArray[np.float64] | None = None
        self._simulation: int | None = None
        self._directory: TrainerDirectory | None = None

    def open(self, simulation_id: int | None = None, parameters: Sequence[float] | None = None) -> Client:
        """Register the simulation at the run, before the first ``send``; waits until all trainers have joined.

        Args:
            simulation_id: its number, from 0; None = the one that the run gave.
            parameters: the numbers that each of its samples carries; None = those that the run gave, or none.

        Returns:
            This client.

        Raises:
            ClientError: it is open or closed already, an argument is invalid, or the run refuses or is not there.
            RunOver: the run needs no more samples.
        """
        self._refuse_if_ended()
        if self._sender is not None:
            raise ClientError(f"this client is open already, for simulation {self._simulation}; make another one")
        simulation = self._environment.simulation if simulation_id is None else simulation_id
        if simulation is None:
            raise ClientError(
                "simulation_id (None) must be given where the run has not started this process "
                f"({VARIABLES['simulation']} is not set); number your simulations from 0"
            )
        vector = self._parameter_vector(simulation, parameters)
        simulation = check_integer("simulation_id", simulation)
        assert self._address is not None
        header = Header(MessageKind.HELLO, simulation, 0, self.member, self.members, self.attempt)
        run_started = self._address == self._environment.address
        # For the simulation and the run that gave it; no other may learn it.
        given = run_started and simulation == self._environment.simulation
        secret = self._environment.secret if given else None
        self._sender = SampleSender(
            self._address, self._keys, header, pack_opening(vector, secret), self._timeout_s, run_started
        )
        self._simulation, self._parameters, self._directory = simulation, vector, self._sender.directory
        self._encoder = SampleEncoder(self._directory.fields, self.members, self._directory.optional)
        return self

    def _parameter_vector(self, simulation: int, parameters: Sequence[float] | None) -> npt.NDArray[np.float64]:
        if parameters is None and simulation == self._environment.simulation:
            parameters = self._environment.parameters
        try:
            vector = np.array(() if parameters is None else parameters, dtype=np.float64).reshape(-1)
        except (TypeError, ValueError, OverflowError) as error:
            raise ClientError(f"parameters ({parameters}) must be numbers ({error})") from error
        if not np.isfinite(vector).all():
            raise ClientError(f"parameters ({parameters}) must be finite; correct them")
        vector.flags.writeable = False
        return vector

    def send(self, step: int, fields: Mapping[str, Any], version: tuple[int, int] | None = None) -> None:
        """Send one sample. The arrays are copied, so they may be changed afterwards.

        Waits while ``simulations.window`` samples are in flight to its trainer, which means that the trainer's buffer
        is full of samples that were not used yet. The wait ends when there is room, or when the trainer is silent for
        ``timeout_s``.

        Args:
            step: number of the sample in the simulation, from 0; each is sent once, in any order.
            fields: name -> array of each field that the run declares, whole or this member's part of it along the first
                dimension. Numbers of another dtype are converted if each fits; floating-point ones are rounded, and are
                not converted to whole ones.
            version: of the weights with which the sample was made, ``Weights.version`` of a ``Subscriber``; for a run
                with the section ``publish``. Of a group, the oldest that a member gives is that of the sample.

        Raises:
            ClientError: the client is not open; a step, field or version does not fit (nothing was sent, and the client
                stays open); or a trainer is gone.
            RunOver: the run needs no more samples.
        """
        self._refuse_if_ended()
        if self._sender is None:
            raise ClientError("this client must be open before it sends; call open(simulation_id, parameters) first")
        number = self._sent_steps.check(step, self._sender.directory.steps)
        frames = self._encoder.encode(self._encoder.add_version(fields, version))
        with self._ended_by_errors():
            self._sender.send(number, frames)
        # After the send: a step that was not sent may be sent again.
        self._sent_steps.add(number)

    def close(self) -> None:
        """Wait until all samples are acknowledged, and the run knows that this member is done.

        Calling it again, or on a client that was not opened, has no effect.

        Raises:
            ClientError: a trainer is gone, or the run.
            RunOver: the run needs no more samples, and not all that were sent are acknowledged.
        """
        if self._sender is not None and self._ended is None:
            with self._ended_by_errors():
                self._sender.finish()
        self._end("closed")

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end("closed")

    # Properties.

    @property
    def parameters(self) -> npt.NDArray[np.float64]:
        """The parameters of this simulation, a read-only vector. Available after ``open``."""
        if self._parameters is None:
            raise ClientError("this client has no parameters before open(); open it first")
        return self._parameters

    @property
    def simulation(self) -> int:
        """The number of this simulation. Available after ``open``."""
        if self._simulation is None:
            raise ClientError("this client has no simulation before open(); open it first")
        return self._simulation

    @property
    def steps(self) -> int | None:
        """Samples that the run expects of each simulation; None = as many as the simulation sends."""
        return self._require_directory().steps

    @property
    def first_step(self) -> int:
        """The first step that the run lacks: 0, or more in another attempt of a simulation that ended before its end.

        Samples of the steps before it need not be computed and sent again; they are dropped if they are. All members of
        an attempt have the same one.
        """
        return self._require_directory().first_step

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a whole sample that the run declares."""
        directory = self._require_directory()
        return {field.name: field.shape for field in directory.fields if field not in directory.optional}

    def _require_directory(self) -> TrainerDirectory:
        if self._directory is None:
            raise ClientError("this client knows nothing of the run before open(); open it first")
        return self._directory

    @property
    def sent(self) -> int:
        """Samples that were sent."""
        return 0 if self._sender is None else self._sender.sent

    @property
    def refused(self) -> int:
        """Messages that the run refused. The log ``paramserver.client`` has each reason once."""
        return 0 if self._sender is None else self._sender.refused

    @property
    def waited_s(self) -> float:
        """Seconds that ``send`` has waited for room."""
        return 0.0 if self._sender is None else self._sender.waited_s

    # States.

    def _refuse_if_ended(self) -> None:
        if isinstance(self._ended, ClientError):
            # A new object: raising the same one again would grow its traceback each time.
            raise type(self._ended)(str(self._ended))
        if self._ended is not None:
            raise ClientError("this client is closed; make another one")

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            self._end(error)
            raise

    def _end(self, why: str | ClientError) -> None:
        self._ended = self._ended or why
        if self._sender is not None:
            self._sender.close()


def _first(*values: int | None) -> Any:
    return next(value for value in values if value is not None)


def ping(address: str, keys: str | Path | None = None, timeout_s: float = 5.0) -> dict[str, Any]:
    """Return the state of a running run; it answers also during a long validation.

    Raises:
        ClientError: no message for ``timeout_s``, or an argument is invalid.
        RunOver: the run needs no more samples.

    Example::

        >>> ping("tcp://127.0.0.1:5555")  # doctest: +SKIP
        {'alive': True, 'run': '20260722-101500', 'step': 120, 'simulations': {'waiting': 3, 'running': 2, ...}, ...}
    """
    return _ping(address, keys, timeout_s)


def finish(address: str, keys: str | Path | None = None, timeout_s: float = 5.0) -> None:
    """Declare that no more simulations come from outside; the run ends when those that were opened are complete.

    Raises:
        ClientError: the run refuses, no message came for ``timeout_s``, or an argument is invalid.

    Example::

        >>> finish("tcp://127.0.0.1:5555")  # doctest: +SKIP
    """
    try:
        _ping(address, keys, timeout_s, MessageKind.FINISH)
    except RunOver:
        return  # the run has ended already


def _ping(address: str, keys: str | Path | None, timeout_s: float, *first: MessageKind) -> dict[str, Any]:
    """Send the ``first`` messages, then PING: messages on one connection are processed in order."""
    check_timeout(timeout_s)
    with ExitStack() as stack:
        context: zmq.Context[Any] = zmq.Context()
        stack.callback(context.term)
        coordinator = stack.enter_context(closing(CoordinatorConnection(context, address, keys)))
        try:
            for kind in first:
                coordinator.send(Header(kind))
            (body,) = coordinator.request(Header(MessageKind.PING), expect=MessageKind.PONG, timeout_s=timeout_s)
            return unpack_json(body)
        except (MalformedMessage, ValueError) as error:
            raise ClientError(f"{coordinator} answered what cannot be understood: {error}") from error


# Checks before anything is sent.


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
            ClientError: it is no version, or the run takes none, or must be given one, or there are no fields.
        """
        if not isinstance(fields, Mapping):
            raise ClientError(
                f"fields ({type(fields).__name__}) must be a mapping of names to arrays; "
                f"write {{{next(iter(self._declared))!r}: array}}"
            )
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

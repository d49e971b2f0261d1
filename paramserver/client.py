"""For whoever produces samples: ``from paramserver.client import Client``. Needs numpy and pyzmq, nothing else.

::

    with Client("tcp://127.0.0.1:5555").open(3, [300.0, 450.0]) as client:
        for step, field in enumerate(solve(client.parameters)):
            client.send(step, {"temperature": field})

A simulation that the run starts itself needs no arguments: ``Client().open()`` finds them in its environment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserver.cluster.simulation import ADDRESS, SIMULATION, SimulationEnvironment
from paramserver.errors import ClientError, RunOver
from paramserver.online.sender import CoordinatorConnection
from paramserver.online.encoder import SampleEncoder, SentSteps, whole
from paramserver.online.protocol import (
    Header,
    MalformedMessage,
    MessageKind,
    TrainerDirectory,
    pack_parameters,
    read_json,
)
from paramserver.online.sender import DESK, SampleSender
from paramserver.online.zmq_import import zmq

# How long the last word to the run may take to leave.
_LINGER_S = 5.0


class Client:
    """Sends the samples of one simulation, or of one process of its group, to the trainers of a run.

    For one thread. It starts none: while the simulation computes, nothing is sent. Leaving ``with`` closes it, which
    waits until all was taken; leaving it by an exception does not, and the run then takes the simulation for broken
    off, unless it is sent again.

    Args:
        address: of the run, ``tcp://host:port``.
        keys: folder of keys (``paramserver keys``) with server.key and one client's secret key, or that key's file;
            needed beyond this machine.
        timeout_s: how long the run, or a trainer that is waited for, may give no sign of life; None = 60 s for the
            run's answer, then what the run says (``simulations.timeout_s``). A client may come before its run; so one
            that comes when the run is gone waits for as long too. Only one that the run started, or that had been
            connected, knows better: it waits 5 s.
        member: which process of the simulation's group this is, from 0.
        members: how many there are, each of which sends its part of every sample.
        attempt: how often this simulation was started before.

    None of ``address``, ``keys``, ``member``, ``members`` and ``attempt`` is needed in a simulation that the run
    starts: None = what it says in the environment; without it, no keys and the first attempt of one process.

    Raises:
        ClientError: an argument that is out of its range, or no address.
        UnsupportedConfiguration: a variable of the environment that is none of the run's.
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
        self._told = told = SimulationEnvironment.of()
        self._address = address or told.address
        self._keys = told.keys if keys is None else keys
        self._timeout_s = timeout_s
        self.member = whole("member", _first(member, told.member, 0))
        self.members = whole("members", _first(members, told.members, 1), least=1)
        self.attempt = whole("attempt", _first(attempt, told.attempt, 0))
        self._check()
        self._delivery: SampleSender | None = None
        self._steps = SentSteps()
        self._parameters: npt.NDArray[np.float64] | None = None
        self._simulation: int | None = None
        self._welcome: TrainerDirectory | None = None
        self._ended: str | ClientError | None = None
        self._counts = (0, 0, 0.0)

    def _check(self) -> None:
        if self._address is None:
            raise ClientError(
                f"address (None) must be given where the run has not started this process ({ADDRESS} is not set); take "
                "the one that the run tells"
            )
        if self.member >= self.members:
            raise ClientError(f"member ({self.member}) must be below members ({self.members}); count from 0")
        if self._timeout_s is not None and not 0 < self._timeout_s < math.inf:
            raise ClientError(f"timeout_s ({self._timeout_s}) must be above 0 and finite; give seconds")

    # Open, send, close.

    def open(self, simulation_id: int | None = None, parameters: Sequence[float] | None = None) -> Client:
        """Tell the run that samples of this simulation are going to come; waits until its trainers are there.

        Args:
            simulation_id: its number, from 0; None = the one that the run gave.
            parameters: numbers that each of its samples carries; None = those that the run gave, or none.

        Returns:
            This client.

        Raises:
            ClientError: open or closed already, an argument that is none, or the run refused, or is not there.
            RunOver: the run wants no more samples.
        """
        if self._delivery is not None:
            raise ClientError(f"this client is open already, for simulation {self._simulation}; make another one")
        self._refuse_if_ended()
        simulation, vector = self._identity(simulation_id, parameters)
        assert self._address is not None
        header = Header(MessageKind.HELLO, simulation, 0, self.member, self.members, self.attempt)
        started = self._address == self._told.address
        self._delivery = SampleSender(
            self._address, self._keys, header, pack_parameters(vector), self._timeout_s, started
        )
        self._simulation, self._parameters, self._welcome = simulation, vector, self._delivery.welcome
        self._parcels = SampleEncoder(self._delivery.welcome.fields, self.members)
        return self

    def _identity(
        self, simulation_id: int | None, parameters: Sequence[float] | None
    ) -> tuple[int, npt.NDArray[np.float64]]:
        simulation = self._told.simulation if simulation_id is None else simulation_id
        if simulation is None:
            raise ClientError(
                f"simulation_id (None) must be given where the run has not started this process ({SIMULATION} is not "
                "set); number your simulations from 0"
            )
        if parameters is None and simulation == self._told.simulation:
            parameters = self._told.parameters
        try:
            vector = np.array(() if parameters is None else parameters, dtype=np.float64).reshape(-1)
        except (TypeError, ValueError) as error:
            raise ClientError(f"parameters ({parameters}) must be numbers ({error})") from error
        if not np.isfinite(vector).all():
            raise ClientError(f"parameters ({parameters}) must be finite; correct them")
        vector.flags.writeable = False
        return whole("simulation_id", simulation), vector

    def send(self, step: int, fields: Mapping[str, Any]) -> None:
        """Send one sample; it may be changed afterwards.

        Waits while as many samples are on their way to its trainer as the run lets be: that trainer's buffer is full
        of samples which were not used yet. This ends when there is room, or when the trainer gives no sign of life.

        Args:
            step: which sample of the simulation this is, from 0; each is sent once, in any order.
            fields: name -> array of each field that the run declared, whole or this member's part of it along the
                first dimension. What becomes the declared dtype without loss of size is converted.

        Raises:
            ClientError: not open, a step or field that does not fit (nothing was sent, and the client stays open), or
                a trainer that is gone.
            RunOver: the run wants no more samples.
        """
        delivery = self._demand_open()
        number = self._steps.check(step, delivery.welcome.steps)
        frames = self._parcels.pack(fields)
        with self._ended_by_errors():
            delivery.send(number, frames)
        self._steps.add(number)

    def close(self) -> None:
        """Wait until everything was taken and tell the run that this member is done; again, or unopened: nothing.

        Raises:
            ClientError: a trainer that is gone.
            RunOver: the run wants no more samples.
        """
        if self._delivery is not None:
            with self._ended_by_errors():
                self._delivery.settle()
                self._delivery.say_bye()
            self._let_go(_LINGER_S)
        self._ended = self._ended or "closed"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self._let_go()
            self._ended = self._ended or "closed"

    # What it knows.

    @property
    def parameters(self) -> npt.NDArray[np.float64]:
        """The numbers of this simulation, as one vector that cannot be written."""
        if self._parameters is None:
            raise ClientError("this client has no parameters before open(); open it first")
        return self._parameters

    @property
    def simulation(self) -> int:
        """Its number."""
        if self._simulation is None:
            raise ClientError("this client has no simulation before open(); open it first")
        return self._simulation

    @property
    def steps(self) -> int | None:
        """How many samples the run wants of each simulation; None where it leaves that to the simulation."""
        return self._told_by_run().steps

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a whole sample."""
        return {field.name: field.shape for field in self._told_by_run().fields}

    def _told_by_run(self) -> TrainerDirectory:
        if self._welcome is None:
            raise ClientError("this client knows nothing of the run before open(); open it first")
        return self._welcome

    @property
    def sent(self) -> int:
        """Samples that were sent."""
        return self._figures()[0]

    @property
    def refused(self) -> int:
        """Messages that the run refused; why is in the log ``paramserver.client``, once for each reason."""
        return self._figures()[1]

    @property
    def waited_s(self) -> float:
        """Seconds for which ``send`` waited for room."""
        return self._figures()[2]

    def _figures(self) -> tuple[int, int, float]:
        if self._delivery is not None:
            self._counts = (self._delivery.sent, self._delivery.refused, self._delivery.waited_s)
        return self._counts

    # The states: made, open, ended.

    def _demand_open(self) -> SampleSender:
        self._refuse_if_ended()
        if self._delivery is None:
            raise ClientError("this client must be open before it sends; call open(simulation_id, parameters) first")
        return self._delivery

    def _refuse_if_ended(self) -> None:
        if isinstance(self._ended, ClientError):
            raise type(self._ended)(str(self._ended))
        if self._ended is not None:
            raise ClientError("this client is closed; make another one")

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            self._ended = error
            self._let_go()
            raise

    def _let_go(self, linger_s: float = 0.0) -> None:
        self._figures()
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            delivery.close(linger_s)


def _first(*values: int | None) -> Any:
    return next(value for value in values if value is not None)


# Without a simulation.


def ping(address: str, keys: str | Path | None = None, timeout_s: float = 5.0) -> dict[str, Any]:
    """The state of a run that lives, also in a long validation.

    Raises:
        ClientError: it gave no sign of life for ``timeout_s``.
        RunOver: it wants no more samples.
    """
    return _ask(address, keys, timeout_s)


def finish(address: str, keys: str | Path | None = None, timeout_s: float = 5.0) -> None:
    """Tell a run to which simulations come from outside that no more will come: it ends when those that came are done.

    Raises:
        ClientError: it refused, or gave no sign of life for ``timeout_s``.
    """
    try:
        _ask(address, keys, timeout_s, MessageKind.LAST)
    except RunOver:
        return  # it has ended before


def _ask(address: str, keys: str | Path | None, timeout_s: float, *first: MessageKind) -> dict[str, Any]:
    """Say this, then ask for a sign of life: what comes after on one connection is answered after."""
    context: zmq.Context[Any] = zmq.Context()
    try:
        desk = CoordinatorConnection(context, DESK, address, keys)
        try:
            for kind in first:
                desk.send(Header(kind))
            (body,) = desk.ask(Header(MessageKind.PING), answer=MessageKind.PONG, timeout_s=timeout_s)
            return read_json(body)
        except (MalformedMessage, ValueError) as error:
            raise ClientError(f"{desk} answered what cannot be understood: {error}") from error
        finally:
            desk.close()
    finally:
        context.term()

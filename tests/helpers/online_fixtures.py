"""The parts of an online run for tests: specs, messages, a coordinator and clients on plain sockets."""

import threading
import time
from contextlib import contextmanager

import numpy as np
import zmq

from paramserver.config import SimulationsConfig
from paramserver.online.protocol import (
    Header,
    MessageKind,
    SimulationReport,
    TrainerJoined,
    pack_descriptor,
    pack_opening,
    wire_dtype,
)
from paramserver.online.spec import IngestSpec, ReceiverSpec

TOKEN = b"secret of the run"
SHAPE = (4, 3)
PATIENCE_S = 20.0


def ingest_spec(**keys):
    return IngestSpec.from_config(SimulationsConfig(**{"fields": {"u": list(SHAPE)}, **keys}))


def receiver_spec(coordinator, *, index=0, trainers=1, timeout_s=10.0, **keys):
    return ReceiverSpec(coordinator.address, TOKEN, ingest_spec(**keys), index, trainers, timeout_s=timeout_s)


def array_bytes(array):
    """The bytes of an array in C order, little-endian."""
    return np.ascontiguousarray(array, dtype=wire_dtype(array)).reshape(-1).view(np.uint8).data


def field(simulation, step, shape=SHAPE):
    """A different array for every sample."""
    return np.full(shape, 1000 * simulation + step, np.float32)


def open_message(simulation=0, parameters=(), secret=None, **head):
    return [Header(MessageKind.OPEN, simulation, **head).pack(), *pack_opening(parameters, secret)]


def sample_message(simulation, step, fields=None, **head):
    fields = {"u": field(simulation, step)} if fields is None else fields
    head = Header(MessageKind.SAMPLE, simulation, step, **head).pack()
    return [head, pack_descriptor(fields), *(bytes(array_bytes(array)) for array in fields.values())]


class FakeCoordinator:
    """Replies READY to JOIN and REPORT, and records them. For ``with``.

    Args:
        answers: whether it replies.
        refuses: the text with which it refuses trainers.
    """

    def __init__(self, answers=True, refuses=None):
        self.answers = answers
        self.refuses = refuses
        self.joined = {}
        self.tokens = []
        self.reports = []
        self.counts = {}
        self.active = set()
        self.left = set()
        self._changed = threading.Condition()

    def __enter__(self):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._wakeup_out, self._wakeup_in = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._wakeup_in.bind("inproc://wakeup")
        self._wakeup_out.connect("inproc://wakeup")
        self._thread = threading.Thread(target=self._run, name="fake coordinator")
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._wakeup_out.send(b"end")
        self._thread.join(PATIENCE_S)
        for one in (self._socket, self._wakeup_in, self._wakeup_out):
            one.close(0)
        self._context.term()

    def _run(self):
        poller = zmq.Poller()
        peers = set()
        for one in (self._socket, self._wakeup_in):
            poller.register(one, zmq.POLLIN)
        while True:
            due = dict(poller.poll())
            if self._wakeup_in in due:
                order = self._wakeup_in.recv()
                if order == b"end":
                    return
                for peer in peers:
                    self._socket.send_multipart([peer, Header(MessageKind.DRAIN).pack()])
            if self._socket in due:
                peer, *frames = self._socket.recv_multipart()
                peers.add(peer)
                self._record(frames)
                if self.refuses:
                    self._socket.send_multipart([peer, Header(MessageKind.REFUSED).pack(), self.refuses.encode()])
                elif self.answers:
                    self._socket.send_multipart([peer, Header(MessageKind.READY).pack()])

    def _record(self, frames):
        header = Header.unpack(frames[0])
        with self._changed:
            if header.kind is MessageKind.JOIN:
                self.tokens.append(frames[1])
                self.joined[header.simulation] = TrainerJoined.unpack(frames[2])
            elif header.kind is MessageKind.OVER:
                self.left.add(header.simulation)
            else:
                report = SimulationReport.unpack(frames[1])
                self.reports.append(report)
                self.counts.update({(header.simulation, key): n for key, n in report.received.items()})
                self.active.update(report.active)
            self._changed.notify_all()

    def wait(self, condition):
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S)

    def trainer(self, index=0):
        """The address of a trainer, once it has joined."""
        self.wait(lambda: index in self.joined)
        return self.joined[index].address

    def finish(self):
        self._wakeup_out.send(b"finish")


class Sender:
    """A client of one trainer, without flow control."""

    def __init__(self, context, address, name=None):
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndtimeo = round(1000 * PATIENCE_S)
        if name is not None:
            self.socket.routing_id = name
        self.socket.connect(address)
        self.acked = 0
        self.received = []

    def send(self, frames):
        self.socket.send_multipart(frames)
        return self

    def open(self, simulation=0, parameters=(), **head):
        return self.send(open_message(simulation, parameters, **head))

    def sample(self, simulation, step, fields=None, **head):
        return self.send(sample_message(simulation, step, fields, **head))

    def heartbeat(self, simulation=0, **head):
        return self.send([Header(MessageKind.HEARTBEAT, simulation, **head).pack()])

    def receive(self, timeout_s=PATIENCE_S):
        """One message: its kind and text."""
        assert self.socket.poll(1000 * timeout_s), "no answer"
        frames = self.socket.recv_multipart()
        header = Header.unpack(frames[0])
        if header.kind is MessageKind.ACK:
            self.acked = header.step
        self.received.append((header.kind, frames[1].decode() if len(frames) > 1 else ""))
        return self.received[-1]

    def receive_until(self, condition):
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            self.receive(max(deadline - time.monotonic(), 0.0))
        return self

    def receive_acks(self, count):
        return self.receive_until(lambda: self.acked >= count)


@contextmanager
def senders():
    """``new(address)`` makes one; all are closed at the end."""
    context, made = zmq.Context(), []

    def new(address, name=None):
        made.append(Sender(context, address, name))
        return made[-1]

    try:
        yield new
    finally:
        for one in made:
            one.socket.close(0)
        context.term()

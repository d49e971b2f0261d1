"""An online run without a run: a plan, messages, a desk and clients of plain sockets."""

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
    describe,
    pack_parameters,
    raw,
)
from paramserver.online.spec import IngestSpec, ReceiverSpec

TOKEN = b"secret of the run"
SHAPE = (4, 3)
PATIENCE_S = 20.0


def plan(**keys):
    return IngestSpec.of(SimulationsConfig(**{"fields": {"u": list(SHAPE)}, **keys}))


def post(desk, *, index=0, trainers=1, timeout_s=10.0, **keys):
    return ReceiverSpec(desk.address, TOKEN, plan(**keys), index, trainers, timeout_s=timeout_s)


def field(simulation, step, shape=SHAPE):
    """Nobody else gives the same."""
    return np.full(shape, 1000 * simulation + step, np.float32)


def opening(simulation=0, parameters=(), **head):
    return [Header(MessageKind.OPEN, simulation, **head).pack(), pack_parameters(parameters)]


def message(simulation, step, fields=None, **head):
    fields = {"u": field(simulation, step)} if fields is None else fields
    head = Header(MessageKind.SAMPLE, simulation, step, **head).pack()
    return [head, describe(fields), *(bytes(raw(array)) for array in fields.values())]


class Desk:
    """Answers JOIN and REPORT with READY, and remembers them. For ``with``.

    Args:
        answers: whether it does; a silent one only listens.
        refuses: the sentence with which it refuses a trainer.
    """

    def __init__(self, answers=True, refuses=None):
        self.answers = answers
        self.refuses = refuses
        self.joined = {}
        self.tokens = []
        self.reports = []
        self.counts = {}
        self.heard = set()
        self.left = set()
        self._changed = threading.Condition()
        self._said = []

    def __enter__(self):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._bell_out, self._bell_in = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._bell_in.bind("inproc://bell")
        self._bell_out.connect("inproc://bell")
        self._thread = threading.Thread(target=self._run, name="fake desk")
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._bell_out.send(b"end")
        self._thread.join(PATIENCE_S)
        for one in (self._socket, self._bell_in, self._bell_out):
            one.close(0)
        self._context.term()

    def _run(self):
        poller = zmq.Poller()
        peers = set()
        for one in (self._socket, self._bell_in):
            poller.register(one, zmq.POLLIN)
        while True:
            due = dict(poller.poll())
            if self._bell_in in due:
                word = self._bell_in.recv()
                if word == b"end":
                    return
                for peer in peers:
                    self._socket.send_multipart([peer, Header(MessageKind.FINISH).pack()])
            if self._socket in due:
                peer, *frames = self._socket.recv_multipart()
                peers.add(peer)
                self._note(frames)
                if self.refuses:
                    self._socket.send_multipart([peer, Header(MessageKind.REFUSED).pack(), self.refuses.encode()])
                elif self.answers:
                    self._socket.send_multipart([peer, Header(MessageKind.READY).pack()])

    def _note(self, frames):
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
                self.heard.update(report.heard)
            self._changed.notify_all()

    def wait(self, condition):
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S)

    def trainer(self, index=0):
        """The address of a trainer, once it has joined."""
        self.wait(lambda: index in self.joined)
        return self.joined[index].address

    def finish(self):
        self._bell_out.send(b"finish")


class Sender:
    """A client of one trainer, with no idea of windows."""

    def __init__(self, context, address, name=None):
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        if name is not None:
            self.socket.routing_id = name
        self.socket.connect(address)
        self.taken = 0
        self.said = []

    def send(self, frames):
        self.socket.send_multipart(frames)
        return self

    def open(self, simulation=0, parameters=(), **head):
        return self.send(opening(simulation, parameters, **head))

    def sample(self, simulation, step, fields=None, **head):
        return self.send(message(simulation, step, fields, **head))

    def touch(self, simulation=0, **head):
        return self.send([Header(MessageKind.TOUCH, simulation, **head).pack()])

    def hear(self, timeout_s=PATIENCE_S):
        """One message: its header and sentence."""
        assert self.socket.poll(1000 * timeout_s), "no answer"
        frames = self.socket.recv_multipart()
        header = Header.unpack(frames[0])
        if header.kind is MessageKind.TAKEN:
            self.taken = header.step
        self.said.append((header.kind, frames[1].decode() if len(frames) > 1 else ""))
        return self.said[-1]

    def hear_until(self, condition):
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            self.hear(max(deadline - time.monotonic(), 0.0))
        return self

    def hear_taken(self, count):
        return self.hear_until(lambda: self.taken >= count)


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

"""The peers of a coordinator: clients and trainers as plain sockets, all in the thread of the test."""

import time

import zmq

from paramserver.online.protocol import Header, MessageKind, SimulationReport, TrainerJoined, pack_opening, start_secret
from paramserver.online.security import secure_trainer_socket

DEADLINE_S = 20.0


class Peers:
    """Owns the context and all sockets of a test."""

    def __init__(self):
        self.context = zmq.Context()
        self._sockets = []

    def open(self, kind, keys=None):
        opened = self.context.socket(kind)
        opened.linger = 0
        # A DEALER whose handshake was refused has no peer any more: a send would wait forever.
        opened.sndtimeo = round(1000 * DEADLINE_S)
        if keys is not None:
            secure_trainer_socket(opened, keys)
        self._sockets.append(opened)
        return opened

    def connect(self, address, keys=None):
        return Peer(self.open(zmq.DEALER, keys), address)

    def client(self, address, simulation=0, **header):
        return Client(self.open(zmq.DEALER), address, simulation, header)

    def trainer(self, coordinator, index=0, keys=None):
        return Trainer(self.open(zmq.DEALER, keys), self.open(zmq.ROUTER), coordinator, index)

    def close(self):
        for opened in self._sockets:
            opened.close()
        self.context.term()


class Peer:
    """A socket that talks to the coordinator."""

    def __init__(self, socket, address):
        self.socket = socket
        socket.connect(address)

    def send(self, header, *frames):
        self.socket.send_multipart([header.pack(), *frames])

    def receive(self, timeout_s=DEADLINE_S):
        """Kind and body of the next message; None after the time."""
        if not self.socket.poll(round(1000 * timeout_s)):
            return None
        first, *body = self.socket.recv_multipart()
        return Header.unpack(first).kind, *body

    def receive_kind(self, kind):
        """The body of the next message of this kind; others are passed over."""
        while (found := self.receive()) is not None:
            if found[0] is kind:
                return found[1:]
        raise AssertionError(f"there was no {kind.name}")


class Client(Peer):
    """A producer at the coordinator, which sends no samples itself."""

    def __init__(self, socket, address, simulation, header):
        super().__init__(socket, address)
        self.simulation, self.header = simulation, header

    def send_kind(self, kind, *frames, step=0):
        self.send(Header(kind, self.simulation, step, **self.header), *frames)

    def hello(self, parameters=(), token=None):
        """With the token of a run that starts its simulations."""
        secret = None if token is None else start_secret(token, self.simulation, self.header.get("attempt", 0))
        self.send_kind(MessageKind.HELLO, *pack_opening(parameters, secret))
        return self

    def bye(self, samples):
        self.send_kind(MessageKind.BYE, step=samples)


class Trainer(Peer):
    """Receives samples, drops duplicates, and reports to the coordinator."""

    def __init__(self, socket, router, coordinator, index):
        super().__init__(socket, coordinator.address)
        self.index, self.router = index, router
        router.bind("tcp://127.0.0.1:*")
        self.address = router.last_endpoint.decode().rstrip("\0")
        self.token = coordinator.token
        self.samples = set()
        self.counts = {}
        self.duplicated = 0
        self.finished = False
        self.acknowledges = True
        self._processed = {}
        self._active = set()

    def join(self, token=None, inherited=None, **received):
        counts = {int(key[1:]): count for key, count in received.items()}
        self.counts = dict(counts)
        joined = TrainerJoined(self.address, counts, inherited or {})
        self.send(Header(MessageKind.JOIN, self.index), token or self.token, joined.pack())
        return self

    def report(self, active=(), **received):
        """As counted, or as given: ``_3=5``."""
        self.counts.update({int(key[1:]): count for key, count in received.items()})
        counted = {"received": sum(self.counts.values()), "duplicated": self.duplicated}
        counters = {**counted, "refused": 2, "refusals": {"late": 2}}
        self.send(Header(MessageKind.REPORT, self.index), SimulationReport(self.counts, list(active), counters).pack())

    def listen(self):
        """Process all messages from clients and the coordinator; returns whether there were any."""
        anything = False
        while self.router.poll(0):
            anything = True
            peer, first, *_ = self.router.recv_multipart()
            self._receive_sample(peer, Header.unpack(first))
        while self.socket.poll(0):
            kind, *_ = self.receive()
            self.finished = self.finished or kind is MessageKind.DRAIN
        return anything

    def _receive_sample(self, peer, header):
        self._active.add((header.simulation, header.member))
        if header.kind is MessageKind.SAMPLE:
            key = (header.simulation, header.step)
            if key in self.samples:
                self.duplicated += 1
            else:
                self.samples.add(key)
                self.counts[header.simulation] = self.counts.get(header.simulation, 0) + 1
            self._processed[peer] = self._processed.get(peer, 0) + 1
        if self.acknowledges:
            self.router.send_multipart([peer, header.reply(MessageKind.ACK, self._processed.get(peer, 0)).pack()])


def serve(trainers, until, timeout_s=60.0, report_every_s=0.1):
    """Be the trainers of a run until something holds."""
    poller = zmq.Poller()
    for trainer in trainers:
        poller.register(trainer.router, zmq.POLLIN)
        poller.register(trainer.socket, zmq.POLLIN)
    deadline, due = time.monotonic() + timeout_s, 0.0
    while not until():
        assert time.monotonic() < deadline, "it did not come to pass"
        poller.poll(1000 * report_every_s)
        for trainer in trainers:
            trainer.listen()
        if time.monotonic() >= due:
            due = time.monotonic() + report_every_s
            for trainer in trainers:
                active, trainer._active = trainer._active, set()
                trainer.report(active)

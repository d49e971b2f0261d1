"""The other ends of a desk: clients and trainers as plain sockets, all in the thread of the test."""

import time

import zmq

from paramserver.online.protocol import Header, MessageKind, SimulationReport, TrainerJoined, pack_parameters
from paramserver.online.security import peer_security

DEADLINE_S = 20.0


class Ends:
    """Owns the context and all sockets of a test."""

    def __init__(self):
        self.context = zmq.Context()
        self._sockets = []

    def open(self, kind, keys=None):
        opened = self.context.socket(kind)
        opened.linger = 0
        if keys is not None:
            peer_security(opened, keys)
        self._sockets.append(opened)
        return opened

    def caller(self, address, keys=None):
        return Caller(self.open(zmq.DEALER, keys), address)

    def client(self, address, simulation=0, **header):
        return Client(self.open(zmq.DEALER), address, simulation, header)

    def trainer(self, desk, index=0, keys=None):
        return Trainer(self.open(zmq.DEALER, keys), self.open(zmq.ROUTER), desk, index)

    def close(self):
        for opened in self._sockets:
            opened.close()
        self.context.term()


class Caller:
    """Somebody who talks to the desk."""

    def __init__(self, socket, address):
        self.socket = socket
        socket.connect(address)

    def say(self, header, *frames):
        self.socket.send_multipart([header.pack(), *frames])

    def heard(self, timeout_s=DEADLINE_S):
        """Kind and body of the next message; None after the time."""
        if not self.socket.poll(round(1000 * timeout_s)):
            return None
        first, *body = self.socket.recv_multipart()
        return Header.unpack(first).kind, *body

    def until(self, kind):
        """The body of the next message of this kind; others are passed over."""
        while (found := self.heard()) is not None:
            if found[0] is kind:
                return found[1:]
        raise AssertionError(f"there was no {kind.name}")


class Client(Caller):
    """A producer at the desk, which sends no samples itself."""

    def __init__(self, socket, address, simulation, header):
        super().__init__(socket, address)
        self.simulation, self.header = simulation, header

    def tell(self, kind, *frames, step=0):
        self.say(Header(kind, self.simulation, step, **self.header), *frames)

    def hello(self, parameters=()):
        self.tell(MessageKind.HELLO, pack_parameters(parameters))
        return self

    def bye(self, samples):
        self.tell(MessageKind.BYE, step=samples)


class Trainer(Caller):
    """Takes what it is sent, once, and tells the desk."""

    def __init__(self, socket, router, desk, index):
        super().__init__(socket, desk.address)
        self.index, self.router = index, router
        router.bind("tcp://127.0.0.1:*")
        self.address = router.last_endpoint.decode().rstrip("\0")
        self.token = desk.token
        self.samples = set()
        self.counts = {}
        self.duplicated = 0
        self.finished = False
        self.takes = True
        self._dealt = {}
        self._heard = set()

    def join(self, token=None, inherited=None, **received):
        counts = {int(key[1:]): count for key, count in received.items()}
        self.counts = dict(counts)
        joined = TrainerJoined(self.address, counts, inherited or {})
        self.say(Header(MessageKind.JOIN, self.index), token or self.token, joined.pack())
        return self

    def report(self, heard=(), **received):
        """As it counted, or as it is told: ``_3=5``."""
        self.counts.update({int(key[1:]): count for key, count in received.items()})
        counted = {"received": sum(self.counts.values()), "duplicated": self.duplicated}
        figures = {**counted, "refused": 2, "refusals": {"late": 2}}
        self.say(Header(MessageKind.REPORT, self.index), SimulationReport(self.counts, list(heard), figures).pack())

    def listen(self):
        """Deal with all that came from clients and the desk; whether anything did."""
        anything = False
        while self.router.poll(0):
            anything = True
            peer, first, *_ = self.router.recv_multipart()
            self._take(peer, Header.unpack(first))
        while self.socket.poll(0):
            kind, *_ = self.heard()
            self.finished = self.finished or kind is MessageKind.FINISH
        return anything

    def _take(self, peer, header):
        self._heard.add((header.simulation, header.member))
        if header.kind is MessageKind.SAMPLE:
            key = (header.simulation, header.step)
            if key in self.samples:
                self.duplicated += 1
            else:
                self.samples.add(key)
                self.counts[header.simulation] = self.counts.get(header.simulation, 0) + 1
            self._dealt[peer] = self._dealt.get(peer, 0) + 1
        if self.takes:
            self.router.send_multipart([peer, header.answer(MessageKind.TAKEN, self._dealt.get(peer, 0)).pack()])


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
                heard, trainer._heard = trainer._heard, set()
                trainer.report(heard)

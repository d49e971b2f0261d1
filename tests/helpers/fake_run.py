"""A run as a client sees it: a desk and trainers, plain ROUTER sockets in one thread, which answer as they are told."""

import threading
from collections import Counter, defaultdict

import zmq

from paramserver.online.protocol import (
    ArrayDescriptor,
    Header,
    MessageKind,
    TrainerDirectory,
    array_of,
    pack_json,
    read_descriptor,
    read_parameters,
)

FIELDS = (ArrayDescriptor("temperature", "<f4", (2, 3)),)


class FakeRun:
    """Owns the thread. Whatever it answers may be changed while it runs; what it heard is in lists of its own.

    Attributes:
        samples: trainer -> [(header, {field: array})] in order of arrival.
        heard: (who, kind), who is "desk" or the index of a trainer.
        takes: whether a trainer says TAKEN; ``release`` says it for all it holds back.
        answers: kind -> a function of the header that gives the frames of another answer, or None for silence.
    """

    def __init__(self, trainers=2, host="127.0.0.1", security=None, port=None, **welcome):
        self.context = zmq.Context()
        self.security = security(self.context) if security is not None else None
        self.desk = self._router(host, port)
        self.trainers = [self._router(host) for _ in range(trainers)]
        self.address = self._address(self.desk)
        given = {"only": None, "window": 4, "timeout_s": 20.0, "steps": 100, "fields": FIELDS, **welcome}
        self.welcome = TrainerDirectory(trainers=tuple(map(self._address, self.trainers)), **given)
        self.samples = defaultdict(list)
        self.heard = []
        self.opened = []
        self.hellos = []
        self.byes = []
        self.arrived = Counter()
        self.taken = Counter()
        self.takes = True
        self.answers = {}
        self.changed = threading.Condition()
        self._peers = {}
        self._wake, self._woken = self.context.socket(zmq.PAIR), self.context.socket(zmq.PAIR)
        self._woken.bind("inproc://wake")
        self._wake.connect("inproc://wake")
        self._orders = []
        self._thread = threading.Thread(target=self._serve, name="fake-run")
        self._failure = None
        self._thread.start()

    def _router(self, host, port=None):
        router = self.context.socket(zmq.ROUTER)
        router.linger = 500
        if self.security is not None:
            self.security.protect(router)
        router.bind(f"tcp://{host}:{port or '*'}")
        return router

    @staticmethod
    def _address(router):
        return router.last_endpoint.decode().rstrip("\0")

    # What a test orders, done in the thread that has the sockets.

    def order(self, action):
        self._orders.append(action)
        self._wake.send(b"")

    def release(self):
        """From now on everything is taken, also what was held back."""

        def act():
            self.takes = True
            for key in self.arrived:
                self._say_taken(*key)

        self.order(act)

    def drop(self, index):
        """A trainer that is gone."""
        self.order(lambda: self.trainers[index].close(linger=0))

    def say(self, who, kind, text=b""):
        """To every client that this one knows."""

        def act():
            for peer, header in list(self._peers.get(who, {}).items()):
                self._send(who, peer, header.answer(kind), text)

        self.order(act)

    def wait_for(self, condition, timeout_s=20):
        with self.changed:
            assert self.changed.wait_for(lambda: self._failure or condition(), timeout_s), "it did not come to pass"
        if self._failure:
            raise self._failure

    def kinds(self, who):
        return [kind for whom, kind in self.heard if whom == who]

    def keys(self):
        """(simulation, step) of all samples, in order of arrival at each trainer."""
        return {i: [(h.simulation, h.step) for h, _ in got] for i, got in sorted(self.samples.items())}

    # The thread.

    def _socket(self, who):
        return self.desk if who == "desk" else self.trainers[who]

    def _send(self, who, peer, header, *frames):
        self._socket(who).send_multipart([peer, header.pack(), *frames])

    def _say_taken(self, who, peer):
        if self.takes:
            self.taken[who, peer] = self.arrived[who, peer]
        self._send(who, peer, self._peers[who][peer].answer(MessageKind.TAKEN, self.taken[who, peer]))

    def _serve(self):
        try:
            while True:
                poller = zmq.Poller()
                named = {self._woken: None, self.desk: "desk", **{t: i for i, t in enumerate(self.trainers)}}
                for socket in (s for s in named if not s.closed):
                    poller.register(socket, zmq.POLLIN)
                for socket, _ in poller.poll(60_000) or [(None, 0)]:
                    if socket is None:
                        raise TimeoutError("nobody wants anything of this fake run")
                    frames = socket.recv_multipart()
                    if socket is not self._woken:
                        self._hear(named[socket], *frames)
                    elif frames != [b""]:
                        return
                    else:
                        self._orders.pop(0)()
                with self.changed:
                    self.changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised to the test
            self._failure = error
            with self.changed:
                self.changed.notify_all()

    def _hear(self, who, peer, first, *frames):
        header = Header.unpack(first)
        self.heard.append((who, header.kind))
        self._peers.setdefault(who, {})[peer] = header
        own = self.answers.get(header.kind, ...)
        if own is not ...:
            answer = own(header) if own is not None else None
            if answer is not None:
                self._socket(who).send_multipart([peer, *answer])
            return
        if who == "desk":
            self._at_desk(peer, header, frames)
        else:
            self._at_trainer(who, peer, header, frames)

    def _at_desk(self, peer, header, frames):
        if header.kind is MessageKind.HELLO:
            self.hellos.append((header, read_parameters(frames[0])))
            self._send("desk", peer, header.answer(MessageKind.WELCOME), self.welcome.pack())
        elif header.kind is MessageKind.BYE:
            self.byes.append(header)
        elif header.kind is MessageKind.PING:
            self._send("desk", peer, header.answer(MessageKind.PONG), pack_json({"alive": True}))

    def _at_trainer(self, who, peer, header, frames):
        if header.kind is MessageKind.OPEN:
            self.opened.append((who, header._replace(kind=MessageKind.OPEN), read_parameters(frames[0])))
        elif header.kind is MessageKind.SAMPLE:
            described = read_descriptor(frames[0])
            arrays = {f.name: array_of(f, frame) for f, frame in zip(described, frames[1:], strict=True)}
            self.samples[who].append((header, arrays))
            self.arrived[who, peer] += 1
        if self.takes or header.kind is MessageKind.TOUCH:
            self._say_taken(who, peer)

    def __enter__(self):
        return self

    def __exit__(self, kind, *rest):
        self._wake.send(b"end")
        self._thread.join(20)
        assert not self._thread.is_alive()
        for socket in (self.desk, *self.trainers, self._wake, self._woken):
            socket.close()
        if self.security is not None:
            self.security.close()
        self.context.term()
        if self._failure and kind is None:
            raise self._failure

"""A run as a client sees it: a coordinator and trainers, plain ROUTER sockets in one thread."""

import threading
from collections import Counter, defaultdict

import numpy as np
import zmq

from paramserver.online.protocol import (
    VERSION,
    ArrayDescriptor,
    Header,
    MessageKind,
    TrainerDirectory,
    pack_json,
    unpack_descriptor,
    unpack_parameters,
)

FIELDS = (ArrayDescriptor("temperature", "<f4", (2, 3)),)


class FakeRun:
    """Owns the thread. Its replies may be changed while it runs; what it received is in lists.

    Attributes:
        samples: trainer -> [(header, {field: array})] in order of arrival.
        messages: (who, kind), who is "coordinator" or the index of a trainer.
        acknowledges: whether a trainer sends ACK; ``release`` sends it for all that it holds back.
        answers: kind -> a function of the header that gives the frames of another answer, or None for silence.
    """

    def __init__(self, trainers=2, host="127.0.0.1", security=None, port=None, **welcome):
        self.context = zmq.Context()
        self.security = security(self.context) if security is not None else None
        self.coordinator = self._router(host, port)
        self.trainers = [self._router(host) for _ in range(trainers)]
        self.address = self._address(self.coordinator)
        given = {"single_trainer": None, "window": 4, "timeout_s": 20.0, "steps": 100, "fields": FIELDS, **welcome}
        self.directory = TrainerDirectory(trainers=tuple(map(self._address, self.trainers)), **given)
        self.samples = defaultdict(list)
        self.messages = []
        self.opened = []
        self.hellos = []
        self.byes = []
        self.arrived = Counter()
        self.acked = Counter()
        self.acknowledges = True
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
        """From now on everything is acknowledged, also what was held back."""

        def act():
            self.acknowledges = True
            for key in self.arrived:
                self._send_ack(*key)

        self.order(act)

    def drop(self, index):
        """A trainer that is gone."""
        self.order(lambda: self.trainers[index].close(linger=0))

    def send_to_all(self, who, kind, text=b""):
        """Send to every client that has sent something to this one."""

        def act():
            for peer, header in list(self._peers.get(who, {}).items()):
                self._send(who, peer, header.reply(kind), text)

        self.order(act)

    def wait_for(self, condition, timeout_s=20):
        with self.changed:
            assert self.changed.wait_for(lambda: self._failure or condition(), timeout_s), "it did not come to pass"
        if self._failure:
            raise self._failure

    def kinds(self, who):
        return [kind for whom, kind in self.messages if whom == who]

    def keys(self):
        """(simulation, step) of all samples, in order of arrival at each trainer."""
        return {i: [(h.simulation, h.step) for h, _ in got] for i, got in sorted(self.samples.items())}

    # The thread.

    def _socket(self, who):
        return self.coordinator if who == "coordinator" else self.trainers[who]

    def _send(self, who, peer, header, *frames):
        self._socket(who).send_multipart([peer, header.pack(), *frames])

    def _send_ack(self, who, peer):
        if self.acknowledges:
            self.acked[who, peer] = self.arrived[who, peer]
        self._send(who, peer, self._peers[who][peer].reply(MessageKind.ACK, self.acked[who, peer]))

    def _serve(self):
        try:
            while True:
                poller = zmq.Poller()
                named = {
                    self._woken: None,
                    self.coordinator: "coordinator",
                    **{t: i for i, t in enumerate(self.trainers)},
                }
                for socket in (s for s in named if not s.closed):
                    poller.register(socket, zmq.POLLIN)
                for socket, _ in poller.poll(60_000) or [(None, 0)]:
                    if socket is None:
                        raise TimeoutError("no message came to this fake run")
                    frames = socket.recv_multipart()
                    if socket is not self._woken:
                        self._receive(named[socket], *frames)
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

    def _receive(self, who, peer, first, *frames):
        header = Header.unpack(first)
        self.messages.append((who, header.kind))
        self._peers.setdefault(who, {})[peer] = header
        own = self.answers.get(header.kind, ...)
        if own is not ...:
            answer = own(header) if own is not None else None
            if answer is not None:
                self._socket(who).send_multipart([peer, *answer])
            return
        if who == "coordinator":
            self._at_coordinator(peer, header, frames)
        else:
            self._at_trainer(who, peer, header, frames)

    def _at_coordinator(self, peer, header, frames):
        if header.kind is MessageKind.HELLO:
            self.hellos.append((header, unpack_parameters(frames[0])))
            self._send("coordinator", peer, header.reply(MessageKind.WELCOME), self.directory.pack())
        elif header.kind is MessageKind.BYE:
            self.byes.append(header)
            self._send("coordinator", peer, header.reply(MessageKind.READY))
        elif header.kind is MessageKind.PING:
            self._send("coordinator", peer, header.reply(MessageKind.PONG), pack_json({"alive": True}))

    def _at_trainer(self, who, peer, header, frames):
        if header.kind is MessageKind.OPEN:
            self.opened.append((who, header._replace(kind=MessageKind.OPEN), unpack_parameters(frames[0])))
        elif header.kind is MessageKind.SAMPLE:
            described = unpack_descriptor(frames[0])
            arrays = {
                f.name: np.frombuffer(frame, f.dtype).reshape(f.shape)
                for f, frame in zip(described, frames[1:], strict=True)
            }
            self.samples[who].append((header, arrays))
            self.arrived[who, peer] += 1
        if self.acknowledges or header.kind is MessageKind.HEARTBEAT:
            self._send_ack(who, peer)

    def __enter__(self):
        return self

    def __exit__(self, kind, *rest):
        self._wake.send(b"end")
        self._thread.join(20)
        assert not self._thread.is_alive()
        for socket in (self.coordinator, *self.trainers, self._wake, self._woken):
            socket.close()
        if self.security is not None:
            self.security.close()
        self.context.term()
        if self._failure and kind is None:
            raise self._failure


def sample(step):
    return {"temperature": np.full((2, 3), step, np.float32)}


def send_all(client, steps):
    for step in steps:
        client.send(step, sample(step))


def end_before_the_last_ack(run, client, who):
    """Let a process say that the run is over while another one, trainer 1, has not acknowledged its sample yet."""
    client.send(0, sample(0))
    run.wait_for(lambda: run.samples[0])
    run.acknowledges = False
    client.send(1, sample(1))
    run.wait_for(lambda: run.samples[1])
    run.send_to_all(who, MessageKind.OVER)


def end_before_close(run, client):
    """Let all trainers end, with OVER after their last ACK, while the client computes after its last sample."""
    send_all(client, [0, 1])
    run.wait_for(lambda: run.samples[0] and run.samples[1])
    for index, trainer in enumerate(run.trainers):
        run.send_to_all(index, MessageKind.OVER)
        run.order(trainer.close)
    run.wait_for(lambda: all(trainer.closed for trainer in run.trainers))


def refuse_33_messages(run, client):
    """Three with the same sentence and thirty with others, while the client sends six samples and is closed."""
    run.acknowledges = False
    send_all(client, [0])
    run.wait_for(lambda: run.samples[0])
    for _ in range(3):
        run.send_to_all(0, MessageKind.REFUSED, b"temperature must be finite")
    for number in range(30):
        run.send_to_all(0, MessageKind.REFUSED, f"step {number} is odd".encode())
    run.release()
    send_all(client, range(2, 12, 2))
    client.close()
    assert client.refused == 33


def refuse_as_newer_version(header):
    """An answer of a ``FakeRun``: a refusal with the next version of the protocol in its header."""
    packed = bytearray(header.reply(MessageKind.REFUSED).pack())
    packed[2] = VERSION + 1
    return [bytes(packed), b"?"]

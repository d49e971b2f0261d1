"""Server and trainer transports connected in one process: what is received, and what is rejected."""

import threading

import pytest
import torch
from torch import nn

from paramserver.config import ServerConfig
from paramserver.config.schema import TRANSPORTS, sends
from paramserver.consistency import PushId
from paramserver.errors import ParamserverError, TrainingError
from paramserver.optim.shard_updater import ShardUpdater
from paramserver.parameters.flat import FlatLayout, FlatTensors, trainable_parameters
from paramserver.parameters.sharding import full_shard
from paramserver.server.shard import ParameterShard
from paramserver.transport.autograd import local_root
from paramserver.transport.compression import CastCodec
from paramserver.transport.messages import ApplyRequest
from paramserver.transport.rpc import RpcServerTransport, RpcTrainerTransport
from paramserver.transport.segments import SegmentHost
from paramserver.transport.shared_memory import (
    LiveParameters,
    RingSnapshots,
    ServerSharedMemory,
    SharedMemoryServerTransport,
    SharedMemoryTrainerTransport,
    gradients_key,
    parameters_key,
)

TIMEOUT_S = 10.0


def test_the_config_declares_what_a_transport_does():
    flat = FlatTensors(trainable_parameters(model()))
    parameters = own(model(), flat.layout)
    over_rpc, over_tcp = (
        RpcTrainerTransport(flat.layout, [full_shard(flat.layout)], CastCodec(None), parameters, connected=connected)
        for connected in (False, True)
    )
    for transport in (over_rpc, over_tcp, SharedMemoryTrainerTransport):
        allowed = TRANSPORTS[transport.name]
        assert (allowed.shares_memory, allowed.sends) == (transport.zero_copy, not transport.zero_copy)
        assert sends(transport.name) is not transport.zero_copy
        assert allowed.connects is not (transport.zero_copy or transport.recorded)
    assert sends("gloo")


def model(value=1.0):
    made = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    for parameter in made.parameters():
        nn.init.constant_(parameter, value)
    return made


def own(module, layout):
    named = trainable_parameters(module)
    return [named[slot.name] for slot in layout.slots]


def connected(dtype, value=1.0, start=1.0):
    """A server's parameters, a trainer's, and the rpc transports between them."""
    flat = FlatTensors(trainable_parameters(model(value)))
    codec = CastCodec(dtype)
    theirs = own(model(start), flat.layout)
    shard, parameters = full_shard(flat.layout), list(flat.tensors.values())
    updater = ShardUpdater(flat.layout, shard, flat.flats, parameters, torch.optim.SGD(parameters, lr=1.0))
    server = Server(ParameterShard(updater, codec, threading.RLock(), 0))
    return server, RpcTrainerTransport(flat.layout, [shard], codec, theirs), theirs


class Server:
    """The side of the server: its shard, the transport of a trainer, and the gradients that have arrived."""

    def __init__(self, shard):
        self.shard, self.transport, self.sender = shard, RpcServerTransport(shard.sent_version), PushId(0, 1, 1, 1)
        self.pushed = []
        shard.on_push = self.pushed.append

    def pull(self):
        return self.shard.pull(self.sender, self.shard.version)

    def gradients(self):
        """Report a push whose gradients were sent, and return them; None if they are not complete."""
        push, version = PushId(0, 1, 1, 1), self.shard.version
        self.shard.report_push(push, version)
        if not self.pushed:
            return None
        request = ApplyRequest(version + 1, ((push, None),), (1.0,), None, None, frozenset())
        return self.shard.take_gradients(request)[push]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_version_is_pulled_and_a_gradient_is_pushed(dtype):
    server, trainer, theirs = connected(dtype, value=1 / 3)
    pulled = server.pull()
    assert all(tensor.dtype == dtype for tensor in pulled)
    trainer.load(pulled)
    expected = torch.tensor(1 / 3).to(dtype).float()
    assert all(torch.equal(p, expected.expand_as(p)) for p in theirs)
    assert all(p.dtype == torch.float32 for p in theirs)
    for view in trainer.gradient_views:
        view.fill_(0.1)
    trainer.backward_root(pulled).backward()
    got = server.gradients()
    rounded = torch.tensor(0.1).to(dtype).float()
    assert got is not None
    assert all(flat.dtype == torch.float32 for flat in got)
    assert torch.equal(got[0][:6], rounded.expand(6))
    assert trainer.step_bytes(pulled) == 2 * sum(t.numel() for t in pulled) * dtype.itemsize


def test_a_context_without_gradients_is_no_push():
    server, *_ = connected(torch.float32)
    assert server.gradients() is None


def test_a_version_that_may_still_be_pulled_stays_when_the_version_changes():
    server, trainer, _ = connected(torch.float32)
    first = server.pull()
    offered = first[0].detach().clone()
    trainer.gradient_views[0].fill_(1.0)
    trainer.backward_root(first).backward()
    push = PushId(0, 1, 1, 1)
    server.shard.report_push(push, 0)
    request = ApplyRequest(1, ((push, None),), (1.0,), None, None, frozenset({0}))
    assert server.shard.apply(request).wait() is None
    assert torch.equal(server.shard.pull(server.sender, 0)[0], offered)
    assert not torch.equal(server.pull()[0], offered)


def test_a_version_is_rounded_once_for_all_trainers():
    server, *_ = connected(torch.bfloat16)
    assert server.shard.sent_version() is server.shard.sent_version()


def test_a_parameter_too_large_for_the_wire_is_named():
    server, *_ = connected(torch.float16, value=1e5)
    with pytest.raises(TrainingError, match=r"parameter 0\.weight has a value of 1e\+05, .* \(float16\)"):
        server.transport.pin_version()


def test_a_gradient_too_large_for_the_wire_is_named():
    server, trainer, theirs = connected(torch.float16)
    pulled = server.pull()
    for parameter, view in zip(theirs, trainer.gradient_views, strict=True):
        parameter.grad = torch.ones_like(parameter)
        view.fill_(1.0)
    theirs[2].grad[0, 1] = -7e4
    trainer.gradient_views[2].copy_(theirs[2].grad)
    with pytest.raises(TrainingError, match=r"the gradient of parameter 1\.weight has a value of 7e\+04"):
        trainer.backward_root(pulled)


def test_a_gradient_that_was_infinite_before_rounding_is_sent():
    server, trainer, theirs = connected(torch.float16)
    for number, (parameter, view) in enumerate(zip(theirs, trainer.gradient_views, strict=True)):
        parameter.grad = torch.full_like(parameter, 1.0 if number else float("inf"))
        view.copy_(parameter.grad)
    trainer.backward_root(server.pull()).backward()
    sent = server.gradients()
    layout = FlatLayout.of([(str(number), parameter) for number, parameter in enumerate(theirs)])
    assert all(torch.equal(got, p.grad) for got, p in zip(layout.views(sent).values(), theirs, strict=True))


def test_types_as_small_as_the_wires_stay():
    layout = FlatLayout.of(
        [("a", torch.zeros(2)), ("b", torch.zeros(2, dtype=torch.bfloat16)), ("c", torch.zeros(1).double())]
    )
    assert CastCodec(torch.float16).wire_layout(layout).dtypes == (torch.float16, torch.bfloat16, torch.float16)
    assert CastCodec(torch.float32).wire_layout(layout).dtypes == (torch.float32, torch.bfloat16, torch.float32)
    spectrum = FlatLayout.of([("spectrum", torch.zeros(2, dtype=torch.complex64))])
    assert CastCodec(torch.bfloat16).wire_layout(spectrum) == spectrum, "a cast would drop the imaginary part"


# In memory.


@pytest.fixture
def host():
    with SegmentHost("test", TIMEOUT_S) as opened:
        yield opened


def live(host):
    flat = FlatTensors(trainable_parameters(model(1.0)), lambda layout: host.allocate(parameters_key(0), layout))
    gradients = host.allocate(gradients_key(0), flat.layout)
    server = SharedMemoryServerTransport(LiveParameters())
    theirs = own(model(5.0), flat.layout)
    return (
        flat,
        gradients,
        server,
        theirs,
        SharedMemoryTrainerTransport(flat.layout, theirs, host.address, 1, 0, TIMEOUT_S),
    )


def test_parameters_are_read_in_place_and_gradients_written_in_place(host):
    flat, gradients, server, theirs, trainer = live(host)
    trainer.map_version(server.pin_version())
    assert all(torch.equal(p, torch.ones_like(p)) for p in theirs)
    flat.flats[0].fill_(2.0)
    assert all(torch.equal(p, torch.full_like(p, 2.0)) for p in theirs)
    trainer.gradient_views[0].fill_(3.0)
    assert float(gradients[0][0]) == 3.0
    assert trainer.step_bytes(()) == 0


def test_the_local_root_is_that_of_any_number_of_backwards_also_where_gradients_were_switched_off():
    with torch.no_grad():
        root = local_root()
    for _ in range(3):
        root.backward()


def test_a_model_can_load_a_copy_and_map_a_version_again(host):
    flat, _, server, theirs, trainer = live(host)
    trainer.map_version(server.pin_version())
    trainer.load([torch.full_like(tensor, 7.0) for tensor in flat.flats])
    assert theirs[0][0, 0].item() == 7.0
    assert float(flat.flats[0][0]) == 1.0
    trainer.map_version(server.pin_version())
    assert theirs[0][0, 0].item() == 1.0


def test_free_trainers_read_snapshots_that_stay_while_they_are_pinned(host):
    flat = FlatTensors(trainable_parameters(model(0.0)))
    version = [0]
    snapshots = RingSnapshots(host, flat.layout, 2, lambda: (version[0], flat.flats))
    servers, models = [], []
    for index in range(2):
        host.allocate(gradients_key(index), flat.layout)
        servers.append(SharedMemoryServerTransport(snapshots, gradients_key(index)))
        theirs = own(model(5.0), flat.layout)
        models.append(
            (
                theirs,
                SharedMemoryTrainerTransport(flat.layout, theirs, host.address, snapshots.num_slots, index, TIMEOUT_S),
            )
        )

    def advance():
        version[0] += 1
        flat.flats[0].fill_(float(version[0]))

    def held(index):
        return models[index][0][0][0, 0].item()

    models[0][1].map_version(servers[0].pin_version())
    for _ in range(20):  # trainer 1 continues while trainer 0 waits
        advance()
        models[1][1].map_version(servers[1].pin_version())
        assert (held(0), held(1)) == (0.0, float(version[0]))
        servers[1].unpin()
    servers[0].unpin()
    models[0][1].map_version(servers[0].pin_version())
    assert held(0) == 20.0


def loads_copies(host):
    flat, _, _, theirs, trainer = live(host)
    return theirs, lambda: trainer.load(flat.clone())


def reads_in_place(host):
    _, _, server, theirs, trainer = live(host)
    return theirs, lambda: trainer.map_version(server.pin_version())


def reads_snapshots(host):
    flat, version = FlatTensors(trainable_parameters(model())), [0]
    host.allocate(gradients_key(0), flat.layout)
    server = SharedMemoryServerTransport(RingSnapshots(host, flat.layout, 1, lambda: (version[0], flat.flats)))
    theirs = own(model(5.0), flat.layout)
    trainer = SharedMemoryTrainerTransport(flat.layout, theirs, host.address, 3, 0, TIMEOUT_S, lockstep=False)

    def load():
        version[0] += 1
        trainer.map_version(server.pin_version())

    return theirs, load


def receives_messages(host):
    flat = FlatTensors(trainable_parameters(model()))
    theirs = own(model(5.0), flat.layout)
    trainer = RpcTrainerTransport(flat.layout, [full_shard(flat.layout)], CastCodec(None), theirs, connected=True)
    return theirs, lambda: trainer.load(flat.clone())


@pytest.mark.parametrize("connect", [loads_copies, reads_in_place, reads_snapshots, receives_messages])
def test_a_graph_of_an_earlier_version_is_refused_and_not_differentiated_at_the_new_one(host, connect):
    """As in a plain loop, where the optimizer changes the parameters in place."""
    parameters, load_next = connect(host)
    for _ in range(2):
        load_next()
        # Of one parameter, as autograd holds the rest of a graph that it refused, and other tests count what is mapped.
        squares = parameters[0].square().sum()
        squares.backward(retain_graph=True)
    load_next()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_a_note_that_all_trainers_share_memory_comes_once_and_with_the_last_of_them(host):
    notes = []
    config = ServerConfig(compression="int8", wire_dtype="bfloat16")
    server = ServerSharedMemory(host, config, lockstep=True, on_note=notes.append)
    layout = FlatTensors(trainable_parameters(model()), server.allocate_parameters).layout
    server.open_snapshots(layout, 2, lambda: (0, []))
    for incarnation in (1, 2, 3):
        assert server.make_transport(0, incarnation, layout)
    assert not notes, "everything is sent to trainer 1"
    for trainer_index, incarnation in ((1, 1), (0, 4), (1, 2)):
        assert server.make_transport(trainer_index, incarnation, layout)
        assert len(notes) == 2
    assert all("as all trainers share the server's memory" in note for note in notes)


def test_a_version_that_is_never_pulled_is_never_copied(host):
    flat = FlatTensors(trainable_parameters(model(0.0)))
    version = [0]
    snapshots = RingSnapshots(host, flat.layout, 1, lambda: (version[0], flat.flats))
    first = snapshots.pin()
    assert snapshots.pin() == first
    version[0] = 9
    assert snapshots.pin() != first


def test_too_many_readers_are_an_error_and_not_a_torn_snapshot(host):
    flat = FlatTensors(trainable_parameters(model(0.0)))
    version = [0]
    snapshots = RingSnapshots(host, flat.layout, 0, lambda: (version[0], flat.flats))
    snapshots.pin()
    version[0] = 1
    snapshots.pin()
    version[0] = 2
    with pytest.raises(ParamserverError, match=r"must find a free slot"):
        snapshots.pin()

"""``server.compute: server``: the model is on the server, and trainers call it as in PyTorch's RPC tutorial."""

import copy
import operator
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import TASKS, differing_tensors, launch, resume, run_in_process, train
from server_forward_tasks import Branches, replay
from servers import no_checkpoints
from tasks import ReferenceModel, ReferenceTask
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paramserver.config import ClusterConfig, Config, DeviceConfig, ServerConfig, config_from_mapping, trainer_of
from paramserver.context import StopRequest
from paramserver.devices import CPU, Placement, place_server, place_trainer
from paramserver.distributed.rpc_calls import WORKER_THREADS, agent_options
from paramserver.errors import ModelIsElsewhere, TaskError, UnsupportedConfiguration
from paramserver.metrics.records import StepReport
from paramserver.parameters.flat import FlatLayout, trainable_parameters
from paramserver.parameters.model_tree import ModelTree
from paramserver.rng import PrivateRng
from paramserver.runs.monitor import RunMonitor
from paramserver.server.build import build_server
from paramserver.server.model_service import ModelService, ServedTransport
from paramserver.server.parameter_store import ParameterStore
from paramserver.trainers.server_forward import RemoteModel
from paramserver.trainers.validation import eval_mode
from paramserver.transport.autograd import recv_outputs, send_outputs
from paramserver.transport.messages import ModelCall

SERVED = TASKS.with_name("server_forward_tasks.py")
SERVER = {"compute": "server"}


# Runs.


@pytest.mark.processes
def test_one_trainer_is_the_same_as_local_bit_for_bit(tmp_path):
    """Several calls in a loss, outputs and calls that are in none, dropout, BatchNorm, accumulation, validation."""
    config = {
        "task": f"{SERVED}:Branches",
        "task_args": {"schedule": "validation"},
        "training": {"max_steps": 15, "batch_size": 8, "accumulate_batches": 3, "clip_grad_norm": 1.0}
        | {"validate_every": 6},
    }
    local = train(tmp_path, "local", 1, **config)
    served = train(tmp_path, "rpc", 1, **config, server=SERVER, trainer=f"{SERVED}:Witness")
    assert differing_tensors(local.load("model"), served.load("model")) == []
    assert differing_tensors(local.load("optimizer"), served.load("optimizer")) == []
    assert differing_tensors(local.load("trainer-0")["random"], served.load("trainer-0")["random"]) == []
    for kind, field in (("train", "loss"), ("train", "lr"), ("validation", "values")):
        assert [r[field] for r in local.of_kind(kind)] == [r[field] for r in served.of_kind(kind)]
    assert [r["value"] for r in served.of_kind("log")] == [15.0]
    # What only the unused output depends on was never stepped, though weight decay alone would change it.
    assert differing_tensors(served.load("model")["second.weight"], initial(Branches())["second.weight"]) == []


def initial(task):
    from paramserver.parameters.model import build_model

    return build_model(task, 0, CPU).state_dict()


def recorded(folder, trainers, steps, **config):
    return train(
        folder,
        "rpc",
        trainers,
        training={"max_steps": steps, "batch_size": 8, "validate_every": 5},
        trainer=f"{SERVED}:Recording",
        **config,
    )


def replayed(run, trainers):
    """Assert that a run of ``Recording`` ended as in one process; return the pushes, and the staleness of each."""
    pushes = [torch.load(run.run_dir.parent / f"pushes-{i}.pt", weights_only=True) for i in range(trainers)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, optimizer, staleness = replay(ReferenceTask(), 0, pushes)
    finally:
        torch.set_num_threads(threads)
    assert differing_tensors(model, run.load("model")) == []
    assert differing_tensors(optimizer, run.load("optimizer")) == []
    assert len(staleness) == run.summary["samples"] / 8
    return [push for trainer in pushes for push in trainer], staleness


@pytest.mark.processes
def test_every_gradient_of_eight_free_trainers_is_that_of_the_version_it_names(tmp_path):
    """The whole run again in one process, push after push: losses, parameters, optimizer, BatchNorm, bit for bit."""
    run = recorded(tmp_path, 8, 48, server={**SERVER, "consistency": "async"})
    pushes, staleness = replayed(run, 8)
    assert sum(stale > 0 for stale in staleness) >= len(staleness) / 2
    began, ended = zip(*(push[-1] for push in pushes), strict=True)
    assert any(began[i] < began[j] < ended[i] for i in range(48) for j in range(48) if i != j)
    assert len(run.of_kind("validation")) >= 9


@pytest.mark.processes
def test_four_trainers_in_step_are_the_mean_of_their_gradients(tmp_path):
    _, staleness = replayed(recorded(tmp_path, 4, 8, server=SERVER), 4)
    assert staleness == [0] * 32


@pytest.mark.processes
def test_a_run_that_was_stopped_goes_on_exactly(tmp_path):
    half = recorded(tmp_path, 2, 7, server={**SERVER, "consistency": "bounded", "staleness_bound": 1})
    run = resume(half, "--set", "training.max_steps=12")
    assert run.code == 0, run.output
    pushes, _ = replayed(run, 2)
    assert sorted(push[0] for push in pushes) == list(range(1, 13))


@pytest.mark.processes
def test_a_task_that_needs_more_than_the_call_is_refused(tmp_path):
    run = launch(tmp_path, task=f"{SERVED}:Nosy", mode="rpc", cluster={"num_trainers": 1}, server=SERVER)
    assert run.code == 2, run.output
    assert "the model has no attribute conv here" in run.output
    assert "use server.compute: trainer" in run.output


@pytest.mark.processes
def test_a_model_that_a_copy_cannot_follow_is_refused(tmp_path):
    """Otherwise that parameter would silently not be trained."""
    run = launch(tmp_path, task=f"{SERVED}:Sidelong", mode="rpc", cluster={"num_trainers": 1}, server=SERVER)
    assert run.code == 2, run.output
    assert "the model reaches parameter behind.weight through a function" in run.output


# The server's part.


def make_transport(model):
    layout = FlatLayout.of(trainable_parameters(model).items())
    return ServedTransport(model, layout, lambda: version_of(layout, model), torch.device("cpu"))


def version_of(layout, model):
    flats, own = layout.allocate(), trainable_parameters(model)
    with torch.no_grad():
        for name, view in layout.views(flats).items():
            view.copy_(own[name])
    return flats, ModelTree(model).pack_buffers()


def a_call(*args, batch=0, training=None, wants_grad=True, seed=0):
    state = torch.Generator().manual_seed(seed).get_state()
    return ModelCall(args, {}, batch, training, wants_grad, None, state)


def received(*answers):
    """What a trainer receives of these replies, each one tensor: the outputs and the anchors."""
    pairs = [recv_outputs([answer.token, answer.output]) for answer in answers]
    return [outputs[0] for _, outputs in pairs], [anchor for anchor, _ in pairs]


def gradients(transport, loss, anchors):
    """What a push finds after the backward of a loss: gradients by name, which there are, and the module buffers."""
    leaves = [leaf for replica in transport._replicas for leaf in replica.leaves.values()]
    grads = torch.autograd.grad([loss, *anchors], leaves, allow_unused=True)
    held = {leaf: grad for leaf, grad in zip(leaves, grads, strict=True) if grad is not None}
    flats = transport.add_gradients(held)
    report, buffers = transport.complete_push(StepReport(0, 0, 1, 0.0, 0.0), None)
    return transport._parameter_layout.views(flats), report.used, buffers.values()


class WaitsForOthers(nn.Module):
    """Its forward transports only when another thread is in it too."""

    def __init__(self, barrier):
        super().__init__()
        self.barrier = [barrier]
        self.layer = nn.Linear(2, 2)

    def __deepcopy__(self, memo):
        own = WaitsForOthers(self.barrier[0])
        own.layer._parameters = {n: memo[id(p)] for n, p in self.layer.named_parameters()}
        return own

    def forward(self, x):
        self.barrier[0].wait(20)
        return self.layer(x)


def test_forwards_run_side_by_side():
    model = WaitsForOthers(threading.Barrier(8))
    transports = [make_transport(model) for _ in range(8)]
    for transport in transports:
        transport.pin_version()
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda transport: transport.compute(a_call(torch.ones(1, 2))).output, transports))
    assert all(torch.equal(output, model.layer(torch.ones(1, 2))) for output in outputs)


def test_threads_neither_share_versions_nor_module_buffers_nor_random_numbers():
    """Eight trainers at versions of their own, each against a model of its own in one thread."""
    torch.manual_seed(1)
    models = [ReferenceModel(dropout=0.5, unused=True) for _ in range(8)]
    transports = [make_transport(models[0]) for _ in range(8)]

    def one(index):
        transport, own, made = transports[index], models[index], []
        for step in range(10):
            images = torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(100 * index + step))
            transport._snapshot = lambda: version_of(transport._parameter_layout, own)
            transport.pin_version()
            answer = transport.compute(a_call(images, seed=step))
            (output,), anchors = received(answer)
            grads, used, buffers = gradients(transport, output.pow(2).sum(), anchors)
            made.append((images, step, {n: g.clone() for n, g in grads.items()}, used, buffers))
        return made

    for model in models[1:]:  # the frozen layer is one for all
        model.frozen.load_state_dict(models[0].frozen.state_dict())
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(8)))
    for own, steps in zip(models, found, strict=True):
        before = {name: buffer.clone() for name, buffer in own.named_buffers()}
        for images, seed, grads, used, buffers in steps:
            own.load_state_dict(before, strict=False)
            own.zero_grad()
            torch.manual_seed(seed)
            own(images).pow(2).sum().backward()
            expected = {name: p.grad for name, p in own.named_parameters() if p.requires_grad}
            assert [expected[name] is not None for name in grads] == list(used)
            assert [n for n in grads if expected[n] is not None and not torch.equal(grads[n], expected[n])] == []
            assert differing_tensors(buffers, dict(own.named_buffers())) == []


def test_several_calls_of_a_step_continue_with_the_same_module_buffers():
    model = ReferenceModel(dropout=0.0, unused=False)
    transport, images = make_transport(model), torch.randn(3, 4, 1, 6, 6)
    transport.pin_version()
    answers = [transport.compute(a_call(images[i], batch=i)) for i in range(3)]
    transport.compute(a_call(images[0], wants_grad=False, training=False))
    outputs, anchors = received(*answers)
    grads, used, buffers = gradients(transport, sum(output.square().mean() for output in outputs), anchors)
    for i in range(3):
        model(images[i]).square().mean().backward()
    assert used is None
    assert differing_tensors(grads, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}) == []
    assert differing_tensors(buffers, dict(model.named_buffers())) == []


def test_a_version_that_follows_does_not_reach_what_was_computed_before():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    transport = make_transport(model)
    transport.pin_version()
    (output,), anchors = received(transport.compute(a_call(x := torch.randn(3, 2))))
    expected = torch.autograd.grad(model(x).pow(3).sum(), list(model.parameters()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    transport.pin_version()
    grads, _, _ = gradients(transport, output.pow(3).sum(), anchors)
    assert all(torch.equal(grad, want) for grad, want in zip(grads.values(), expected, strict=True))
    assert torch.equal(transport.compute(a_call(x)).output, model(x))


def test_the_training_flag_is_sent_with_the_call():
    """Also the mode in which the task built each module."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5).eval(), nn.Linear(8, 1))
    transport, x = make_transport(model), torch.ones(1, 8)
    transport.pin_version()
    torch.manual_seed(0)
    built = model(x)
    assert torch.equal(transport.compute(a_call(x)).output, built)
    assert torch.equal(transport.compute(a_call(x, training=False)).output, model[2](x))
    torch.manual_seed(0)
    both = copy.deepcopy(model).train()(x)
    assert torch.equal(transport.compute(a_call(x, training=True)).output, both)
    assert torch.equal(transport.compute(a_call(x)).output, built)


class Spread(ReferenceTask):
    """Places its model on the devices that it is given, as the RPC tutorial does; notes how many."""

    def build_model(self):
        model = ReferenceModel(dropout=0.0, unused=False)
        self.seen = [*getattr(self, "seen", []), len(self.devices)]
        model.last.to(self.devices[-1])
        return model


class Synced(Spread):
    def build_model(self):
        return nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))


@pytest.mark.parametrize("compute", ["server", "trainer"])
def test_a_layer_that_takes_statistics_over_trainers_is_refused(compute):
    config = Config(cluster=ClusterConfig(num_trainers=2), server=ServerConfig(compute=compute))
    monitor = RunMonitor(config, SimpleNamespace(write=lambda record: None), Path())
    with pytest.raises(UnsupportedConfiguration, match=r"layer 1 .* in mode rpc with more than one trainer"):
        build_server(Synced(), config, 2, no_checkpoints(monitor), StopRequest())


def test_a_model_may_be_spread_over_devices_of_the_server(monkeypatch):
    """What a task places itself is a second model, whose own parameters are not used. Here both devices are the CPU."""
    monkeypatch.setattr(
        "paramserver.server.model_service.place_server", lambda config: Placement(CPU.devices * 2, "gloo")
    )
    task, config = Spread(), Config(server=ServerConfig(compute="server"))
    versions = ParameterStore(task, config)
    service = ModelService(task, config, versions)
    assert task.seen == [1, 2]
    with torch.no_grad():  # as a checkpoint that is restored
        for parameter in versions.model.parameters():
            parameter.add_(0.1)
    transport, images = service.new_transport(), torch.randn(4, 1, 6, 6)
    (output,), anchors = received(transport.compute(a_call(images)))
    grads, used, _ = gradients(transport, output.square().mean(), anchors)
    versions.model(images).square().mean().backward()
    assert used is None
    assert differing_tensors(grads, {n: p.grad for n, p in versions.model.named_parameters() if p.requires_grad}) == []


class Returns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.what(self.layer, x)


class KeyValueCache:
    """As the outputs of models of transformers have it."""


def recomputed(dropout):
    return lambda layer, x: checkpoint(lambda v: F.dropout(layer(v), dropout).tanh(), x, use_reentrant=False)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda layer, x: torch.distributions.Normal(layer(x), 1.0), "the model returned a Normal"),
        (lambda layer, x: {"a": [layer(x), object()]}, "the model returned a object"),
        (
            lambda layer, x: (layer(x), KeyValueCache()),
            "a KeyValueCache.*; turn it off with use_cache=False",
        ),
        (recomputed(0.5), "inside torch.utils.checkpoint"),
    ],
)
def test_what_a_model_may_not_do_on_a_server(what, message):
    transport = make_transport(Returns(what))
    transport.pin_version()
    with pytest.raises(TaskError, match=message):
        transport.compute(a_call(torch.ones(1, 2)))


def test_recomputation_without_random_numbers_uses_the_version_of_the_call():
    model = Returns(recomputed(0.0))
    transport, x = make_transport(model), torch.randn(3, 2)
    model.what = lambda layer, x: layer(x).tanh()
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    model.what = lambda layer, x: checkpoint(lambda v: layer(v).tanh(), x, use_reentrant=False)
    transport.pin_version()
    (output,), anchors = received(transport.compute(a_call(x)))
    with torch.no_grad():
        model.layer.weight.zero_()
    grads, _, _ = gradients(transport, output.sum(), anchors)
    assert all(torch.equal(grad, want) for grad, want in zip(grads.values(), expected, strict=True))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_the_gradient_of_a_parameter_is_refused_as_nothing_would_call_it(register):
    model = nn.Linear(2, 2)
    getattr(model.bias, register)(lambda _: None)
    transport = make_transport(model)
    transport.pin_version()
    with pytest.raises(UnsupportedConfiguration, match=r"parameter bias of the model .* must have no hook"):
        transport.compute(a_call(torch.ones(1, 2)))


def test_a_model_that_cannot_be_copied_is_refused_and_so_are_sparse_gradients():
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    transport = make_transport(model)
    transport.pin_version()
    with pytest.raises(UnsupportedConfiguration, match="cannot be copied"):
        transport.compute(a_call(torch.ones(1, 2)))
    transport = make_transport(nn.Embedding(4, 2, sparse=True))
    transport.pin_version()
    (output,), anchors = received(transport.compute(a_call(torch.tensor([1]))))
    with pytest.raises(TaskError, match="weight is sparse"):
        gradients(transport, output.sum(), anchors)


def test_threads_draw_what_each_would_draw_alone():
    """Eight threads of dropout and normal numbers; and the process's own state is as it was."""

    def draw(seed):
        with PrivateRng(torch.Generator().manual_seed(seed).get_state()) as rng:
            return [F.dropout(torch.ones(5), 0.5) + torch.randn(5) for _ in range(100)], rng.state

    torch.manual_seed(3)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(draw, range(8)))
    assert torch.equal(before, torch.get_rng_state())
    for seed, (numbers, state) in enumerate(found):
        torch.manual_seed(seed)
        assert all(torch.equal(F.dropout(torch.ones(5), 0.5) + torch.randn(5), number) for number in numbers)
        assert torch.equal(state, torch.get_rng_state())


# The autograd functions, within one process.


def test_outputs_without_a_part_in_the_loss_have_no_gradient():
    one, two = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    anchor, (a, b) = recv_outputs(send_outputs([one * 2, two * 3]))
    torch.autograd.backward([a.sum(), anchor])
    assert one.grad.tolist() == [2.0, 2.0]
    assert two.grad is None
    a, b = recv_outputs(send_outputs([one * 2, two * 3]))[1]
    a += 1.0  # in place, as a task may
    assert b.tolist() == [3.0] * 3


def test_a_reply_without_a_part_in_the_loss_is_reached_all_the_same():
    """Through the anchor, so that distributed autograd does not wait for its gradients."""
    x = torch.ones(2, requires_grad=True)
    reached = []
    out = send_outputs([x * 2])
    out[0].register_hook(lambda grad: reached.append(grad.tolist()))
    anchor, _ = recv_outputs(out)
    anchor.backward()
    assert reached == [[0.0]]
    assert x.grad is None


# The trainer's part.


@pytest.fixture
def calls():
    return []


@pytest.fixture
def remote_model(calls):
    transport = make_transport(nn.Linear(2, 1))
    transport.pin_version()

    def call(made):
        calls.append(made)
        return transport.compute(made)

    return RemoteModel(call, training=True)


@pytest.mark.parametrize("name", ["weight", "parameters", "state_dict", "to", "zero_grad", "children", "double"])
def test_a_remote_model_can_only_be_called(remote_model, name):
    assert isinstance(remote_model, nn.Module)
    assert not hasattr(remote_model, name)
    with pytest.raises(TaskError, match=f"no attribute {name} here.*use server.compute: trainer"):
        getattr(remote_model, name)
    with pytest.raises(TaskError, match=f"no attribute {name} here"):
        setattr(remote_model, name, 1)
    with pytest.raises(TaskError, match=f"no attribute {name} here"):
        delattr(remote_model, name)
    assert "on the server" in repr(remote_model)


PARTS = {
    "model[0]": lambda model: model[0],
    "model[-1].weight": lambda model: model[-1].weight,
    "model['a'] = 1": lambda model: operator.setitem(model, "a", 1),
    "del model[0]": lambda model: operator.delitem(model, 0),
    "len(model)": len,
    "list(model)": list,
    "for part in model": lambda model: [part.weight for part in model],
    "first, *rest = model": lambda model: [*model],
    "reversed(model)": reversed,
    "part in model": lambda model: 1 in model,
    "model.layer.weight": lambda model: model.layer.weight,
    "enumerate(model)": enumerate,
}


@pytest.mark.parametrize("use", PARTS)
def test_use_as_a_container_is_rejected_with_the_same_sentence(remote_model, use):
    with pytest.raises(ModelIsElsewhere, match=r"^the model has no .* here: it is on the server.*use server.compute"):
        PARTS[use](remote_model)
    assert remote_model  # as any module that is no container


def test_the_training_flag_is_restored_after_a_validation(remote_model, calls):
    x = torch.ones(1, 2)
    remote_model(x)
    with eval_mode(remote_model):
        assert not remote_model.training
        remote_model(x)
    assert remote_model.training
    remote_model(x)
    remote_model.eval()
    with eval_mode(remote_model):
        remote_model(x)
    remote_model(x)
    remote_model.train()(x)
    assert [call.training for call in calls] == [None, False, None, False, False, True]
    assert not any(call.wants_grad for call in calls)  # outside of a step nothing is recorded


def test_inputs_are_sent_without_gradients(remote_model, calls):
    remote_model.begin_step()
    with pytest.raises(TaskError, match=r"input of the model \(\(1, 2\)\) has a gradient.*detach"):
        remote_model(torch.ones(1, 2, requires_grad=True))
    with torch.no_grad():
        assert not remote_model(torch.ones(1, 2, requires_grad=True)).requires_grad
    output = remote_model(torch.ones(1, 2))
    remote_model.next_batch()
    remote_model(torch.ones(1, 2))
    assert [call.batch for call in calls] == [0, 0, 1]
    assert output.requires_grad
    assert len(remote_model.end_step()) == 2
    assert remote_model.end_step() == []


def test_autocast_is_sent_with_the_call(remote_model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert remote_model(torch.ones(1, 2)).dtype is torch.bfloat16
    assert remote_model(torch.ones(1, 2)).dtype is torch.float32


# Who is chosen, and what is refused.


def served(mode="rpc", **sections):
    return Config(mode=mode, server=ServerConfig(compute="server"), **sections)


def test_the_trainer_and_the_devices_follow_the_config():
    assert trainer_of(served()) == "paramserver.trainers:ServedTrainer"
    assert trainer_of(served("ddp")) == "paramserver.trainers:DdpTrainer"
    assert trainer_of(served("local")) == "paramserver.trainers:LocalTrainer"
    assert trainer_of(Config()) == "paramserver.trainers:RpcTrainer"
    spread = served(device=DeviceConfig(num_gpus=2))
    assert [str(d) for d in place_server(spread, gpus_here=2).devices] == ["cuda:0", "cuda:1"]
    assert place_server(spread, gpus_here=1) == CPU
    assert place_server(served(), gpus_here=4) == CPU
    assert place_server(Config(device=DeviceConfig(num_gpus=2)), gpus_here=2) == CPU
    assert place_trainer(spread, 0, 1, gpus_here=2) == CPU


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"server": {"transport": "shared_memory"}}, "server.transport .shared_memory. must be auto or rpc"),
        ({"server": {"wire_dtype": "bfloat16"}}, "server.wire_dtype .bfloat16. must be null or float32"),
        ({"device": {"kind": "cuda"}}, "device.kind .cuda. must be auto or cpu"),
        ({"device": {"server": "cuda"}}, "device.server .cuda. must be auto or cpu"),
    ],
)
def test_what_does_not_go_with_it(given, message):
    given = {**given, "server": {"compute": "server", **given.get("server", {})}}
    with pytest.raises(UnsupportedConfiguration, match=message):
        config_from_mapping({"task": "a:B", **given})
    assert config_from_mapping({"task": "a:B", "mode": "local", **given}).server.compute == "server"


def test_each_trainer_has_a_thread_of_the_server_that_may_compute():
    """So that the others answer heartbeats while all trainers are in a forward."""
    assert agent_options(7.0, True, computing=8).num_worker_threads == WORKER_THREADS + 8


def test_one_server_alone_holds_the_model():
    from paramserver.config.checks import RELATIONS

    config = served(task="a:B", cluster=ClusterConfig(num_servers=2))
    messages = [message for relation in RELATIONS if (message := relation.check(config))]
    assert [message.split(" must")[0] for message in messages] == ["cluster.num_servers (2)"]


def test_a_trainer_of_the_other_kind_is_refused(tmp_path):
    from paramserver.runtime.rank import trainer_class

    config = Config(trainer="paramserver.trainers:RpcTrainer", server=ServerConfig(compute="server"))
    with pytest.raises(UnsupportedConfiguration, match=r"is for server\.compute: trainer"):
        trainer_class(config, [])
    assert run_in_process(tmp_path, server=SERVER, training={"max_steps": 1}).code == 0

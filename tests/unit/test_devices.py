"""Placement of trainers and servers, from tables; no GPU is needed."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from paramserver.config import ClusterConfig, Config, DeviceConfig, config_from_mapping
from paramserver.devices import CPU, Placement, move_to_device, place_server, place_trainer, require_visible_gpus
from paramserver.errors import UnsupportedConfiguration


def placed(kind, gpus_here, trainers_here, num_gpus, index=0, backend="auto", share=False) -> Placement:
    device = DeviceConfig(kind=kind, num_gpus=num_gpus, share_gpus=share)
    return place_trainer(Config(device=device, cluster=ClusterConfig(backend=backend)), index, trainers_here, gpus_here)


def gpus(*indices: int, backend="nccl") -> Placement:
    return Placement(tuple(torch.device("cuda", i) for i in indices), backend)


@pytest.mark.parametrize(
    ("kind", "gpus_here", "trainers_here", "num_gpus", "of_first", "of_last"),
    [
        ("auto", 0, 1, None, CPU, CPU),
        ("auto", 0, 4, None, CPU, CPU),
        ("auto", 1, 1, None, gpus(0), gpus(0)),
        ("auto", 1, 2, None, CPU, CPU),  # one for both would be neither fair nor exact
        ("auto", 8, 2, None, gpus(0), gpus(1)),
        ("auto", 4, 2, 2, gpus(0, 1), gpus(2, 3)),
        ("auto", 3, 2, 2, CPU, CPU),
        ("auto", 8, 2, 0, CPU, CPU),  # a process that may use no GPU uses none
        ("cpu", 0, 2, None, CPU, CPU),
        ("cpu", 8, 2, None, CPU, CPU),
        ("cpu", 8, 2, 4, CPU, CPU),
        ("cuda", 1, 1, None, gpus(0), gpus(0)),
        ("cuda", 2, 2, None, gpus(0), gpus(1)),
        ("cuda", 2, 2, 1, gpus(0), gpus(1)),
        ("cuda", 9, 3, 3, gpus(0, 1, 2), gpus(6, 7, 8)),
    ],
)
def test_the_table_of_placements(kind, gpus_here, trainers_here, num_gpus, of_first, of_last):
    assert placed(kind, gpus_here, trainers_here, num_gpus) == of_first
    assert placed(kind, gpus_here, trainers_here, num_gpus, trainers_here - 1) == of_last


@pytest.mark.parametrize(
    ("kind", "gpus_here", "trainers_here", "num_gpus", "message"),
    [
        (
            "cuda",
            0,
            1,
            None,
            r"device\.kind \(cuda\) needs 1 GPUs on this host \(1 trainer\(s\) .* which has 0; use device.kind: auto",
        ),
        ("cuda", 1, 2, None, r"needs 2 GPUs on this host \(2 trainer\(s\) with 1 each\), which has 1"),
        ("cuda", 3, 2, 2, r"needs 4 GPUs on this host \(2 trainer\(s\) with 2 each\), which has 3"),
        ("cuda", 8, 2, 0, r"device\.num_gpus \(0\) must be at least 1 with device\.kind cuda"),
    ],
)
def test_the_table_of_refusals(kind, gpus_here, trainers_here, num_gpus, message):
    with pytest.raises(UnsupportedConfiguration, match=message):
        placed(kind, gpus_here, trainers_here, num_gpus)


def test_no_two_trainers_share_a_gpu():
    all_devices = [d for i in range(4) for d in placed("auto", 8, 4, 2, i).devices]
    assert len(set(all_devices)) == 8


@pytest.mark.parametrize("kind", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("gpus_here", "trainers_here", "num_gpus", "expected"),
    [
        (1, 2, None, [gpus(0, backend="gloo")] * 2),
        (2, 3, None, [gpus(0, backend="gloo"), gpus(1, backend="gloo"), gpus(0, backend="gloo")]),
        (3, 2, 2, [gpus(0, 1, backend="gloo")] * 2),  # the third is too few for a trainer
        (2, 2, None, [gpus(0), gpus(1)]),  # enough for each
    ],
)
def test_trainers_share_gpus_where_that_is_allowed(kind, gpus_here, trainers_here, num_gpus, expected):
    assert [placed(kind, gpus_here, trainers_here, num_gpus, i, share=True) for i in range(trainers_here)] == expected


@pytest.mark.parametrize(
    ("gpus_here", "num_gpus", "backend", "message"),
    [
        (0, None, "auto", r"device\.kind \(cuda\) needs 2 GPUs"),
        (1, 2, "auto", r"device\.kind \(cuda\) needs 4 GPUs"),
        (
            1,
            None,
            "nccl",
            r"cluster\.backend \(nccl\) needs a GPU for each trainer, and 2 trainers .* share 1",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(gpus_here, num_gpus, backend, message):
    with pytest.raises(UnsupportedConfiguration, match=message):
        placed("cuda", gpus_here, 2, num_gpus, backend=backend, share=True)


@pytest.mark.parametrize(
    ("server", "gpus_here", "expected"),
    [("auto", 4, CPU), ("cpu", 4, CPU), ("cuda", 4, gpus(3, backend="gloo")), ("cuda", 1, gpus(0, backend="gloo"))],
)
def test_the_server_has_the_last_gpu_if_it_wants_one(server, gpus_here, expected):
    assert place_server(Config(device=DeviceConfig(server=server)), gpus_here) == expected


def test_parameters_on_a_gpu_that_is_not_there_are_refused():
    with pytest.raises(UnsupportedConfiguration, match=r"device\.server \(cuda\) needs a GPU on the host of the"):
        place_server(Config(device=DeviceConfig(server="cuda")), gpus_here=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cluster": {"num_servers": 2}}, r"device\.server \(cuda\) .* cluster\.num_servers \(2\); set"),
        ({"server": {"compute": "server"}}, r"device\.server \(cuda\) .* server\.compute server"),
    ],
)
def test_what_does_not_go_with_parameters_on_a_gpu(given, message):
    given = {"task": "a:B", "device": {"server": "cuda"}, **given}
    with pytest.raises(UnsupportedConfiguration, match=message):
        config_from_mapping(given)
    assert config_from_mapping({**given, "mode": "ddp"}).device.server == "cuda"  # there is no server


def test_only_copies_to_a_gpu_do_not_block():
    """One to the CPU would be read before it is complete."""
    for device, non_blocking in (("cpu", False), ("cuda", True), ("meta", True)):
        batch = mock.Mock(torch.Tensor)
        move_to_device(batch, torch.device(device))
        batch.to.assert_called_once_with(torch.device(device), non_blocking=non_blocking)


@pytest.mark.parametrize(
    ("kind", "gpus_here", "backend", "expected"),
    [
        ("auto", 2, "auto", "nccl"),
        ("auto", 2, "gloo", "gloo"),
        ("auto", 2, "nccl", "nccl"),
        ("auto", 0, "auto", "gloo"),
        ("cpu", 2, "gloo", "gloo"),
    ],
)
def test_the_backend_fits_the_device(kind, gpus_here, backend, expected):
    assert placed(kind, gpus_here, 2, None, backend=backend).backend == expected


@pytest.mark.parametrize(("kind", "gpus_here"), [("cpu", 8), ("auto", 1)])
def test_nccl_without_gpus_is_refused(kind, gpus_here):
    with pytest.raises(UnsupportedConfiguration, match=r"cluster\.backend \(nccl\) needs a GPU for each trainer; 2 wo"):
        placed(kind, gpus_here, 2, None, backend="nccl")


def test_the_number_of_gpus_defaults_to_that_of_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert place_trainer(Config(), 2, 3) == gpus(2)
    assert gpus(2, 5).device == torch.device("cuda", 2)


Pair = namedtuple("Pair", "x y")


def test_a_batch_keeps_its_structure_when_moved():
    one = torch.ones(2)
    batch = {"a": [one, (one, "text")], "b": Pair(one, None), "c": 3}
    moved = move_to_device(batch, torch.device("meta"))
    assert moved["a"][0].device.type == "meta"
    assert moved["a"][1][0].device.type == "meta"
    assert isinstance(moved["b"], Pair)
    assert moved["b"].x.device.type == "meta"
    assert (moved["a"][1][1], moved["b"].y, moved["c"]) == ("text", None, 3)
    assert batch["b"].x is one
    assert one.device.type == "cpu"


class Batch(dict):
    """Its keys are attributes, as in batches of some libraries."""

    __getattr__ = dict.__getitem__


class Graphs(list):
    """Tensors of different sizes, with these."""

    def __init__(self, items, sizes):
        super().__init__(items)
        self.sizes = sizes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_list_keeps_its_attributes_when_moved(device):
    graphs = Graphs([torch.ones(2), torch.ones(3)], sizes=[2, 3])
    moved = move_to_device(graphs, torch.device(device))
    assert (type(moved), moved.sizes, moved is graphs) == (Graphs, [2, 3], False)
    assert [tensor.device.type for tensor in moved] == [device, device]
    assert [len(tensor) for tensor in moved] == [2, 3]
    assert graphs[0].device.type == "cpu"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_batch_keeps_its_types_when_moved(device):
    one, numbers = torch.ones(2), defaultdict(list, x=torch.ones(1))
    packed = pack_sequence([torch.ones(2)])
    batch = Batch(a=one, b=numbers, c=OrderedDict(d=one), e=torch.Size([3]), f=packed, g=[(), one])
    moved = move_to_device(batch, torch.device(device))
    assert moved.a.device.type == moved.b["x"].device.type == moved.f.data.device.type == device
    assert moved.b["new"] == []
    assert [type(moved[name]) for name in "bcef"] == [defaultdict, OrderedDict, torch.Size, type(packed)]
    assert moved is not batch
    assert moved.g is not batch.g
    assert numbers.keys() == {"x"}


def test_tensors_on_the_device_are_not_copied():
    one = torch.ones(2)
    assert move_to_device([one], torch.device("cpu"))[0] is one
    assert list(move_to_device(OrderedDict(b=one, a=one), torch.device("cpu"))) == ["b", "a"]


def test_an_allocation_whose_gpus_are_not_visible_is_refused_with_both_counts():
    config = Config()
    with pytest.raises(UnsupportedConfiguration, match=r"has 4 GPU\(s\) .* torch sees 0 of them; .* device\.kind: cpu"):
        require_visible_gpus(config, allocated=(4, "GPUS"), visible=0)
    require_visible_gpus(config, allocated=(4, "GPUS"), visible=1)  # a task that sees its own GPU only
    require_visible_gpus(config, allocated=(0, "GPUS"), visible=0)
    server = replace(config, device=DeviceConfig(kind="cpu", server="cuda"))
    with pytest.raises(UnsupportedConfiguration, match="torch sees 0"):
        require_visible_gpus(server, allocated=(1, "GPUS"), visible=0)

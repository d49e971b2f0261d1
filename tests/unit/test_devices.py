"""Placement of trainers, from tables; no GPU is needed."""

from collections import OrderedDict, namedtuple

import pytest
import torch

from paramserver.config import ClusterConfig, Config, DeviceConfig
from paramserver.devices import CPU, Placement, move_to_device, place_trainer
from paramserver.errors import UnsupportedConfiguration


def placed(kind, gpus_here, trainers_here, num_gpus, index=0, backend="auto") -> Placement:
    config = Config(device=DeviceConfig(kind=kind, num_gpus=num_gpus), cluster=ClusterConfig(backend=backend))
    return place_trainer(config, index, trainers_here, gpus_here)


def gpus(*indices: int) -> Placement:
    return Placement(tuple(torch.device("cuda", i) for i in indices), "nccl")


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
        ("cuda", 0, 1, None, r"device\.kind \(cuda\) needs 1 GPUs on this host \(1 trainer\(s\) .* which has 0; start"),
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


def test_tensors_on_the_device_are_not_copied():
    one = torch.ones(2)
    assert move_to_device([one], torch.device("cpu"))[0] is one
    assert list(move_to_device(OrderedDict(b=one, a=one), torch.device("cpu"))) == ["b", "a"]

"""Parameters with gaps in memory, and without elements: the same bits in every mode, with any number of servers."""

import pytest
from launching import differing_tensors, train

pytestmark = pytest.mark.processes

CONFIG = {
    "task": "memory_tasks:UnusualMemory",
    "training": {"max_steps": 20, "batch_size": 8},
    "ddp": {"extra": {"find_unused_parameters": True}},
}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    return train(tmp_path_factory.mktemp("ddp"), "ddp", 2, **CONFIG)


@pytest.mark.claim("strided-parameters", "empty-parameters")
@pytest.mark.parametrize(("servers", "transport"), [(1, "shared_memory"), (2, "shared_memory"), (1, "rpc"), (2, "rpc")])
def test_parameters_with_unusual_memory_are_the_same_as_in_ddp(tmp_path, ddp, servers, transport):
    sections = {"server": {"transport": transport}, "cluster": {"num_servers": servers}}
    rpc = train(tmp_path, "rpc", 2, **CONFIG, **sections)
    assert differing_tensors(ddp.load("model"), rpc.load("model")) == []
    assert ddp.load("optimizer")["state"].keys() == rpc.load("optimizer")["state"].keys()
    assert differing_tensors(ddp.load("optimizer"), rpc.load("optimizer")) == []


@pytest.mark.claim("strided-parameters")
def test_one_trainer_is_the_same_in_every_mode(tmp_path):
    local, rpc = (train(tmp_path, mode, 1, **CONFIG) for mode in ("local", "rpc"))
    assert differing_tensors(local.load("model"), rpc.load("model")) == []
    assert differing_tensors(local.load("optimizer"), rpc.load("optimizer")) == []

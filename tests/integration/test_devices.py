"""Runs with parameters and trainers on GPUs, as far as fake ones can show (tests/helpers/fake_gpu.py)."""

import pytest
from launching import TASKS, differing_tensors, resume, train

pytestmark = pytest.mark.processes

ON_FAKE_GPU = f"{TASKS.with_name('fake_gpu_tasks.py')}:OnFakeGpu"
CONFIG = {
    "task_args": {"groups": True, "schedule": "step"},
    "training": {"max_steps": 12, "batch_size": 8, "accumulate_batches": 2, "validate_every": 5},
}


def on_gpus(folder, trainers, parameters="cuda", kind="cpu", **config):
    device = {"server": parameters, "kind": kind, "share_gpus": True}
    return train(folder, "rpc", trainers, task=ON_FAKE_GPU, device=device, **{**CONFIG, **config})


@pytest.mark.parametrize("transport", ["rpc", "shared_memory"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_parameters_on_a_gpu_train_as_on_the_cpu(tmp_path, transport, clip):
    """With SGD, whose operations are the same on both. Without clipping updates over RPC are made bucket by bucket."""
    config = {"server": {"transport": transport}, "training": {**CONFIG["training"], "clip_grad_norm": clip}}
    on_cpu = on_gpus(tmp_path / "cpu", 2, parameters="cpu", **config)
    on_gpu = on_gpus(tmp_path / "gpu", 2, **config)
    assert "server 0 on fakegpu:0" in on_gpu.log(0)
    assert differing_tensors(on_cpu.load("model"), on_gpu.load("model")) == []
    assert differing_tensors(on_cpu.load("optimizer"), on_gpu.load("optimizer")) == []
    assert on_cpu.summary["validation"] == on_gpu.summary["validation"]


@pytest.mark.parametrize("transport", ["rpc", "shared_memory"])
def test_trainers_share_a_gpu(tmp_path, transport):
    config = {"server": {"transport": transport}}
    on_cpu, on_gpu = (
        on_gpus(tmp_path / kind, 2, parameters, kind, **config) for parameters, kind in (("cpu", "cpu"), ("cuda", "cuda"))
    )
    assert "trainer 1 on fakegpu:0" in on_gpu.log(2)
    assert differing_tensors(on_cpu.load("model"), on_gpu.load("model")) == []

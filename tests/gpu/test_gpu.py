"""Runs with parameters and trainers on GPUs: on the fake one of ``tests/helpers/fake_gpu.py``, and on real ones.

Without a GPU the cases of real ones are skipped. What a fake one cannot show: pinned memory, NCCL, and the speed.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from launching import TASKS, WITNESS_TRAINERS, launch, relative_difference, resume, train

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the scripts are modules of the checkout

from tests.measure import gpu as measuring

pytestmark = pytest.mark.processes

CONFIG = {
    "task_args": {"groups": True, "schedule": "step", "dropout": 0.0},
    "training": {"max_steps": 12, "batch_size": 8, "accumulate_batches": 2, "validate_every": 5},
}
TRANSPORTS = pytest.mark.parametrize("transport", ["rpc", "shared_memory"])


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a test.

    Attributes:
        tasks: the module whose tasks are trained.
        name: of the device, as in logs.
        noise: relative difference of two runs of the same operations.
        rounding: of two runs on different devices.
    """

    tasks: str
    name: str
    noise: float
    rounding: float

    def train(self, folder, trainers=2, mode="rpc", start=train, task="ReferenceTask", device=(), **config):
        """Train with parameters and trainers on GPUs, or on what ``device`` says."""
        config = {**CONFIG, "env": {"NVIDIA_TF32_OVERRIDE": "0"}, **config}  # tensor cores round to 10 bits
        return start(
            folder,
            *((mode, trainers) if start is train else ()),
            **({} if start is train else {"mode": mode}),
            task=f"{self.tasks}:{task}",
            device={"server": "cuda", "kind": "cuda", "share_gpus": True, **dict(device)},
            **config,
        )


REAL = Gpus(str(TASKS.with_name("gpu_tasks.py")), "cuda", noise=1e-4, rounding=1e-3)
ON_CPU = {"server": "cpu", "kind": "cpu"}


def require(count):
    """Skip a test that needs more GPUs than there are."""
    found = torch.cuda.device_count()
    if found < count:
        pytest.skip(f"needs {count} GPU(s), and torch finds {found}")


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def gpus(request):
    if request.param == "fake":
        return Gpus(str(TASKS.with_name("fake_gpu_tasks.py")), "fakegpu", noise=0.0, rounding=1e-6)
    require(1)
    return REAL


VARIANTS = {
    "by bucket": {"server": {"transport": "rpc"}},
    "clipped": {"server": {"transport": "rpc"}, "training": {**CONFIG["training"], "clip_grad_norm": 0.5}},
    "rounded": {"server": {"transport": "rpc", "wire_dtype": "bfloat16"}},
    # Validates versions that are retained. With one trainer the order of updates is fixed.
    "async": {"server": {"transport": "rpc", "consistency": "async"}},
    "shared memory": {"server": {"transport": "shared_memory"}},
    "shared memory, async": {"server": {"transport": "shared_memory", "consistency": "async"}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_on_a_gpu_train_as_on_the_cpu(tmp_path, gpus, variant):
    """Trainers on the CPU; SGD makes the same operations on both devices."""
    trainers = 1 if "async" in variant else 2
    on_cpu, on_gpu = (
        gpus.train(tmp_path / server, trainers, device={"server": server, "kind": "cpu"}, **VARIANTS[variant])
        for server in ("cpu", "cuda")
    )
    assert f"server 0 on {gpus.name}:" in on_gpu.log(0)
    for name in ("model", "optimizer"):
        assert relative_difference(on_cpu.load(name), on_gpu.load(name)) <= gpus.noise
    assert len(on_gpu.of_kind("validation")) == len(on_cpu.of_kind("validation")) >= 3


@TRANSPORTS
@pytest.mark.parametrize("server", ["cpu", "cuda"])
def test_two_trainers_share_a_gpu(tmp_path, gpus, transport, server):
    config = {"server": {"transport": transport}}
    on_cpu = gpus.train(tmp_path / "cpu", device=ON_CPU, **config)
    on_gpu = gpus.train(tmp_path / "gpu", device={"server": server}, **config)
    assert f"trainer 1 on {gpus.name}:" in on_gpu.log(2)
    assert relative_difference(on_cpu.load("model"), on_gpu.load("model")) <= gpus.rounding


@pytest.mark.parametrize(("before", "after"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_resumes_on_the_same_and_on_other_devices(tmp_path, gpus, before, after):
    """On the same ones it equals a run that was not stopped, dropout included; on others but for rounding."""
    dropout = 0.2 if before == after else 0.0
    config = {"task_args": {**CONFIG["task_args"], "dropout": dropout}}
    short = {"training": {**CONFIG["training"], "max_steps": 6}}
    whole = gpus.train(tmp_path / "whole", device={"server": before, "kind": before}, **config)
    begun = gpus.train(tmp_path / "begun", device={"server": before, "kind": before}, **config, **short)
    stored = begun.load("trainer-0")["random"]
    assert len(stored.get("gpus", [])) == (before == "cuda")
    others = [f"{key}={after}" for key in ("device.server", "device.kind")]
    finished = resume(begun, *(word for each in ("training.max_steps=12", *others) for word in ("--set", each)))
    assert finished.code == 0, finished.output
    if not gpus.noise and before == after:  # generators of fake GPUs draw nothing
        assert torch.equal(stored["gpus"][0], finished.load("trainer-0")["random"]["gpus"][0])
    most = gpus.noise if before == after else gpus.rounding
    for name in ("model", "optimizer"):
        assert relative_difference(whole.load(name), finished.load(name)) <= most


def test_a_trainer_that_dies_is_replaced_while_the_parameters_are_on_a_gpu(tmp_path, gpus):
    mark = tmp_path / "mark"
    finished = gpus.train(tmp_path, task="FaultyTask", task_args={"what": "kill", "mark": str(mark), "trainer": 1})
    assert mark.exists()
    assert finished.summary["steps"] == 12


def test_extra_state_on_a_gpu_is_saved(tmp_path, gpus):
    finished = gpus.train(tmp_path, task="HasExtraState")
    assert finished.load("model")["1._extra_state"]["calls"] == 24  # two batches per step


def test_the_server_answers_as_in_the_tutorial(tmp_path, gpus):
    """Its forward is computed on the GPU; outputs and gradients are sent from the CPU."""
    trainer = f"{WITNESS_TRAINERS}:TutorialOnGpu"
    task_args = {"dropout": 0.0, "batch_norm": False}
    finished = gpus.train(tmp_path, trainer=trainer, task_args=task_args, device={"kind": "cpu"})
    assert {r["value"] for r in finished.of_kind("log") if r["name"] == "references"} == {10.0}


def test_a_gradient_on_a_gpu_that_is_too_large_for_the_wire_is_named(tmp_path, gpus):
    finished = gpus.train(
        tmp_path,
        start=launch,
        mode="rpc",
        task="HugeGradient",
        server={"transport": "rpc", "wire_dtype": "float16"},
    )
    assert finished.code == 1
    assert "the gradient of parameter first.weight has a value of 1e+09, which is too large for" in finished.output


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2])
def test_ddp_equals_rpc_on_gpus(tmp_path, count):
    """With a GPU for each trainer by nccl; trainers that share one use gloo."""
    require(count)
    env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count))), "NVIDIA_TF32_OVERRIDE": "0"}
    ddp, rpc = (REAL.train(tmp_path, 2, mode, env=env) for mode in ("ddp", "rpc"))
    assert relative_difference(ddp.load("model"), rpc.load("model")) <= REAL.rounding


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_measurement_prints_samples_per_second(device, capsys, monkeypatch):
    """Its figures are of no interest here."""
    if device == "cuda":
        require(1)
    words = ["--device", device, "--model", "tiny", "--batch", "8", "--steps", "12", "--warm", "2", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["gpu", *words, "--cases", "loop", "rpc", "rpc-gpu"])
    measuring.main()
    assert re.search(r"\n  rpc +\d+ \(\d+ to \d+\) +\S+ \(\S+ to \S+\) of loop", capsys.readouterr().out)


def test_what_needs_a_gpu_is_not_measured_without_one():
    assert measuring.cases_of(list(measuring.CASES), "cpu", trainers=2) == ["loop", "ddp", "rpc", "rpc-messages"]
    assert "rpc-gpu" in measuring.cases_of(list(measuring.CASES), "cuda", trainers=1)

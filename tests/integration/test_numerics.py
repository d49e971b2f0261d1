"""NaN and infinity are detected wherever they are, reported in one sentence, and never saved."""

import math
import re

import pytest
import torch
from invalid_tasks import __file__ as bad_tasks
from launching import launch, run_in_process

from paramserver.errors import NotFinite
from paramserver.parameters.numerics import check_gradient_norm, check_parameters_finite, first_nonfinite

NAN, INF = math.nan, math.inf
EVERY_3 = {"every": 3, "background": False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 517, 999])
def test_one_element_is_found_wherever_it_is(dtype, bad, place):
    good, other = torch.ones(3), torch.linspace(-1, 1, 1000, dtype=dtype)
    other[place] = bad
    assert first_nonfinite({"good": good, "other": other, "last": other}) == "other"


def test_infinities_that_would_cancel_are_found():
    assert first_nonfinite({"pair": torch.tensor([INF, -INF, 1.0])}) == "pair"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_that_overflows_is_no_reason(dtype):
    largest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert not largest.sum().isfinite()
    assert first_nonfinite({"large": largest, "empty": torch.empty(0), "scalar": torch.tensor(0.5)}) is None


def test_it_is_told_in_one_sentence_with_step_and_cure():
    check_gradient_norm(1e30, 4)
    with pytest.raises(NotFinite, match=r"^step 4: the norm of all gradients is nan .*Lower the learning rate"):
        check_gradient_norm(NAN, 4)
    check_parameters_finite({"a": torch.ones(2)}, 6, None)
    weights = {"a": torch.ones(2), "b": torch.tensor([NAN])}
    with pytest.raises(NotFinite, match=r"^step 6: parameter b is NaN or infinite .* written: start anew with a lower"):
        check_parameters_finite(weights, 6, None)
    with pytest.raises(NotFinite, match=r"resume from the last checkpoint \(resume it\) with a lower"):
        check_parameters_finite(weights, 6, "resume it")


WAYS = {
    "local": {"mode": "local"},
    "ddp": {"mode": "ddp"},
    "rpc": {"mode": "rpc"},
    "two servers": {"mode": "rpc", "cluster": {"num_servers": 2, "num_trainers": 2, "timeout_s": 30}},
    "compute server": {"mode": "rpc", "server": {"compute": "server"}},
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("way", "clip"), [*((way, None) for way in WAYS), ("ddp", 0.5), ("rpc", 0.5), ("two servers", 0.5)]
)
def test_a_gradient_that_is_nan_with_a_finite_loss_is_never_stored(tmp_path, way, clip):
    """Where gradients are clipped it is not even applied; where not, at the next checkpoint, in every mode alike."""
    config = {
        "task": f"{bad_tasks}:FailsAtBatch",
        "task_args": {"what": "gradient", "at": 5},
        "training": {"clip_grad_norm": clip, "batch_size": 4},
        "checkpoint": EVERY_3,
        **WAYS[way],
    }
    finished = (run_in_process if way == "local" else launch)(tmp_path, **config)
    expected = "step 6: parameter scale is NaN" if clip is None else "step 6: the norm of all gradients is nan"
    assert finished.code == 1, finished.output
    last = finished.output.rstrip().splitlines()[-1]
    assert last.startswith("error: ")
    assert expected in last
    assert "Traceback" not in finished.output
    assert expected in finished.summary["error"]
    assert finished.checkpoints == ["step-00000003"]
    assert all(tensor.isfinite().all() for tensor in finished.load("model").values())


@pytest.mark.processes
def test_a_run_goes_on_from_the_last_good_checkpoint(tmp_path):
    task = {"task": f"{bad_tasks}:FailsAtBatch", "task_args": {"what": "gradient", "at": 5}, "checkpoint": EVERY_3}
    finished = run_in_process(tmp_path, **task)
    assert (
        f"resume from the last checkpoint (python -m paramserver.launch --resume {finished.run_dir})" in finished.output
    )
    again = run_in_process(tmp_path / "again", "--resume", finished.run_dir, "--set", "task_args.at=-1", **task)
    assert again.code == 0, again.output


@pytest.mark.processes
@pytest.mark.parametrize(
    ("task", "servers", "what"),
    [("FailsAtBatch", 1, "the gradient of parameter"), ("Diverges", 1, "parameter"), ("Diverges", 2, "parameter")],
)
def test_what_is_too_large_for_the_wire_is_told_in_one_sentence(tmp_path, task, servers, what):
    finished = launch(
        tmp_path,
        mode="rpc",
        task=f"{bad_tasks}:{task}",
        task_args={"what": "huge"} if task == "FailsAtBatch" else {},
        cluster={"num_trainers": 2, "num_servers": servers, "timeout_s": 30},
        server={"transport": "rpc", "wire_dtype": "float16"},
    )
    sentence = (
        rf"{what} [a-z.]+ has a value of [0-9.e+]+, which is too large for server\.wire_dtype \(float16\); "
        r"use bfloat16 or float32, or a smaller learning rate"
    )
    assert finished.code == 1, finished.output
    last = finished.output.rstrip().splitlines()[-1]
    assert re.fullmatch(rf"error: rank \d \((server|trainer) \d\): {sentence}", last)
    assert "Traceback" not in finished.output
    assert re.fullmatch(rf"(NotFinite: |trainer \d failed: ){sentence}", finished.summary["error"])

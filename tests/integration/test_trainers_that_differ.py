"""Trainers that build another model or data set than the others: one sentence that names both and the difference."""

import re

import pytest
from cli_errors import error_message, invalid_task
from launching import WITNESS_TRAINERS, launch

pytestmark = pytest.mark.processes


def differing(tmp_path, mode, what, **config):
    return launch(
        tmp_path,
        mode=mode,
        task=invalid_task("DiffersBetweenTrainers"),
        task_args={"what": what},
        cluster={"num_trainers": 2, "timeout_s": 30},
        **config,
    )


def ranks(mode):
    first = mode == "rpc"
    return [rf"rank {first + index} \(trainer {index}\)" for index in range(2)]


def assert_refused(finished, mode, name, one, other):
    """Either trainer may be the first that describes what it has; the other one is refused."""
    message = error_message(finished)
    a, b = ranks(mode)
    either = rf"({a} has {one}, and {b} has {other}|{b} has {other}, and {a} has {one})"
    assert re.fullmatch(rf"({a}|{b}): {name} must [^:]*: {either}; [^;\n]*\n", message), message


@pytest.mark.parametrize(
    ("what", "one", "other"),
    [
        ("shape", r"extra\.weight of shape \(2, 2\) and torch\.float32", r"extra\.weight of shape \(2, 3\) and .*32"),
        ("dtype", r"scale of shape \(\) and torch\.float32", r"scale of shape \(\) and torch\.float64"),
        ("buffer", r"bn\.running_mean of shape \(4,\) and torch\.float32", r"extra of shape \(2,\) and torch\.float32"),
    ],
)
def test_models_that_differ_in_ddp(tmp_path, what, one, other):
    assert_refused(differing(tmp_path, "ddp", what), "ddp", "build_model", one, other)


@pytest.mark.parametrize("mode", ["rpc", "ddp"])
@pytest.mark.parametrize(
    ("what", "name", "one", "other"),
    [
        ("samples", "train_source", "a data set of 256 samples", "a data set of 255 samples"),
        ("validation", "validation_source", "a data set of 37 samples", "a data set of 36 samples"),
        ("kind", "train_source", "a data set of 256 samples", "no data set"),
    ],
)
def test_data_sets_that_differ(tmp_path, mode, what, name, one, other):
    assert_refused(differing(tmp_path, mode, what), mode, name, one, other)


@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_iterables_are_each_trainers_own(tmp_path, mode):
    finished = differing(tmp_path, mode, "iterables", training={"max_steps": 4})
    assert finished.code == 0, finished.output


def test_hosts_with_other_backends_are_refused_in_ddp(tmp_path):
    """They would wait for each other, each in a process group of its own kind."""
    config = {"trainer": f"{WITNESS_TRAINERS}:OtherBackend", "cluster": {"num_trainers": 2, "timeout_s": 30}}
    finished = launch(tmp_path, mode="ddp", env={"PYTHONPATH": str(WITNESS_TRAINERS.parent)}, **config)
    assert_refused(finished, "ddp", r"cluster\.backend", "gloo", "nccl")

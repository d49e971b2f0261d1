"""What small functions return, each for a few arguments: those that no other test calls by itself."""

import json
import math
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from paramserver import platform
from paramserver.checkpoint import check_storable, without_values
from paramserver.checkpoint.format import step_name, step_of
from paramserver.checkpoint.load import choose_checkpoint
from paramserver.checkpoint.save import write_checkpoint
from paramserver.checkpoint.serialization import check_mapping
from paramserver.checkpoint.staging import RowStream, address_of, replace_tensors
from paramserver.cluster import host_and_port, quiet_torch_log, write_error_file
from paramserver.cluster.base import infer_placement, list_numbers, read_number
from paramserver.cluster.network import interface_to
from paramserver.cluster.torchrun import TorchrunEnvironment
from paramserver.config import is_plain, load_config, without_old_defaults
from paramserver.distributed.backends import available_backends
from paramserver.distributed.session import server_name
from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.fileio import json_text, then_resume
from paramserver.optim.named_optimizers import states_by_position
from paramserver.optim.outer import outer_names
from paramserver.optim.updater import SwitchedOptimizer, has_modes
from paramserver.parameters.flat import FlatLayout, has_gaps
from paramserver.parameters.numerics import describe_value, find_nonfinite, largest_value
from paramserver.tools.bench.simulation import Resource
from paramserver.tools.report.results import best_validation, parse_target
from paramserver.transport.compression import COMPRESSORS, CastCodec
from paramserver.transport.rpc import PushAssembly

PART = torch.ones(4, 4)[:, :3]
SLOT = FlatLayout.of([("part", PART)]).slots[0]
SGD_STATE = {"state": {0: {"step": 3}}, "param_groups": [{"params": [0, 1]}]}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([step_name(100), step_of("step-00000100"), step_of("latest")], ["step-00000100", 100, None]),
        (check_mapping({"step": 3}, "run.pt", ["step"]), {"step": 3}),
        ([address_of(torch.zeros(2).to_sparse()), address_of("text")], [0, 0]),
        ([infer_placement(1, 3, "127.0.0.1"), infer_placement(1, 3, "node0")], [(1, 3, 0), (0, 1, 1)]),
        ([list_numbers([1, 2]), list_numbers([0, 3, 4, 5, 7])], ["1, 2", "0, 3-5, 7"]),
        (list_numbers(range(0, 2000, 2)), "0, 2, 4, 6, 8 and 995 more"),
        (read_number({"RANK": "3"}, "RANK", "torchrun", below=4), 3),
        (host_and_port("node0", 29500), "node0:29500"),
        (host_and_port("fd00::1", 29500), "[fd00::1]:29500"),
        (interface_to("127.0.0.1"), "lo"),
        ([*map(TorchrunEnvironment.num_restarts, ({"TORCHELASTIC_RESTART_COUNT": "2"}, {}))], [2, 0]),
        (
            without_old_defaults({"server": {"wire_dtype": "float32", "bucket_mb": 4}}),
            {"server": {"bucket_mb": 4}},
        ),
        ([is_plain({"width": [1, 2.5]}), is_plain(object())], [True, False]),
        (available_backends()["gloo"], True),
        (server_name(1), "server1"),
        (json_text({"loss": math.nan}), '{"loss": null, "loss_text": "nan"}'),
        (states_by_position(SGD_STATE), {0: {"step": 3}}),
        (outer_names("SGD"), ["sgd", "nesterov"]),
        (has_modes(torch.optim.SGD([torch.zeros(1)], lr=1.0)), False),
        ([has_gaps(PART, SLOT), has_gaps(PART.contiguous(), SLOT)], [True, False]),
        (float(largest_value([torch.tensor([1.0, -3.0]), torch.empty(0)])), 3.0),
        (math.isnan(largest_value([torch.tensor([1.0, math.nan])])), True),
        (find_nonfinite(0.5, [torch.ones(2), None]), ""),
        (find_nonfinite(0.5, [torch.tensor([math.inf])]), "gradient"),
        (describe_value(torch.ones(3)), "a Tensor of shape (3,) and torch.float32"),
        (describe_value(None), "None"),
        ([platform.is_alive(os.getpid()), platform.is_stopped(os.getpid())], [True, False]),
        (platform.cpu_ticks(os.getpid()) > 0, True),
        ([parse_target(f"{name}=0.1").name for name in ("valid/loss", "Loss/valid", "loss")], ["loss"] * 3),
        (
            best_validation([(320.0, 1.0, {"accuracy": 0.96}), (640.0, 2.0, {"accuracy": 0.9})], "accuracy"),
            {"name": "accuracy", "value": 0.96, "samples": 320.0, "less_is_better": False},
        ),
    ],
)
def test_a_value(found, expected):
    assert found == expected


def test_a_number_that_is_too_large_is_refused():
    with pytest.raises(UnsupportedConfiguration, match=r"RANK \(4\) must be below 4: ranks count from 0"):
        read_number({"RANK": "4"}, "RANK", "torchrun", below=4)


def test_the_threshold_of_the_log_is_set():
    quiet_torch_log(variables := {})
    assert variables == {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def test_a_checkpoint_is_chosen_by_its_step(tmp_path):
    write_checkpoint(tmp_path / "checkpoints", 100, {"counts": {"samples": 3200}}, {"trainers": 2})
    assert choose_checkpoint(tmp_path, "100").name == "step-00000100"


def test_a_run_without_a_checkpoint_starts_again_under_another_name(tmp_path):
    text = "then start it again under another logging.name, as it has no checkpoint to resume from"
    assert then_resume(tmp_path / "metrics.jsonl") == text
    assert then_resume(tmp_path / "moved" / "metrics.jsonl") == "then --resume"


def test_torchrun_gets_the_error(tmp_path):
    write_error_file({"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}, "seed (-1) must be at least 0")
    found = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]
    assert sorted(found) == ["py_callstack", "timestamp"]


def test_a_config_knows_which_keys_were_given():
    config = load_config(None, overrides=["task=task.py:Sine", "training.batch_size=32"])
    assert (config.has_given("batch_size"), config.has_given("loader_workers")) == (True, False)


def test_what_a_task_stores_is_checked_by_its_types():
    values = without_values({"mean": torch.zeros(2), "epoch": 3})
    assert (len(values["mean"]), values["epoch"]) == (0, 3)
    arrays = [np.zeros(2), np.float64(1.0), [b"x", {"a", "b"}, torch.Size([2])]]
    check_storable({"epoch": 3, "mean": torch.zeros(2), "all": (1, "x", None, arrays), "odd": OrderedDict(a=1)}, "it")
    for value in (object(), [1, Path("x")], {"a": ({Path("x"): 1},)}, np.array([object()]), torch.optim.SGD, tuple):
        with pytest.raises(TaskError, match=r"^Digits\.on_checkpoint stored what cannot be loaded again \("):
            check_storable({"value": value}, "Digits.on_checkpoint")


def test_streams_take_the_place_of_their_tensors():
    table, step = torch.zeros(2, 3), torch.tensor(4.0)
    stream = RowStream((2, 3), torch.float32, lambda first, end: table[first:end])
    replaced = replace_tensors({"sum": table, "step": step}, {table.data_ptr(): stream})
    assert replaced["sum"] is stream
    assert replaced["step"] is step


def test_an_optimizer_is_in_the_mode_that_it_was_switched_to():
    class Average(torch.optim.SGD):
        def train(self):
            pass

        def eval(self):
            pass

    switched = SwitchedOptimizer(Average([torch.zeros(1)], lr=1.0))
    switched.optimizer.train()
    with switched.evaluation_mode():
        assert not switched.is_training
    assert switched.is_training


def test_requests_are_served_in_their_order():
    link = Resource()
    assert (link.take(0.0, 2.0), link.take(1.0, 2.0)) == (2.0, 4.0)


@pytest.mark.parametrize(
    ("name", "values", "num_bytes", "decoded"),
    [
        ("bfloat16", [1.001, 3.0], 4, [1.0, 3.0]),
        ("int8", [127.0, -0.6], 6, [127.0, -1.0]),
    ],
)
def test_a_compressor_rounds(name, values, num_bytes, decoded):
    compressor, lengths = COMPRESSORS[name](256), (len(values),)
    encoded = compressor.encode(torch.tensor(values), lengths)
    assert (encoded.dtype, len(encoded)) == (torch.uint8, num_bytes)
    assert compressor.decode(encoded, lengths, torch.float32).tolist() == decoded


def test_a_push_is_complete_with_its_last_bucket():
    leaves = [torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)]
    push = PushAssembly(leaves, CastCodec(torch.float32))
    push.add_bucket(1, torch.ones(3))
    assert push.complete() is None
    push.add_bucket(0, torch.ones(2))
    assert [part.tolist() for part in push.complete()] == [[1.0, 1.0], [1.0, 1.0, 1.0]]


def test_a_push_to_a_server_without_parameters_of_its_first_type_is_complete_without_them():
    push = PushAssembly([torch.zeros(0, requires_grad=True), torch.zeros(3, requires_grad=True)], CastCodec(None))
    assert push.complete() is None
    push.add_bucket(1, torch.ones(3))
    assert [part.tolist() for part in push.complete()] == [[], [1.0, 1.0, 1.0]]

"""An IterableDataset in worker processes: the same in every mode, after a resume and after a loss, bit for bit."""

import re
from pathlib import Path

import pytest
from launching import NOT_GIVEN, assert_equal_runs, differing_tensors, launch, resume, train

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked_loaders")]

TASK = f"{Path(__file__).parents[1] / 'helpers' / 'iterable_tasks.py'}:Streamed"


def trained(folder, mode, trainers, kind="placed", workers=2, in_loader=True, samples=61, max_steps=None, **sections):
    """``in_loader``: a DataLoader has the workers, otherwise ``training.loader_workers``."""
    args = {"kind": kind, "samples": samples, "workers": workers if in_loader else None}
    size = {"batch_size": NOT_GIVEN} if in_loader else {"loader_workers": workers, "batch_size": 8}
    training = {"max_epochs": None, "max_steps": max_steps, "uneven_inputs": "join", **size}
    return train(folder, mode, trainers, task=TASK, task_args=args, training=training, **sections)


@pytest.mark.nightly
@pytest.mark.parametrize("in_loader", [True, False])
def test_one_trainer_is_the_same_in_every_mode(tmp_path, in_loader):
    first, *others = (trained(tmp_path, mode, 1, in_loader=in_loader) for mode in ("local", "ddp", "rpc"))
    assert first.summary["samples"] == 61
    for other in others:
        assert differing_tensors(first.load("model"), other.load("model")) == []


@pytest.mark.parametrize("in_loader", [True, False])
def test_two_trainers_are_the_same_in_ddp_and_rpc(tmp_path, in_loader):
    ddp, rpc = (trained(tmp_path, mode, 2, in_loader=in_loader) for mode in ("ddp", "rpc"))
    assert ddp.summary["samples"] == rpc.summary["samples"] == 61
    assert differing_tensors(ddp.load("model"), rpc.load("model")) == []


ALL = {"capacity": 128, "watermark": 120}  # more than there are samples: all are put before the first get


@pytest.mark.parametrize(
    ("kind", "in_loader", "mode", "trainers", "buffer"),
    [
        ("placed", True, "local", 1, {}),
        ("plain", False, "ddp", 2, {"capacity": 20}),  # which holds a part of a group
        ("dealt", False, "rpc", 2, {"capacity": 20}),
        ("placed", False, "rpc", 2, {"kind": "firo", **ALL}),
        ("placed", False, "local", 1, {"kind": "reservoir", **ALL}),
    ],
)
def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path, kind, in_loader, mode, trainers, buffer):
    options = {"kind": kind, "in_loader": in_loader, "buffer": buffer}
    whole = trained(tmp_path / "whole", mode, trainers, **options)
    begun = trained(tmp_path / "begun", mode, trainers, max_steps=2, **options)
    ended = resume(begun, "--set", "training.max_steps=null")
    assert ended.code == 0, ended.output
    assert_equal_runs(whole, ended, trainers=trainers)
    noted = [record["text"] for record in ended.of_kind("note") if "read again and skipped" in record["text"]]
    assert len(noted) == (trainers if kind == "plain" else 0)


@pytest.mark.parametrize(("world_size", "workers"), [(4, 2), (3, 1)])
def test_other_trainers_and_workers_serve_the_rest_once(tmp_path, world_size, workers):
    begun = trained(tmp_path, "rpc", 2, "dealt", in_loader=False, max_steps=2, buffer={"capacity": 20})
    others = ["--world_size", str(world_size), "--set", f"training.loader_workers={workers}"]
    ended = resume(begun, "--set", "training.max_steps=null", *others)
    assert ended.code == 0, ended.output
    assert ended.summary["samples"] == 61


def test_another_number_of_workers_is_refused_in_one_sentence(tmp_path):
    begun = trained(tmp_path, "rpc", 1, "placed", in_loader=False, max_steps=2)
    ended = resume(begun, "--set", "training.max_steps=null", "--set", "training.loader_workers=1")
    assert ended.code == 2
    assert "training.loader_workers (1) must be 2 as before, because each worker reads its own part of" in ended.output
    assert "Traceback" not in ended.output


def test_a_trainer_that_is_killed_is_replaced_and_each_sample_is_applied_once(tmp_path):
    mark = tmp_path / "mark"
    finished = launch(
        tmp_path,
        mode="rpc",
        task=TASK,
        task_args={"kind": "placed", "workers": 2, "samples": 160, "mark": str(mark)},
        training={"max_steps": None, "uneven_inputs": "join"},
        cluster={"num_trainers": 2, "timeout_s": 30},
    )
    assert finished.code == 0, finished.output
    assert mark.exists()
    assert finished.summary["restarts"] == 1
    assert finished.summary["samples"] == 160


OWN_TASK = """

import paramserver


class Own(paramserver.Task):
    def __init__(self, files):
        self.files = files

    def build_model(self):
        return torch.nn.Linear(2, 1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.01)

    def training_step(self, model, batch, batch_idx):
        return model(batch).square().mean()

    train_source = train_source
"""


def test_the_data_set_of_the_page_is_read_and_continues(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "task.md").read_text()
    code = re.search(r"<!-- run: iterable -->\n```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1]
    (tmp_path / "lines_task.py").write_text(code + OWN_TASK)
    files = []
    for number in range(3):
        files.append(str(tmp_path / f"{number}.csv"))
        Path(files[-1]).write_text("".join(f"{number},{line}\n" for line in range(16)))
    sizes = {"batch_size": NOT_GIVEN, "validate_every": 0}
    task = {"task": f"{tmp_path}/lines_task.py:Own", "task_args": {"files": files}}
    whole = train(tmp_path / "whole", "rpc", 1, **task, training={"max_steps": None, **sizes})
    begun = train(tmp_path / "begun", "rpc", 1, **task, training={"max_steps": 3, **sizes})
    ended = resume(begun, "--set", "training.max_steps=null")
    assert ended.code == 0, ended.output
    assert ended.summary["samples"] == 48
    assert_equal_runs(whole, ended)

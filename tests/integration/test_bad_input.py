"""Bad input: one clear message, the documented exit code, and nothing lost. Each case is a run of the command line.

What needs no second rank runs in this process. The messages themselves are tested where they are made.
"""

import ctypes
import io
import re
import resource
import socket
import tempfile
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from cli_errors import EVERY_3, assert_failed_with, error_message, file_contents, invalid_task, temporary_files
from launching import NOT_GIVEN, FinishedRun, launch, write_config

from paramserver._commands import COMMANDS
from paramserver.errors import TaskError
from paramserver.task import Task

# Before a run begins: nothing is left.


def in_file(text):
    return lambda folder: (folder / "config.yaml").write_text(text)


def module(name, text):
    return lambda folder: (folder / name).write_text(text)


BEFORE = {
    "malformed": (
        {},
        [],
        in_file("task: a:B\ntraining: {max_steps: 3\nmode: local\n"),
        r"config\.yaml:3: not valid YAML",
    ),
    "unknown key": ({}, ["--set", "training.batch_sise=3"], None, r"did you mean training\.batch_size\?"),
    "wrong type": ({"training": {"batch_size": "many"}}, [], None, r"config\.yaml:\d+: training\.batch_size \(many\)"),
    "an import that raises": (
        {"task": "broken.py:T"},
        [],
        module("broken.py", "limit = 0\nshare = 1 / limit\n"),
        r"importing .*broken\.py raised ZeroDivisionError: division by zero \(.*broken\.py:2\)",
    ),
    "a module that raises": (
        {"task": "broken_module:T"},
        [],
        module("broken_module.py", "def f():\n    raise KeyError('DATA')\nf()\n"),
        r"importing broken_module raised KeyError: 'DATA' \(.*broken_module\.py:2\)",
    ),
    "a method that is missing": (
        {"task": invalid_task("Unfinished")},
        [],
        None,
        r"lacks build_optimizer; write build_opt",
    ),
    "a constructor that raises": (
        {"task": invalid_task("Unmakeable")},
        [],
        None,
        r"raised: RuntimeError: there are no labels",
    ),
    "the same in a dry run": (
        {"task": invalid_task("Unmakeable")},
        ["--dry_run"],
        None,
        r"raised: RuntimeError: there are no labels \(.*invalid_tasks\.py:\d+\)",
    ),
    "a watermark above all samples": (
        {"training": {"max_epochs": 1, "max_steps": None}, "buffer": {"watermark": 257}},
        [],
        None,
        r"buffer\.watermark \(257\) must be at most the 256 samples that trainer 0 of 1 will ever get, .*lower it",
    ),
    "a default that only a data loader would replace": (
        {"training": {"batch_size": NOT_GIVEN}, "buffer": {"capacity": 16}},
        [],
        None,
        r"^a batch of 32 can never be gathered from a buffer of 16; raise buffer\.capacity or lower training",
    ),
    "the same default in a dry run": (
        {"training": {"batch_size": NOT_GIVEN}, "buffer": {"capacity": 16}},
        ["--dry_run"],
        None,
        r"^a batch of 32 can never be gathered from a buffer of 16; raise buffer\.capacity or lower training",
    ),
    "a loss that is a vector": (
        {"task": invalid_task("FailsAtBatch"), "task_args": {"what": "vector", "at": 0}},
        [],
        None,
        "mean",
    ),
    "a batch beyond max_bytes": (
        {"buffer": {"max_bytes": 1000}},
        [],
        None,
        r"trainer 0: buffer: max_bytes \(1000\) must hold at least 8 samples .* raise max_bytes to 1216",
    ),
    "an address of another host": (
        {"mode": "rpc"},
        ["--rank", "0", "--world_size", "3", "--master_addr", "192.0.2.1"],
        None,
        r"cluster\.master_addr \(192\.0\.2\.1\) cannot be opened: .*an address of its own host",
    ),
    "a name that has no address": (
        {"mode": "rpc", "cluster": {"timeout_s": 1}},  # for as long it might become known
        ["--rank", "0", "--world_size", "3", "--master_addr", ":2950"],
        None,
        r"cluster\.master_addr \(:2950\) has no address: .*give the name or address of rank 0's host",
    ),
    "a name in a form that none has": (
        {"mode": "rpc"},
        ["--rank", "0", "--world_size", "3", "--master_addr", "a..b"],
        None,
        r"cluster\.master_addr \(a\.\.b\) must be a host name or address",
    ),
    "a trainer that is a class of another kind": (
        {"trainer": invalid_task("Unmakeable")},
        [],
        None,
        r"trainer \(.*:Unmakeable\) must be a class derived from one in paramserver\.trainers",
    ),
    "an interface that is not there": (
        {"mode": "ddp", "cluster": {"interface": "nowhere0"}},
        ["--rank", "0", "--world_size", "1", "--master_port", "0"],
        None,
        r"cluster\.interface \(nowhere0\) must be a network interface of this machine \(.*lo.*\)",
    ),
    "a run that is not there": ({}, ["--resume", "nowhere"], None, r"run folder nowhere must exist"),
}


@pytest.mark.parametrize("name", BEFORE)
def test_input_that_is_wrong_from_the_start_leaves_no_files(start, tmp_path, monkeypatch, name):
    config, flags, prepare, expected = BEFORE[name]
    monkeypatch.chdir(tmp_path)
    finished = start(*flags, prepare=prepare, **config)
    assert re.search(expected, error_message(finished)), finished.output
    assert not (tmp_path / "runs").exists() or list((tmp_path / "runs").iterdir()) == []


@pytest.mark.processes
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"foo": 1}, r"\(foo\) must be arguments of DistributedDataParallel .*choose from .*mixed_precision"),
        (
            {"device_ids": [0]},
            r"\(device_ids\) must be arguments of DistributedDataParallel that the trainer does not give itself",
        ),
    ],
)
def test_wrong_arguments_of_ddp_leave_no_files(tmp_path, extra, expected):
    finished = launch(tmp_path, mode="ddp", ddp={"extra": extra}, cluster={"num_trainers": 1})
    assert re.search(rf"ddp\.extra {expected}", error_message(finished)), finished.output
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_missing_config(call, tmp_path):
    finished = call(tmp_path, "--config", tmp_path / "nowhere.yaml")
    assert error_message(finished) == f"{tmp_path}/nowhere.yaml does not exist; give the path of a YAML file\n"
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken(start, tmp_path):
    """Once by the supervisor of all ranks, once by a rank 0 that was started by hand."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flags in ((), ("--rank", "0", "--world_size", "3")):
            message = error_message(start(*flags, "--master_port", str(port), mode="rpc"))
            assert f"cluster.master_port ({port})" in message
            assert "Address already in use; choose a free port" in message
            assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize(("rank", "expected"), [(0, "missing: rank 1, 2. Start them"), (1, "no rank 0 at 127.0.0.1:")])
def test_missing_ranks_are_named_at_the_deadline(start, tmp_path, rank, expected):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ("--rank", str(rank), "--world_size", "3", "--master_port", str(port))
    message = error_message(start(*flags, mode="rpc", cluster={"timeout_s": 0.5}), code=1).partition("\n")[0]
    assert expected in message
    assert "cluster.timeout_s (0.5 s)" in message
    assert not (tmp_path / "runs").exists()


# While it runs: what there is stays.

WHILE = {
    "a vector": (invalid_task("FailsAtBatch"), {"what": "vector"}, 2, "batch 5: returned a tensor of shape (3,)", 5),
    "a number": (
        invalid_task("FailsAtBatch"),
        {"what": "number"},
        2,
        "batch 5: returned float; the loss must be a scalar tensor",
        5,
    ),
    "an exit": (
        invalid_task("FailsAtBatch"),
        {"what": "leave"},
        1,
        "trainer 0: the task ended its process (SystemExit: 0)",
        5,
    ),
    "nan": (invalid_task("FailsAtBatch"), {"what": "nan"}, 1, "training_step, trainer 0, batch 5: the loss is nan", 5),
    "another shape": (
        invalid_task("Changes"),
        {"at": 44},
        2,
        "trainer 0, batch 5: samples of a batch must be alike to be stacked, and these differ: (Tensor 1x6x6, Tensor) "
        "and (Tensor 1x3x6, Tensor); make them alike in process_sample(self, sample), or write collate(self, samples), "
        "or return a DataLoader with a collate_fn",
        5,
    ),
    "a source that raises": ("BadSource", {}, 1, "trainer 0: the source raised at sample 50: OSError: the disk", None),
}


@pytest.mark.parametrize("name", WHILE)
@pytest.mark.parametrize("every", [3, 0])
def test_an_error_in_a_batch_keeps_earlier_checkpoints(start, name, every):
    task, arguments, code, expected, steps = WHILE[name]
    finished = start(
        task=task, task_args=arguments, checkpoint={"every": every, "background": False}, buffer={"capacity": 16}
    )
    assert expected in error_message(finished, code).partition("\n")[0]
    steps = steps or finished.summary["steps"]  # how many a failing source leaves to be served is a matter of time
    assert steps >= 4
    due = range(3, steps + 1, 3) if every else []
    if WHILE[name][-1] is None and steps in due and len(finished.checkpoints) < len(due):
        due = due[:-1]  # it failed between the last step and the checkpoint of it
    assert_failed_with(finished, expected, due, steps)
    assert [record["step"] for record in finished.of_kind("train")] == list(range(1, steps + 1))


@pytest.mark.processes
def test_an_error_in_a_rank_is_reported_once_and_keeps_earlier_checkpoints(tmp_path):
    task_args = {"what": "vector"}
    finished = launch(
        tmp_path,
        mode="rpc",
        task=invalid_task("FailsAtBatch"),
        task_args=task_args,
        checkpoint={"every": 3, "background": False},
    )
    message = error_message(finished)
    assert re.match(r"rank \d \(trainer (\d)\): training_step, trainer \1, batch 5: returned a tensor", message)
    assert "Traceback" not in finished.output
    assert_failed_with(finished, "returned a tensor of shape (3,)", [3], 5)


@pytest.mark.processes
@pytest.mark.claim("float64-parameters")
@pytest.mark.parametrize("mode", ["local", "ddp", "rpc", "server"])
def test_a_float64_tensor_of_a_batch_is_named_in_every_mode(tmp_path, mode):
    config = {"mode": "rpc", "server": {"compute": "server"}} if mode == "server" else {"mode": mode}
    message = error_message(launch(tmp_path, task=invalid_task("NamesFloat64"), **config))
    cure = (
        'batch["parameters"] is float64, and the model is float32: convert with batch["parameters"].to(torch.float32)'
    )
    assert re.search(r"training_step: .* dtype.* Double and Float", message)
    assert message.endswith(f"{cure}\n")


def test_a_validation_batch_of_several_shapes(start):
    finished = start(task=invalid_task("ChangesInValidation"), **EVERY_3)
    assert "these differ: (Tensor 1x6x6, int) and (Tensor 1x6x7, int)" in error_message(finished)
    assert_failed_with(finished, "these differ", [3, 6, 9], 9)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([{"a": 1, "b": 2.0}, {"a": 1}], r"differ: \{a: int, b: float\} and \{a: int\}; make them alike"),
        ([[1, 2], [1, 2, 3]], r"differ: \(int, int\) and \(int, int, int\)"),
        ([Path("a"), Path("b")], r"samples \(PosixPath\) cannot be stacked into a batch \(.*\); write collate\(self"),
    ],
)
def test_samples_that_cannot_be_stacked_are_reported_with_their_shapes(samples, expected):
    with pytest.raises(TaskError, match=expected):
        Task().collate(samples)


# The disk.


@contextmanager
def largest_file(size_bytes):
    """The disk accepts no more than this many bytes of one file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def read_only(folder):
    folder.chmod(0o500)
    try:
        yield
    finally:
        folder.chmod(0o700)


@contextmanager
def ordinary_user():
    """A folder of a user whom permissions stop; the superuser gives up these two of its rights meanwhile.

    The header and the sets of capabilities are those of capget(2); the set in effect comes first.
    """
    libc, header, sets = (
        ctypes.CDLL(None, use_errno=True),
        (ctypes.c_uint32 * 2)(0x20080522, 0),
        (ctypes.c_uint32 * 6)(),
    )
    assert libc.capget(header, sets) == 0
    before = sets[0]
    with tempfile.TemporaryDirectory() as folder:
        sets[0] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        assert libc.capset(header, sets) == 0
        try:
            yield Path(folder)
        finally:
            sets[0] = before
            assert libc.capset(header, sets) == 0


def test_a_checkpoint_that_is_refused_by_the_disk_keeps_those_before(start, call):
    """Each checkpoint is 1 MiB larger than the one before; the third one is too large for the disk."""
    with largest_file(3 * 2**20):
        finished = start(
            task=invalid_task("Grows"), training={"max_steps": 30}, checkpoint={"every": 3, "background": False}
        )
    message = error_message(finished, code=1)
    assert re.match(
        r"checkpoint \S*step-00000009\S*/trainer-0\.pt could not be written \(.*File too large.*\)", message
    )
    assert "raise the limit of file sizes (ulimit -f), then --resume" in message
    assert finished.summary["status"] == "failed"
    assert finished.checkpoints == ["step-00000003", "step-00000006"]
    assert finished.summary["checkpoint"] == "step-00000006"
    assert temporary_files(finished.run_dir) == []
    assert call(finished.run_dir, "--resume", finished.run_dir).code == 0
    assert finished.summary["steps"] == 30


@pytest.mark.processes
def test_a_full_disk_does_not_hide_the_first_error(tmp_path, call):
    """Records, checkpoint, log and summary are all refused; the error printed last is the one that happened first."""
    finished = launch(
        tmp_path, fresh=True, task=invalid_task("FailsAtBatch"), task_args={"what": "refuse_writes"}, **EVERY_3
    )
    message = error_message(finished, code=1)
    assert re.match(r"metrics file \S*/metrics\.jsonl must be writable \(.*File too large.*\); free space", message)
    assert finished.checkpoints == ["step-00000003"]
    assert temporary_files(finished.run_dir) == []
    resumed = call(finished.run_dir, "--resume", finished.run_dir, "--set", "task_args={what: nan, at: 99}")
    assert resumed.code == 0, resumed.output
    assert [record["step"] for record in finished.of_kind("train")] == list(range(1, 10))


def refused_folder(command, folder, out):
    config = write_config(folder)
    (folder / "local").mkdir(exist_ok=True)
    (folder / "local" / "config.yaml").write_text("mode: local\n")
    arguments = {
        "launch": ["--config", str(config), "--mode", "local", "--set", f"logging.run_dir={out}"],
        "init": [out],
        "keys": [out],
        "report": [str(folder / "local"), "--out", out],
    }
    stderr = io.StringIO()
    with redirect_stderr(stderr), redirect_stdout(io.StringIO()):
        assert COMMANDS[command].main(arguments[command]) == 2, stderr.getvalue()
    assert "Traceback" not in stderr.getvalue()
    return stderr.getvalue()


@pytest.mark.parametrize("unreadable", ["run", "base"])
def test_a_run_of_another_user_is_passed_over(capsys, own_environ, call, unreadable):
    with ordinary_user() as folder:
        base = folder / "runs"
        for name in ("mine", "other"):
            (base / name / "checkpoints").mkdir(parents=True)
            (base / name / "config.yaml").write_text("mode: local\n")
            (base / name / "environment.json").write_text("{}")
        locked = base / "other" if unreadable == "run" else base
        locked.chmod(0)
        try:
            codes = [COMMANDS["runs"].main([str(base)]), COMMANDS["report"].main([str(locked), "--out", str(folder)])]
            out, err = capsys.readouterr()
            config = write_config(folder, logging={"run_dir": str(base)})
            resumed = call(None, "--config", config, "--mode", "local", "--resume")
        finally:
            locked.chmod(0o700)
    codes, err = [*codes, resumed.code], err + resumed.output
    assert codes == [0 if unreadable == "run" else 2, 2, 2], out + err
    assert "Traceback" not in err
    assert ("mine" in out) == (unreadable == "run")


def test_folders_that_may_not_be_written_to(start, call):
    with ordinary_user() as folder:
        (folder / "read-only").mkdir(0o500)
        message = error_message(start("--set", f"logging.run_dir={folder}/read-only/runs", folder=folder))
        assert (
            f"logging.run_dir ({folder}/read-only/runs) must be a folder that this user can write to (Perm" in message
        )
        for command in ("launch", "init", "keys", "report"):
            for deep in ("a", "a/b", "a/b/c"):
                assert "Permission denied" in refused_folder(command, folder, f"{folder}/read-only/{deep}")
        assert start(folder=folder, **EVERY_3).code == 0
        run = FinishedRun(0, "", folder / "runs" / "run")
        longer = ("--resume", run.run_dir, "--set", "training.max_steps=12")
        before = file_contents(run.run_dir)
        with read_only(run.run_dir):
            message = error_message(call(run.run_dir, *longer))
        assert f"run folder {run.run_dir} must be a folder that this user can write to (Permission denied)" in message
        assert file_contents(run.run_dir) == before
        for closed in (run.run_dir / "checkpoints", run.run_dir / "logs", run.run_dir / "logs" / "rank-0.log"):
            with read_only(closed):
                message = error_message(call(run.run_dir, *longer))
            assert message.startswith(f"{closed} must be what this user can read and write, to resume its run; ")
            assert file_contents(run.run_dir) == before
        assert call(run.run_dir, *longer).code == 0
        assert run.checkpoints[-1] == "step-00000012"

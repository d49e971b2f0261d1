"""Bad input: one clear answer, the exit code of the contract, and nothing lost. Each case is a run of the command line.

What needs no second rank runs in this process. The messages themselves are tested where they are made.
"""

import json
import os
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from paramserver.errors import TaskError
from paramserver.launch import main
from paramserver.rundir import RunDir
from paramserver.task import Task
from runs import Finished, launch, same_bits, write_config

TASKS = Path(__file__).with_name("bad_tasks.py")
EVERY_3 = {"training": {"max_steps": 9, "validate_every": 0}, "checkpoint": {"every": 3, "background": False}}


def bad(name):
    return f"{TASKS}:{name}"


@pytest.fixture
def call(capsys, monkeypatch, own_environ):
    """The command line in this process."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}

    def called(run_dir, *arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:
            code = error.code
        finally:  # a rank that was started by itself ends with its process, and keeps them
            for number, handler in handlers.items():
                signal.signal(number, handler)
        out, err = capsys.readouterr()
        return Finished(code, out + err, run_dir)

    return called


@pytest.fixture
def start(call, tmp_path):
    def started(*flags, folder=tmp_path, prepare=None, **config):
        file = write_config(folder, **{"logging": {"progress": "off"}, **config})
        if prepare is not None:
            prepare(folder)
        return call(folder / "runs" / "run", "--config", file, "--set", "logging.name=run", *flags)

    return started


def refusal(finished, code=2):
    """The one message that ended a run."""
    assert finished.code == code, finished.output
    assert finished.output.count("error: ") == 1, finished.output
    message = finished.output.partition("error: ")[2]
    assert code != 2 or message.count("\n") == 1, message
    return message


def contents(folder):
    """Every file below, but the lock, which is never removed."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def temporaries(folder):
    return [path for path in folder.rglob("*") if path.name.startswith(".") and path.name != ".lock"]


def failed_with(finished, said, checkpoints, steps):
    """The run failed with this message, and what it had until then is there."""
    assert finished.summary["status"] == "failed"
    assert said in finished.summary["error"]
    assert finished.summary["steps"] == steps
    assert finished.checkpoints == [f"step-{step:08d}" for step in checkpoints]
    assert finished.summary["checkpoint"] == (finished.checkpoints[-1] if checkpoints else None)
    assert temporaries(finished.run_dir) == []


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
    "a method that is missing": ({"task": bad("Unfinished")}, [], None, r"lacks build_optimizer; write build_opt"),
    "a constructor that raises": ({"task": bad("Unmakeable")}, [], None, r"raised: RuntimeError: there are no labels"),
    "the same in a dry run": (
        {"task": bad("Unmakeable")},
        ["--dry_run"],
        None,
        r"raised: RuntimeError: there are no labels \(.*bad_tasks\.py:\d+\)",
    ),
    "a watermark above all samples": (
        {"training": {"max_epochs": 1, "max_steps": None}, "buffer": {"watermark": 257}},
        [],
        None,
        r"buffer\.watermark \(257\) must be at most the 256 samples that trainer 0 of 1 will ever get, .*lower it",
    ),
    "a loss that is a vector": ({"task": bad("Breaks"), "task_args": {"what": "vector", "at": 0}}, [], None, "mean"),
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
    "an interface that is not there": (
        {"mode": "ddp", "cluster": {"interface": "nowhere0"}},
        ["--rank", "0", "--world_size", "1", "--master_port", "0"],
        None,
        r"cluster\.interface \(nowhere0\) must be a network interface of this machine \(.*lo.*\)",
    ),
    "a run that is not there": ({}, ["--resume", "nowhere"], None, r"run folder nowhere must exist"),
}


@pytest.mark.parametrize("name", BEFORE)
def test_what_is_wrong_from_the_start_leaves_nothing(start, tmp_path, monkeypatch, name):
    config, flags, prepare, said = BEFORE[name]
    monkeypatch.chdir(tmp_path)
    finished = start(*flags, prepare=prepare, **config)
    assert re.search(said, refusal(finished)), finished.output
    assert not (tmp_path / "runs").exists() or list((tmp_path / "runs").iterdir()) == []


def test_a_config_that_is_not_there(call, tmp_path):
    finished = call(tmp_path, "--config", tmp_path / "nowhere.yaml")
    assert refusal(finished) == f"{tmp_path}/nowhere.yaml does not exist; give the path of a YAML file\n"
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken(start, tmp_path):
    """Once by the supervisor of all ranks, once by a rank 0 that was started by itself."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flags in ((), ("--rank", "0", "--world_size", "3")):
            said = refusal(start(*flags, "--master_port", str(port), mode="rpc"))
            assert f"cluster.master_port ({port})" in said
            assert "Address already in use; choose a free port" in said
            assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize(("rank", "said"), [(0, "missing: rank 1, 2. Start them"), (1, "no rank 0 at 127.0.0.1:")])
def test_ranks_that_never_come_are_named_at_the_deadline(start, tmp_path, rank, said):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ("--rank", str(rank), "--world_size", "3", "--master_port", str(port))
    message = refusal(start(*flags, mode="rpc", cluster={"timeout_s": 0.5}), code=1).partition("\n")[0]
    assert said in message
    assert "cluster.timeout_s (0.5 s)" in message
    assert not (tmp_path / "runs").exists()


# While it runs: what there is stays.

WHILE = {
    "a vector": (bad("Breaks"), {"what": "vector"}, 2, "batch 5: returned a tensor of shape (3,)", 5),
    "a number": (bad("Breaks"), {"what": "number"}, 2, "batch 5: returned float; it must return the loss as a", 5),
    "nan": (bad("Breaks"), {"what": "nan"}, 1, "training_step, trainer 0, batch 5: the loss is nan", 5),
    "another shape": (
        bad("Changes"),
        {"at": 44},
        2,
        "trainer 0, batch 5: samples of a batch must be alike to be stacked, and these differ: (Tensor 1x6x6, Tensor) "
        "and (Tensor 1x3x6, Tensor); make them alike in process_sample(self, sample), or write collate(self, samples)",
        5,
    ),
    "a source that raises": ("BadSource", {}, 1, "trainer 0: the source raised at sample 50: OSError('the disk", None),
}


@pytest.mark.parametrize("name", WHILE)
@pytest.mark.parametrize("every", [3, 0])
def test_what_goes_wrong_in_a_batch_keeps_what_there_is(start, name, every):
    task, arguments, code, said, steps = WHILE[name]
    finished = start(
        task=task, task_args=arguments, checkpoint={"every": every, "background": False}, buffer={"capacity": 16}
    )
    assert said in refusal(finished, code).partition("\n")[0]
    steps = steps or finished.summary["steps"]  # how many a failing source leaves to be served is a matter of time
    assert steps >= 4
    failed_with(finished, said, range(3, steps + 1, 3) if every else [], steps)
    assert [record["step"] for record in finished.of_kind("train")] == list(range(1, steps + 1))


@pytest.mark.processes
def test_in_a_rank_it_is_told_once_and_keeps_what_there_is(tmp_path):
    task_args = {"what": "vector"}
    finished = launch(
        tmp_path, mode="rpc", task=bad("Breaks"), task_args=task_args, checkpoint={"every": 3, "background": False}
    )
    message = refusal(finished)
    assert re.match(r"rank \d \(trainer (\d)\): training_step, trainer \1, batch 5: returned a tensor", message)
    assert "Traceback" not in finished.output
    failed_with(finished, "returned a tensor of shape (3,)", [3], 5)


def test_a_validation_batch_of_several_shapes(start):
    finished = start(task=bad("ChangesInValidation"), **EVERY_3)
    assert "these differ: (Tensor 1x6x6, int) and (Tensor 1x6x7, int)" in refusal(finished)
    failed_with(finished, "these differ", [3, 6, 9], 9)


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([{"a": 1, "b": 2.0}, {"a": 1}], r"differ: \{a: int, b: float\} and \{a: int\}; make them alike"),
        ([[1, 2], [1, 2, 3]], r"differ: \(int, int\) and \(int, int, int\)"),
        ([Path("a"), Path("b")], r"samples \(PosixPath\) cannot be stacked into a batch \(.*\); write collate\(self"),
    ],
)
def test_samples_that_cannot_be_stacked_are_told_by_their_shapes(samples, said):
    with pytest.raises(TaskError, match=said):
        Task().collate(samples)


# Checkpoints.


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    """A run with checkpoints of steps 3, 6 and 9."""
    folder = tmp_path_factory.mktemp("trained")
    file = write_config(
        folder, task=bad("Wide"), logging={"run_dir": "runs", "name": "run", "progress": "off"}, **EVERY_3
    )
    path, before = list(sys.path), Path.cwd()
    os.chdir(folder)
    try:
        assert main(["--config", str(file)]) == 0
    finally:
        os.chdir(before)
        sys.path[:] = path
    return folder / "runs" / "run"


@pytest.fixture
def trained(trained_once, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(trained_once, copy)
    return Finished(0, "", copy)


def flip(folder):
    content = bytearray((folder / "model.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "model.pt").write_bytes(content)


def cut(folder):
    content = (folder / "trainer-0.pt").read_bytes()
    (folder / "trainer-0.pt").write_bytes(content[: len(content) // 2])


def of_a_newer_format(folder):
    (folder / "manifest.json").write_text(json.dumps({"format_version": 99}))


DAMAGES = {
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), r"manifest\.json is missing"),
    "cut": (cut, r"trainer-0\.pt has \d+ bytes where its manifest says \d+"),
    "flipped": (flip, r"model\.pt is damaged: its SHA-256 is not the one in the manifest"),
    "newer": (of_a_newer_format, r"was written by a newer version \(format 99; .*\); update paramserver"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_chosen_checkpoint_that_is_not_whole_names_the_newest_good_one_and_how_to_go_on(call, trained, name):
    damage, said = DAMAGES[name]
    chosen, good = (trained.run_dir / "checkpoints" / f"step-0000000{step}" for step in (9, 6))
    damage(chosen)
    before = contents(trained.run_dir)
    message = refusal(call(trained.run_dir, "--resume", chosen))
    assert re.search(said, message)
    command = re.search(r"the newest good one is (\S+); go on from it with (--resume) (\S+)\n", message).groups()
    assert command == (str(good), "--resume", str(good))
    assert contents(trained.run_dir) == before
    assert call(trained.run_dir, *command[1:]).code == 0
    assert trained.summary["steps"] == 9


@pytest.mark.parametrize("name", DAMAGES)
def test_the_newest_checkpoint_that_is_not_whole_is_passed_over_or_refused_but_never_in_silence(call, trained, name):
    """An incomplete one is as if it had not been written; one that is complete but not what it was is a refusal."""
    damage, said = DAMAGES[name]
    damage(trained.run_dir / "checkpoints" / "step-00000009")
    before = contents(trained.run_dir)
    finished = call(trained.run_dir, "--resume", trained.run_dir)
    assert re.search(said, finished.output)
    if name in ("flipped", "newer"):
        assert "--resume" in refusal(finished)
        assert contents(trained.run_dir) == before
    else:
        assert finished.code == 0, finished.output
        assert f"resuming {trained.run_dir} from step-00000006\n  passed over: " in finished.output
    assert contents(trained.run_dir / "checkpoints" / "step-00000003")


def test_a_run_goes_on_from_the_checkpoint_that_is_chosen(call, trained):
    whole = trained.load("model")
    finished = call(trained.run_dir, "--resume", trained.run_dir / "checkpoints" / "step-00000003")
    assert finished.code == 0, finished.output
    assert "resuming" in finished.output
    assert "from step-00000003" in finished.output
    assert [record["step"] for record in finished.of_kind("train")] == list(range(1, 10))
    superseded = (trained.run_dir / "metrics.superseded.jsonl").read_text().splitlines()
    assert {step for line in superseded if (step := json.loads(line)["step"]) <= 3} == set()
    assert [r["step"] for r in map(json.loads, superseded) if r["kind"] == "train"] == list(range(4, 10))
    assert same_bits(trained.load("model", 9), whole) == []
    assert finished.checkpoints == trained.checkpoints


def test_no_checkpoint_at_all(call, trained):
    shutil.rmtree(trained.run_dir / "checkpoints")
    before = contents(trained.run_dir)
    for given in (trained.run_dir, trained.run_dir / "checkpoints" / "step-00000003"):
        message = refusal(call(trained.run_dir, "--resume", given))
        assert "checkpoint" in message
        assert contents(trained.run_dir) == before


CHANGED = {
    "shape": (["task_args={width: 9}"], r"1\.weight has shape \(8, 36\) there and \(9, 36\) here; .*; use"),
    "names": (
        ["task_args={extra: true}"],
        r"3\.weight is missing there; 3\.bias is missing there; use the task and the",
    ),
    "optimizer": (
        ["task_args={optimizer: adam}"],
        r"not one of this Adam \(.*groups lack amsgrad, betas.*\); resume with",
    ),
    "groups": (
        ["task_args={groups: true}"],
        r"not one of this SGD \(ValueError: loaded state dict has a different number",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("step", [None, 3])
def test_a_checkpoint_of_something_else_leaves_the_run_as_it_was(call, trained, name, step):
    """Also its config: the next --resume without the change works."""
    changes, said = CHANGED[name]
    kept = ("config.yaml", "environment.json", "summary.json")
    before = contents(trained.run_dir)
    given = trained.run_dir if step is None else trained.run_dir / "checkpoints" / f"step-{step:08d}"
    finished = call(trained.run_dir, "--resume", given, *(word for c in changes for word in ("--set", c)))
    assert re.search(said, refusal(finished)), finished.output
    after = contents(trained.run_dir)
    assert {n: after[Path(n)] for n in kept} == {n: before[Path(n)] for n in kept}
    assert contents(trained.run_dir / "checkpoints") == {
        path.relative_to("checkpoints"): content for path, content in before.items() if path.parts[0] == "checkpoints"
    }
    assert call(trained.run_dir, "--resume", trained.run_dir, "--set", "training.max_steps=10").code == 0
    assert trained.summary["steps"] == 10


def test_weights_to_start_from_that_are_none(start, trained, tmp_path):
    other = tmp_path / "weights.pt"
    for content, said in (([1, 2], "holds list, and must hold a state_dict"), ({"a": 1}, "holds another model")):
        torch.save(content, other)
        finished = start(init_from=str(other))
        assert f"{other} {said}" in refusal(finished)
        assert not finished.run_dir.exists()


def test_the_files_of_a_run_that_cannot_be_read(call, trained):
    (trained.run_dir / "environment.json").write_text("{")
    assert call(trained.run_dir, "--resume", trained.run_dir).code == 0
    config = trained.run_dir / "config.yaml"
    config.write_text(config.read_text() + "cluster: [\n")
    lines = len(config.read_text().splitlines())
    before = contents(trained.run_dir)
    message = refusal(call(trained.run_dir, "--resume", trained.run_dir))
    assert re.match(rf"{config}:{lines + 1}: not valid YAML", message), message
    assert contents(trained.run_dir) == before


def test_a_run_that_another_process_holds_is_not_touched(call, trained):
    before = contents(trained.run_dir)
    with RunDir(trained.run_dir).lock():
        message = refusal(call(trained.run_dir, "--resume", trained.run_dir / "checkpoints" / "step-00000003"))
    assert f"is in use by another run (process {os.getpid()} on host {socket.gethostname()}); stop that one" in message
    assert contents(trained.run_dir) == before


# The disk.


@contextmanager
def largest_file(size_bytes):
    """The disk takes no more than this of one file."""
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
    """A folder of a user whom the kernel refuses things; the superuser becomes nobody meanwhile."""
    nobody = 65534
    folder = Path(tempfile.mkdtemp())
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.chown(folder, nobody, nobody)
            os.seteuid(nobody)
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        shutil.rmtree(folder)


def test_a_checkpoint_that_is_refused_by_the_disk_keeps_those_before(start, call):
    """Each checkpoint is 64 KiB larger than the one before; the third one is too large for the disk."""
    with largest_file(3 * 2**16):
        finished = start(task=bad("Grows"), training={"max_steps": 30}, checkpoint={"every": 3, "background": False})
    message = refusal(finished, code=1)
    assert re.match(
        r"checkpoint \S*step-00000009\S*/trainer-0\.pt could not be written \(.*File too large.*\)", message
    )
    assert "raise the limit of file sizes (ulimit -f), then --resume" in message
    assert finished.summary["status"] == "failed"
    assert finished.checkpoints == ["step-00000003", "step-00000006"]
    assert finished.summary["checkpoint"] == "step-00000006"
    assert temporaries(finished.run_dir) == []
    assert call(finished.run_dir, "--resume", finished.run_dir).code == 0
    assert finished.summary["steps"] == 30


@pytest.mark.processes
def test_a_disk_that_takes_nothing_more_does_not_hide_the_first_error(tmp_path, call):
    """Records, checkpoint, log and summary are all refused; the last thing said is what was refused first."""
    finished = launch(tmp_path, task=bad("Breaks"), task_args={"what": "refuse_writes"}, **EVERY_3)
    message = refusal(finished, code=1)
    assert re.match(r"metrics file \S*/metrics\.jsonl must be writable \(.*File too large.*\); free space", message)
    assert finished.checkpoints == ["step-00000003"]
    assert temporaries(finished.run_dir) == []
    resumed = call(finished.run_dir, "--resume", finished.run_dir, "--set", "task_args={what: nan, at: 99}")
    assert resumed.code == 0, resumed.output
    assert [record["step"] for record in finished.of_kind("train")] == list(range(1, 10))


def test_folders_that_may_not_be_written_to(start, call):
    with ordinary_user() as folder:
        (folder / "read-only").mkdir(0o500)
        message = refusal(start("--set", f"logging.run_dir={folder}/read-only/runs", folder=folder))
        assert (
            f"logging.run_dir ({folder}/read-only/runs) must be a folder that this user can write to (Perm" in message
        )
        assert start(folder=folder, **EVERY_3).code == 0
        run = Finished(0, "", folder / "runs" / "run")
        longer = ("--resume", run.run_dir, "--set", "training.max_steps=12")
        before = contents(run.run_dir)
        with read_only(run.run_dir):
            message = refusal(call(run.run_dir, *longer))
        assert f"run folder {run.run_dir} must be a folder that this user can write to (Permission denied)" in message
        assert contents(run.run_dir) == before
        with read_only(run.run_dir / "checkpoints"):
            message = refusal(call(run.run_dir, *longer), code=1)
        assert "step-00000012 could not be written (" in message
        assert "give this user the right to write there" in message
        failed_with(run, "could not be written", [3, 6, 9], 12)
        assert call(run.run_dir, "--resume", run.run_dir).code == 0
        assert run.checkpoints[-1] == "step-00000012"

"""Files that a run reads back and finds damaged, foreign or refused by the disk: one sentence with what to do."""

import errno
import json
import os
import pickle
import re
import resource
import shlex
import shutil
import subprocess
from collections import deque
from contextlib import contextmanager, nullcontext
from hashlib import sha256

import pytest
import torch
from cli_errors import EVERY_3, error_message, file_contents, invalid_task
from launching import command, environment, launch, write_config
from tasks import ReferenceTask

import paramserver
from paramserver.checkpoint.format import _manifest_digest
from paramserver.errors import StorageError, UnsupportedConfiguration
from paramserver.fileio import DISK_CURES, explain_disk_errors
from paramserver.online.coordinator import CoordinatorJournal
from paramserver.runtime.supervisor import describe_error

# losses.json and other JSON.


@pytest.mark.claim("empty-losses")
@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"", "it is empty"),
        (b"{", "Expecting property name"),
        (b"[1]", "no mapping"),
        (b'{"view": "three"}', "view"),
        (b'{"faults": 3}', "faults"),
        (b"\xff\xfe", "codec can't decode"),
        (b"[" * 100_000, "recursion"),
    ],
)
@pytest.mark.parametrize("mode", ["local", "rpc"])
def test_losses_that_are_damaged(run_dir, call, content, shown, mode):
    """Refused before any rank is started, so it is no error of one."""
    losses = run_dir / "losses.json"
    losses.write_bytes(content)
    before = file_contents(run_dir)
    message = error_message(call(run_dir, "--resume", run_dir, "--mode", mode, "--set", "training.max_steps=6"))
    assert message.startswith(f"{losses} must be what the run wrote there (")
    assert shown in message
    assert "remove it: the run resumes without, and counts its losses from 0" in message
    assert file_contents(run_dir) == before
    losses.unlink()
    if mode == "local":
        assert call(run_dir, "--resume", run_dir, "--set", "training.max_steps=6").code == 0


@pytest.mark.claim("empty-losses")
@pytest.mark.parametrize("content", [b"", b"a: [", b"\xff\xfe"])
def test_a_stored_config_that_is_damaged_is_refused_from_python_too(run_dir, content):
    (run_dir / "config.yaml").write_bytes(content)
    with pytest.raises(UnsupportedConfiguration, match=f"^{run_dir}/config.yaml"):
        paramserver.run(ReferenceTask, {"training": {"max_steps": 6}}, resume=run_dir)


@pytest.mark.claim("empty-losses")
@pytest.mark.parametrize("line", ["", "{", "[1]", '{"kind": "NONE"}', '{"kind": "BYE", "x": 1}'])
def test_a_journal_of_the_coordinator_that_is_damaged(tmp_path, line):
    file = tmp_path / "coordinator.jsonl"
    file.write_text(f'{{"port": 5555}}\n{line}\n')
    with pytest.raises(paramserver.TrainingError, match=rf"^{file}, line 2, must be what the coordinator wrote there"):
        CoordinatorJournal(file, continues=True)


# Pickles.


class Foreign:
    """A class that no checkpoint may hold."""


def write_foreign(file, kind):
    if kind == "pickle":
        file.write_bytes(pickle.dumps({"weights": deque([1.0])}))
    elif kind == "old pickle":
        file.write_bytes(pickle.dumps({"weights": Foreign()}, protocol=2))
    elif kind == "module":
        torch.save(torch.nn.Linear(2, 2), file)
    elif kind == "text":
        file.write_text("hello, this is no pickle")
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "zip":
        torch.save({"weight": torch.ones(2)}, file)
        file.write_bytes(file.read_bytes()[:-40])
    elif kind == "list":
        torch.save([1, 2], file)


KINDS = {
    "pickle": "it is a pickle with what no torch.save writes, and only tensors and plain values are loaded",
    "old pickle": "Foreign, and only tensors and plain values are loaded",
    "module": r"it is a pickle with torch\.nn\.modules\.linear\.Linear, and only tensors and plain values are loaded",
    "text": "it is no file of torch.save",
    "empty": "it is empty, or ends too early",
    "zip": "it is no file of torch.save|ends too early",
    "list": "must hold a dictionary, and holds list; another program wrote it",
}
NO_ARCHIVES = [kind for kind in KINDS if kind != "list"]


@pytest.mark.claim("foreign-pickle")
@pytest.mark.parametrize("kind", NO_ARCHIVES)
def test_weights_of_another_program(start, tmp_path, kind, recwarn):
    file = tmp_path / "other.pt"
    write_foreign(file, kind)
    message = error_message(start("--set", f"init_from={file}", mode="local"))
    assert message.startswith(f"init_from ({file}): ")
    assert re.search(KINDS[kind], message), message
    assert "give a run, the model.pt of a checkpoint, or what torch.save(model.state_dict(), ...) wrote" in message
    assert [warning for warning in recwarn if "pickle" in str(warning.message)] == []


@pytest.mark.claim("foreign-pickle")
def test_weights_among_other_things_are_named_by_their_entry(start, tmp_path):
    file = tmp_path / "other.ckpt"
    torch.save({"epoch": 3, "state_dict": {"weight": torch.ones(2)}}, file)
    message = error_message(start("--set", f"init_from={file}", mode="local"))
    assert (
        "holds the weights under 'state_dict', together with other things; store that entry in a file of its own"
        in message
    )


@pytest.mark.claim("foreign-pickle")
@pytest.mark.parametrize("name", ["model", "optimizer", "run", "trainer-0"])
@pytest.mark.parametrize("kind", ["pickle", "module", "text", "list"])
def test_a_checkpoint_with_a_file_of_another_program(run_dir, call, name, kind):
    """Even where the manifest fits that file."""
    folder = run_dir / "checkpoints" / "step-00000004"
    file = folder / f"{name}.pt"
    write_foreign(file, kind)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["manifest_sha256"]
    content = file.read_bytes()
    manifest["files"][file.name] = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    manifest["manifest_sha256"] = _manifest_digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    message = error_message(call(run_dir, "--resume", run_dir, "--set", "training.max_steps=6"))
    assert str(file) in message or (name == "trainer-0" and "a trainer's part of a checkpoint" in message)
    assert re.search(KINDS[kind], message), message


# Disks.


@pytest.mark.claim("immutable-run-folder")
@pytest.mark.parametrize("number", [errno.EPERM, errno.ESTALE, errno.ENOSPC, errno.EIO, errno.ENOTCONN, errno.EROFS])
def test_an_error_of_the_disk_does_not_hide_the_first_one(tmp_path, number):
    assert number in DISK_CURES
    refusal = OSError(number, os.strerror(number))

    def fail(explain):
        try:
            raise ValueError("the first error")
        finally:
            with explain:
                raise refusal

    for explain in (nullcontext(), explain_disk_errors(tmp_path / "file")):
        with pytest.raises((OSError, StorageError)) as caught:
            fail(explain)
        assert describe_error(caught.value)["message"] == "ValueError: the first error"


@contextmanager
def immutable(folder):
    if subprocess.run(["chattr", "+i", folder], capture_output=True, check=False).returncode:
        pytest.skip("no right to make a folder immutable here")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-R", "-i", folder], check=True)


@pytest.mark.claim("immutable-run-folder")
@pytest.mark.parametrize("what", ["run", "checkpoints"])
def test_a_folder_that_becomes_immutable(start, tmp_path, what):
    run_dir = tmp_path / "runs" / "run"
    folder = run_dir if what == "run" else run_dir / what
    folder.mkdir(parents=True)
    with immutable(folder):  # whether that is possible here
        pass
    shutil.rmtree(run_dir)
    arguments = {"what": "make_immutable", "run_dir": str(folder), "mark": str(tmp_path / "mark")}
    try:
        finished = start(task=invalid_task("ChangesRunFolder"), task_args=arguments, **{**EVERY_3, "mode": "local"})
    finally:
        subprocess.run(["chattr", "-R", "-i", run_dir], check=True)
    message = error_message(finished, code=1)
    assert "Operation not permitted" in message
    assert "give this user the right to write there (also: lsattr shows an i)" in message
    assert "Traceback" not in finished.output
    assert ".reserved" not in message


@pytest.mark.claim("immutable-run-folder")
@pytest.mark.parametrize(
    "name",
    [".", "losses.json", "metrics.jsonl", "config.yaml", "summary.json", "environment.json", "checkpoints", "logs"],
)
def test_what_became_immutable_since_is_named_before_a_resume(run_dir, call, name):
    with immutable(run_dir / name):
        message = error_message(call(run_dir, "--resume", run_dir, "--set", "training.max_steps=6"))
    assert str(run_dir / name) in message
    assert re.search("must be a folder that this user can write to|must be what this user can read and write", message)


@pytest.mark.claim("immutable-run-folder")
@pytest.mark.processes
def test_a_folder_that_becomes_immutable_under_its_ranks(tmp_path):
    run_dir = tmp_path / "runs" / "run"
    run_dir.mkdir(parents=True)
    with immutable(run_dir):
        pass
    shutil.rmtree(run_dir)
    arguments = {"what": "make_immutable", "run_dir": str(run_dir), "mark": str(tmp_path / "mark")}
    try:
        finished = launch(
            tmp_path,
            task=invalid_task("ChangesRunFolder"),
            task_args=arguments,
            **{**EVERY_3, "mode": "rpc", "cluster": {"num_trainers": 1}},
        )
    finally:
        subprocess.run(["chattr", "-R", "-i", run_dir], check=True)
    message = error_message(finished, code=1)
    assert message.startswith("rank 0 (server 0): ")
    assert "Operation not permitted" in message
    assert "Traceback" not in finished.output


@pytest.mark.claim("full-disk")
@pytest.mark.parametrize("what", ["checkpoint", "records"])
def test_a_disk_that_is_full_before_the_first_checkpoint(start, tmp_path, what):
    """There is nothing to resume from, so that is not the advice."""
    most = 30_000 if what == "checkpoint" else 2_000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        finished = start(
            task=invalid_task("Grows"),
            training={"max_steps": 60, "validate_every": 0},
            checkpoint={"every": 40},
            mode="local",
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    message = error_message(finished, code=1)
    assert "File too large" in message
    assert "--resume" not in message
    assert "then start it again under another logging.name, as it has no checkpoint to resume from" in message


# Descriptors.


@pytest.mark.claim("few-descriptors")
@pytest.mark.processes
@pytest.mark.parametrize(("mode", "left"), [("ddp", 20), ("rpc", 20), ("rpc", 30), ("rpc", 45)])
def test_a_run_with_few_descriptors_says_so(tmp_path, mode, left):
    """Wherever they end: in Python, in an import, or in TensorPipe."""
    config = write_config(tmp_path, mode=mode, cluster={"num_trainers": 2, "timeout_s": 20})
    words = shlex.join(command("--config", config, "--set", "logging.name=run"))
    run = ["bash", "-c", f"ulimit -n {left}; exec {words}"]
    options = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    finished = subprocess.run(run, env=environment(), cwd=tmp_path, **options)
    output = finished.stdout + finished.stderr
    assert finished.returncode == 1, output
    message = output.rpartition("error: ")[2]
    expected = rf"this process may have {left} files and sockets open, and needs more \(.*\); raise the limit, for"
    assert re.search(expected, message), message
    assert "Traceback" not in message

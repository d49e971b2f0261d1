"""A writer that is killed at any moment leaves the checkpoint before, or the new one, whole.

This file is also the program that is killed: ``python test_checkpoint_crash.py WHAT FOLDER`` prints JSON.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from paramserver.checkpoint import find_checkpoint, read_checkpoint, remove_leftovers
from paramserver.checkpoint.format import MANIFEST
from paramserver.checkpoint.save import apply_retention, mark_best, write_checkpoint
from paramserver.errors import TrainingError
from paramserver.fileio import HashingFile, atomic_write_text

REPOSITORY = Path(__file__).parents[2]
DOOMED_CALLS = ("fsync", "replace", "mkdir", "unlink", "rmdir")
MOST_POINTS = 400


def state(kind, step, generation):
    if kind == "bytes":
        return {"a": b"%d %d" % (step, generation) * 50, "b": b"%d" % generation}
    import torch

    return {"a": {"weight": torch.full((64,), float(step)), "generation": generation}, "b": {"generation": generation}}


def generation_in(checkpoint, kind):
    if kind == "bytes":
        return int(checkpoint.read_bytes("b"))
    assert checkpoint.load("a")["generation"] == checkpoint.load("b")["generation"]
    return checkpoint.load("b")["generation"]


def die_at(point):
    """Let the ``point``-th change of the disk be the last thing that this process (half) does."""
    count = 0

    def reached():
        nonlocal count
        count += 1
        return count == point

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def doomed(call):
        def wrapper(*args, **kwargs):
            if reached():
                die()
            return call(*args, **kwargs)

        return wrapper

    for name in DOOMED_CALLS:
        setattr(os, name, doomed(getattr(os, name)))
    write = HashingFile.write

    def half_write(self, data):
        if reached():
            write(self, bytes(data)[: len(data) // 2])
            self._file.flush()
            die()
        return write(self, data)

    HashingFile.write = half_write


def in_a_fork(action):
    """Run ``action`` in a child; True if it lived to the end."""
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.waitstatus_to_exitcode(status) == 0
    return True


def save(folder, kind, step, generation):
    """What the writer does at every checkpoint."""
    write_checkpoint(folder, step, state(kind, step, generation), {})
    mark_best(folder, step)
    apply_retention(folder, 2)


def check(folder, kind, doomed_step, newest_before):
    """Assert what must hold after a crash; return (step, generation) of the checkpoint that was found."""
    checkpoint = read_checkpoint(find_checkpoint(folder.parent))
    found = checkpoint.step, generation_in(checkpoint, kind)
    assert found in (newest_before, (doomed_step, 2), (10, 1)), found
    latest = folder / (folder / "latest").read_text().strip()
    assert read_checkpoint(latest), "latest must name a whole checkpoint"
    remove_leftovers(folder)
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert read_checkpoint(find_checkpoint(folder.parent)).step == checkpoint.step
    for path in folder.glob("step-*"):
        read_checkpoint(path)
    save(folder, kind, 40, 3)
    assert read_checkpoint(find_checkpoint(folder.parent)).step == 40
    return found


def crash_everywhere(base, kind, doomed_step):
    found = Counter()
    os.fsync = os.fstat  # a killed process leaves what it has written; the calls are points as before
    for point in range(1, MOST_POINTS):
        folder = base / f"{kind}-{doomed_step}-{point}" / "checkpoints"
        folder.parent.mkdir()
        save(folder, kind, 10, 1)
        save(folder, kind, 20, 1)

        def doomed(folder=folder, point=point):
            die_at(point)
            save(folder, kind, doomed_step, 2)

        lived = in_a_fork(doomed)
        found[str(check(folder, kind, doomed_step, (20, 1)))] += 1
        if lived:
            assert found.total() == point
            return {"points": point - 1, "found": found}
    raise AssertionError("the fault never stopped firing")


def stage_of(folder):
    """How far a killed writer of step 20 had come, from what lies there."""
    if (folder / "step-00000020").exists():
        return "in place" if (folder / "latest").read_text() == "step-00000010\n" else "latest"
    unfinished = list(folder.glob(".step-00000020.*.tmp"))
    names = [path.name for path in unfinished[0].iterdir()] if unfinished else []
    return "manifest" if MANIFEST in names else f"{len(names)} files"


def killed_at_random_moments(base, seed, kills=50):
    """Kill a process whose writer's thread is at work, at moments drawn evenly from the time that a write takes."""
    import torch

    from paramserver.checkpoint import CheckpointWriter, ChunkedFile

    folder = base / "checkpoints"
    chunks = ChunkedFile()
    chunks.append(torch.arange(2**19, dtype=torch.uint8).numpy())
    objects = {"trainer-1.pt": chunks, **{name: {"w": torch.rand(2**18)} for name in ("model", "optimizer", "run")}}
    write_checkpoint(folder, 10, objects, {})

    def doomed(begin):
        writing = CheckpointWriter(folder, keep=2, background=True)
        os.write(begin, b".")
        writing.submit(20, objects, {})
        writing.close(60)

    def attempt(after_s):
        """Whether the kill came in time, and how long the process lived."""
        ready, begin = os.pipe()
        pid = os.fork()
        if pid == 0:
            doomed(begin)
            os._exit(0)
        os.read(ready, 1)
        started = time.monotonic()
        if after_s is not None:
            time.sleep(after_s)  # the random moment
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(ready)
        os.close(begin)
        return os.WIFSIGNALED(status), time.monotonic() - started

    def whole():
        """The newest checkpoint's step; everything in it, and in the one before, is as it was written."""
        newest = read_checkpoint(find_checkpoint(folder.parent))
        assert read_checkpoint(folder / "step-00000010").read_bytes("trainer-1.pt") == chunks_bytes
        for name in ("model", "optimizer", "run"):
            assert torch.equal(newest.load(name)["w"], objects[name]["w"])
        return newest.step

    def reset():
        remove_leftovers(folder)
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
        shutil.rmtree(folder / "step-00000020", ignore_errors=True)
        atomic_write_text(folder / "latest", "step-00000010\n")

    chunks_bytes = b"".join(chunks)
    full_s = []
    for _ in range(3):
        full_s.append(attempt(None)[1])
        assert whole() == 20
        reset()
    generator = random.Random(seed)
    stages, found = Counter(), Counter()
    for tried in range(4 * kills):
        if stages.total() == kills:
            break
        share = (tried % kills + generator.random()) / kills
        if attempt(share * sorted(full_s)[1])[0]:
            stages[stage_of(folder)] += 1
            found[whole()] += 1
        reset()
    return {"stages": stages, "found": found}


def refused_by_a_file_limit(base):
    """A disk that takes 64 KiB per file and no more."""
    import torch

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    folder = base / "checkpoints"
    write_checkpoint(folder, 1, {"small": b"x"}, {})
    messages = []
    for name, obj in (("bytes", bytes(1 << 18)), ("tensor", {"weight": torch.zeros(1 << 16)})):
        try:
            write_checkpoint(folder, 2, {"small": b"y", name: obj}, {})
        except TrainingError as error:
            messages.append(str(error))
    return {"messages": messages, "left": sorted(path.name for path in folder.iterdir())}


def main(what, base):
    base = Path(base)
    if what == "limit":
        return refused_by_a_file_limit(base)
    if what.startswith("random-"):
        return killed_at_random_moments(base, int(what.removeprefix("random-")))
    crashes = {one: one.split("-") for one in what.split(",")}
    return {one: crash_everywhere(base, kind, int(doomed_step)) for one, (kind, doomed_step) in crashes.items()}


def run(what, folder):
    command = [sys.executable, str(Path(__file__)), what, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


FEWEST_POINTS = {"bytes-30": 25, "bytes-20": 30, "tensors-30": 60}


@pytest.fixture(scope="module")
def crashes(tmp_path_factory):
    """Of one interpreter: it forks for each crash."""
    return run(",".join(FEWEST_POINTS), tmp_path_factory.mktemp("crashes"))


@pytest.mark.parametrize(("what", "fewest_points"), FEWEST_POINTS.items(), ids=["next", "again", "tensors"])
def test_killed_at_every_change_of_the_disk(crashes, what, fewest_points):
    outcome = crashes[what]
    assert outcome["points"] >= fewest_points
    before, after = "(20, 1)", f"({what.split('-')[1]}, 2)"
    assert outcome["found"][before] > 5
    assert outcome["found"][after] > 3
    # Only where 20 is written once more: from the moment it makes way until latest names its successor.
    assert ("(10, 1)" in outcome["found"]) == (what == "bytes-20")


@pytest.mark.nightly
def test_killed_at_random_moments_of_a_background_write(tmp_path):
    outcome = run("random-7", tmp_path)
    assert sum(outcome["stages"].values()) == sum(outcome["found"].values()) == 50
    assert len(outcome["stages"]) >= 4, outcome
    assert max(outcome["stages"].values()) <= 40, outcome
    assert outcome["found"]["10"] >= 10


def test_a_full_disk_is_reported_and_leaves_nothing_behind(tmp_path):
    outcome = run("limit", tmp_path)
    assert len(outcome["messages"]) == 2
    for message, name in zip(outcome["messages"], ("bytes", "tensor.pt"), strict=True):
        assert f"/{name} could not be written ([Errno 27] File too large); raise the limit" in message
    assert outcome["left"] == ["latest", "step-00000001"]


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

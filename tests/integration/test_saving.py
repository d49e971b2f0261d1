"""Saving costs one copy, of one moment; everything else happens while training continues."""

import io
import json
import logging
import signal
import threading
import time
import weakref

import numpy as np
import psutil
import pytest
import torch
from launching import TASKS, differing_tensors, launch, train
from tasks import ReferenceTask

import paramserver
from paramserver.checkpoint import ChunkedFile, StagingPool, read_checkpoint, stage_copy, write_chunks, writer
from paramserver.checkpoint.save import write_checkpoint
from paramserver.checkpoint.serialization import CHUNK_BYTES
from paramserver.checkpoint.writer import BackgroundSender
from paramserver.errors import DeadlineExceeded, ParamserverError, TrainingError
from paramserver.runs.checkpoint_manager import PartCollector, StagedCheckpoint

WAIT_S = 20.0
CARRIERS = TASKS.with_name("faulty_senders.py")
MB = 2**20


# Sending in the background.


def no_progress():
    return 0.0


def test_a_sender_works_in_its_own_thread_one_job_at_a_time():
    gate, done = threading.Event(), []
    with BackgroundSender(True, no_progress) as sender:
        sender.submit(lambda: (gate.wait(WAIT_S), done.append(threading.current_thread().name)))
        assert done == []
        with pytest.raises(DeadlineExceeded, match=r"a part of a checkpoint must be with rank 0 within 0.01 s"):
            sender.submit(lambda: done.append("too early"), 0.01)
        gate.set()
        sender.submit(lambda: done.append("second"), WAIT_S)
        sender.wait(WAIT_S)
        assert done == ["checkpoint-sender", "second"]
    assert "checkpoint-sender" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ParamserverError, match="it is closed"):
        sender.submit(lambda: None)


def test_without_background_the_caller_carries():
    done = []
    with BackgroundSender(False, no_progress) as sender:
        sender.submit(lambda: done.append(threading.current_thread()))
        assert done == [threading.main_thread()]
        with pytest.raises(KeyError):
            sender.submit(lambda: {}["missing"])


def test_a_sender_releases_what_it_sent():
    class Load:
        pass

    load, gone = Load(), threading.Event()
    with BackgroundSender(True, no_progress) as sender:
        weakref.finalize(load, gone.set)
        sender.submit(lambda kept=load: None)
        del load
        assert gone.wait(WAIT_S)


def test_progress_extends_the_deadline_and_no_progress_does_not():
    gate, progress = threading.Event(), [0.0]
    with BackgroundSender(True, lambda: progress[0]) as sender:
        sender.submit(lambda: gate.wait(WAIT_S))
        began = progress[0] = time.monotonic() + 0.5
        with pytest.raises(DeadlineExceeded, match=r"a part of a checkpoint must be with rank 0 within 0.1 s"):
            sender.wait(0.1)
        assert time.monotonic() >= began + 0.1
        progress[0] += WAIT_S
        with pytest.raises(DeadlineExceeded):
            sender.close(0.1)  # who closes has failed already, and waits a moment only
        assert time.monotonic() < progress[0]
        gate.set()


def test_an_interrupted_wait_leaves_the_job_in_progress():
    class InterruptionError(Exception):
        pass

    def interrupt(number, frame):
        raise InterruptionError

    def last_progress():
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return 0.0

    before = signal.signal(signal.SIGALRM, interrupt)
    gate = threading.Event()
    try:
        with BackgroundSender(True, last_progress) as sender:
            sender.submit(lambda: gate.wait(WAIT_S))
            with pytest.raises(InterruptionError):
                sender.wait(WAIT_S)
            with pytest.raises(DeadlineExceeded):
                sender.close(0.1)
            gate.set()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_thread_that_cannot_be_started_leaves_no_job_in_progress(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    with BackgroundSender(True, lambda: 0.0) as sender:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                sender.submit(lambda: None)
        sender.wait(0.1)
        done = threading.Event()
        sender.submit(done.set)
        sender.wait(WAIT_S)
        assert done.is_set()


@pytest.mark.parametrize("then", ["wait", "submit", "close"])
def test_the_next_call_raises_the_failure_of_a_job(then, caplog):
    calls = {
        "wait": lambda c: c.wait(WAIT_S),
        "submit": lambda c: c.submit(lambda: None),
        "close": lambda c: c.close(WAIT_S),
    }
    with caplog.at_level(logging.WARNING), BackgroundSender(True, no_progress) as sender:
        sender.submit(lambda: {}["missing"])
        with pytest.raises(KeyError, match="missing"):
            calls[then](sender)
    assert "a part of a checkpoint did not arrive: 'missing'" in caplog.text


# Pieces.


def state_of(megabytes):
    return {"w": torch.rand(megabytes * MB // 4), "n": torch.arange(5), "name": "x", "empty": torch.empty(0)}


def test_an_archive_in_chunks_is_the_file_that_torch_saves(tmp_path):
    state, chunks, lengths = state_of(20), ChunkedFile(), []

    def send(chunk):
        lengths.append(len(chunk))
        chunks.append(chunk.copy())

    write_chunks(state, send)
    file = io.BytesIO()
    torch.save(state, file)
    assert b"".join(chunks) == file.getvalue()
    assert lengths[:-1] == [CHUNK_BYTES] * 2
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, 1, {"trainer-0.pt": chunks, "same": state}, {}))
    assert (
        differing_tensors(checkpoint.load("trainer-0"), state)
        == differing_tensors(checkpoint.load("same"), state)
        == []
    )


def test_the_first_failure_to_send_is_the_one_that_is_raised():
    sent = []

    def send(chunk):
        sent.append(len(chunk))
        raise ConnectionError(f"chunk {len(sent)}")

    with pytest.raises(ConnectionError, match="chunk 1"):
        write_chunks(state_of(20), send)
    assert len(sent) == 1


class FakeManager:
    """In the place of the checkpoint manager."""

    def __init__(self):
        self.written = []

    def commit(self, staged, parts, pause_s):
        self.written.append((staged.step, {i: b"".join(p) for i, p in parts.items()}, pause_s))


def staged_of(step):
    return StagedCheckpoint(step, {}, False, "periodic", 0.0)


def chunk_of(text):
    return torch.tensor(list(text), dtype=torch.uint8)


def test_a_checkpoint_is_complete_with_the_parts_of_all_trainers_of_its_step():
    manager = FakeManager()
    collector = PartCollector(manager)
    collector.start(staged_of(3), taking_part={0, 1}, substitutes={})
    for trainer, text in ((1, b"b"), (0, b"a"), (1, b"B")):
        collector.add_chunk(trainer, 3, chunk_of(text))
    collector.finish_part(1, 3, 0.5)
    collector.commit_if_complete()
    assert manager.written == []
    for wrong in (lambda: collector.add_chunk(0, 4, chunk_of(b"x")), lambda: collector.finish_part(1, 3, 0.1)):
        with pytest.raises(TrainingError, match="must follow the staging of that step"):
            wrong()
    collector.finish_part(0, 3, 0.25)
    collector.commit_if_complete()
    assert manager.written == [(3, {0: b"a", 1: b"bB"}, 0.5)]
    collector.start(staged_of(6), taking_part={0, 1}, substitutes={})
    collector.finish_part(0, 6, 0.1)
    collector.commit_if_complete()
    assert len(manager.written) == 1


# Memory.


class CountedPool(StagingPool):
    """Counts the bytes that are lent or kept."""

    size_bytes = 0

    def _map(self, size_bytes):
        self.size_bytes += size_bytes
        return super()._map(size_bytes)

    def _discard(self, memory):
        self.size_bytes -= len(memory)
        super()._discard(memory)


def test_memory_is_reused_once_nothing_refers_to_it():
    memory = CountedPool()
    source = torch.rand(2 * MB)
    first = stage_copy({"w": source}, memory)
    place, view = first["w"].data_ptr(), first["w"].view(2, -1)[1]
    second = stage_copy([source[: MB + 7]], memory)
    assert place <= first["w"].data_ptr() < second[0].data_ptr() or second[0].data_ptr() < place
    del first
    third = stage_copy(source, memory)
    assert third.data_ptr() != place  # a view of it is alive
    assert torch.equal(view, source[MB:])
    del view
    fourth = stage_copy(source[: MB + 1], memory)
    assert fourth.data_ptr() == place
    assert fourth.untyped_storage().nbytes() == 4 * (MB + 1)  # what is saved is what was copied
    assert torch.equal(fourth, source[: MB + 1])
    before = memory.size_bytes
    memory.trim()
    assert memory.size_bytes == before
    del second, third, fourth
    memory.trim()
    assert memory.size_bytes == 0


def test_memory_is_not_wasted_on_small_copies():
    memory = CountedPool()
    large = memory.acquire(8 * MB)
    place = large.ctypes.data
    del large
    small = memory.acquire(3 * MB)
    assert small.ctypes.data != place
    assert memory.acquire(8 * MB).ctypes.data == place
    assert memory.acquire(100).nbytes == 100
    assert memory.size_bytes == 11 * MB


def test_a_private_copy_holds_sets_and_bytearrays_of_its_own():
    state = {"seen": {1, 2}, "raw": bytearray(b"ab"), "array": np.zeros(2)}
    copied = stage_copy(state)
    state["seen"].add(3)
    state["raw"][0] = 0
    assert copied["seen"] == {1, 2}
    assert copied["raw"] == b"ab"


# A run: what is written late is what was staged.


class Changing(ReferenceTask):
    """All that a checkpoint holds changes with every batch: weights, buffer, random numbers, the task's own state."""

    gate = threading.Event()
    writing = threading.Event()  # the first checkpoint is no longer one that a newer one replaces

    def __init__(self):
        super().__init__(optimizer="adam")
        self.own, self.seen = torch.zeros(300_000), set()

    def train_source(self, partition):
        data = self._data(64, 1)
        return (data[i] for i in range(64))

    def on_batch_start(self, batch_idx):
        self.own += 1
        self.seen.add(batch_idx)
        if batch_idx == 7:
            assert self.writing.wait(WAIT_S)
        if batch_idx == 8:
            self.gate.set()

    def on_checkpoint(self, state):
        state.update(own=self.own, seen=self.seen)


def changing_run(folder, background):
    config = {
        "mode": "local",
        "training": {"max_steps": 10, "batch_size": 8, "validate_every": 0},
        "buffer": {"kind": "firo", "capacity": 64, "watermark": 64, "pseudo_epochs": 4},
        "checkpoint": {"every": 4, "background": background, "keep": 9},
        "logging": {"run_dir": str(folder), "name": str(background), "tensorboard": False, "progress": "off"},
    }
    Changing.gate.clear()
    Changing.writing.clear()
    paramserver.run(Changing(), config)
    return read_checkpoint(folder / str(background) / "checkpoints" / "step-00000004")


def test_what_is_written_later_is_what_was_staged(tmp_path, monkeypatch):
    write = writer.write_checkpoint

    def write_at_once(*arguments):
        Changing.writing.set()
        return write(*arguments)

    def write_late(folder, step, objects, about):
        Changing.writing.set()
        assert Changing.gate.wait(WAIT_S), "training must continue while a checkpoint waits to be written"
        return write(folder, step, objects, about)

    monkeypatch.setattr(writer, "write_checkpoint", write_at_once)
    at_once = changing_run(tmp_path, background=False)
    monkeypatch.setattr(writer, "write_checkpoint", write_late)
    later = changing_run(tmp_path, background=True)
    for name in ("model", "optimizer", "trainer-0"):
        assert differing_tensors(at_once.load(name), later.load(name)) == [], name
    one, other = at_once.load("trainer-0"), later.load("trainer-0")
    assert one["task"]["seen"] == other["task"]["seen"] == set(range(4))
    assert one["task"]["own"][0] == 4
    assert one["buffer"]["samples"] is not None
    for part in (one, other):
        part["counters"].pop("seconds")
        part["buffer"]["counters"] = {k: v for k, v in part["buffer"]["counters"].items() if not k.endswith("_s")}
    assert one["counters"] == other["counters"]
    # Tensors are compared above.
    numbers = [
        {name: value for name, value in part["buffer"].items() if name != "samples" and not torch.is_tensor(value)}
        for part in (one, other)
    ]
    assert numbers[0] == numbers[1]
    assert set(numbers[0]) >= {"counters"}


# All samples are there before the first is served: what the buffer holds at a step does not depend on timing.
STREAM = {
    "task_args": {"samples": 96},
    "training": {"max_steps": 12, "batch_size": 8, "validate_every": 0, "max_epochs": 1},
    "buffer": {"kind": "firo", "capacity": 48, "watermark": 48, "pseudo_epochs": 2},
}


@pytest.mark.processes
def test_parts_are_sent_while_the_trainers_train_in_rpc(tmp_path):
    """Each part is held back until three steps later, so a trainer that waited for it would never end."""
    held = train(
        tmp_path / "held", "rpc", 2, trainer=f"{CARRIERS}:DelayedRpc", checkpoint={"every": 4, "keep": 9}, **STREAM
    )
    at_once = train(tmp_path / "once", "rpc", 2, checkpoint={"every": 4, "keep": 9, "background": False}, **STREAM)
    assert held.checkpoints == at_once.checkpoints == [f"step-{step:08d}" for step in (4, 8, 12)]
    for step in (4, 8, 12):
        for name in ("model", "optimizer", "trainer-0", "trainer-1"):
            assert differing_tensors(held.load(name, step), at_once.load(name, step)) == []
    pauses_ms = held.summary["checkpoint_pause_ms"]
    assert len(pauses_ms) == 3
    assert [r["pause_ms"] for r in held.of_kind("checkpoint")] == pytest.approx(pauses_ms, abs=0.01)
    assert pauses_ms[0] < 200 + min(at_once.summary["checkpoint_pause_ms"])
    assert all(r["pause_ms"] >= r["seconds"] * 1e3 for r in at_once.of_kind("checkpoint"))


@pytest.mark.processes
def test_an_interrupted_run_has_its_last_checkpoint_however_slowly_it_is_sent_in_ddp(tmp_path):
    mark = tmp_path / "mark"
    finished = launch(
        tmp_path,
        mode="ddp",
        task="FaultyTask",
        task_args={"what": "terminate", "mark": str(mark), "batch": 9},
        trainer=f"{CARRIERS}:DelayedDdp",
        cluster={"num_trainers": 2, "timeout_s": 10},
        training={"max_steps": 2000},
        checkpoint={"every": 4, "keep": 9},
    )
    assert finished.code == 3, finished.output
    assert mark.exists()
    steps = finished.summary["steps"]
    assert finished.checkpoints == ["step-00000004", "step-00000008", f"step-{steps:08d}"]
    assert finished.load("trainer-1")["counters"]["batch_idx"] == steps


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "carrier"), [("rpc", "SlowRpc"), ("ddp", "SlowDdp")])
def test_a_run_that_fails_still_has_the_parts_that_were_being_sent(tmp_path, mode, carrier):
    """The error comes in the step after the checkpoint, while no part has left its trainer."""
    finished = launch(
        tmp_path,
        mode=mode,
        task="FaultyTask",
        task_args={"what": "error", "mark": str(tmp_path / "mark"), "trainer": 1, "batch": 4},
        trainer=f"{CARRIERS}:{carrier}",
        cluster={"num_trainers": 2, "timeout_s": 10},
        checkpoint={"every": 4},
    )
    assert finished.code == 1
    assert finished.output.rstrip().endswith("RuntimeError: the task raised on purpose")
    assert finished.checkpoints == ["step-00000004"]
    assert finished.load("trainer-1", 4)["counters"]["batch_idx"] == 4


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "carrier"), [("rpc", "KilledRpc"), ("ddp", "KilledSender")])
def test_a_trainer_that_dies_while_its_part_is_sent_leaves_the_previous_checkpoint(tmp_path, mode, carrier):
    began = time.monotonic()
    finished = launch(
        tmp_path,
        mode=mode,
        task="ReferenceTask",
        trainer=f"{CARRIERS}:{carrier}",
        cluster={"num_trainers": 2, "timeout_s": 10, "max_restarts": 0},
        server={"on_loss": "fail"},
        training={"max_steps": 100_000},
        checkpoint={"every": 3, "keep": 9},
    )
    died = tmp_path / "runs" / "died"
    assert not psutil.pid_exists(json.loads(died.read_text())["pid"])
    assert finished.code == 1
    assert "trainer 1): killed by SIGKILL" in finished.output
    assert finished.summary["status"] == "failed"
    assert finished.summary["checkpoint"] == "step-00000003"
    left = sorted(path.name for path in (finished.run_dir / "checkpoints").iterdir())
    assert left == ["latest", "step-00000003"]
    assert time.monotonic() - began < 40


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.complex64])
def test_a_copy_into_lent_memory_takes_every_shape(shape, dtype):
    tensor = torch.ones(shape, dtype=dtype)
    copied = stage_copy({"t": tensor}, StagingPool())["t"]
    assert (copied.shape, copied.dtype) == (tensor.shape, dtype)
    assert torch.equal(copied, tensor)

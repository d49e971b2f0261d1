"""Writing in the background, and the private copies that make it safe."""

import logging
import threading
import traceback
from collections import OrderedDict, defaultdict, namedtuple
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch
from open_writers import open_writer

from paramserver.checkpoint import CheckpointWriter, StagingPool, find_checkpoint, read_checkpoint, stage_copy, writer
from paramserver.checkpoint.staging import RowStream
from paramserver.errors import DeadlineExceeded, ParamserverError, PeerLost, TrainingError

WAIT_S = 20.0
Pair = namedtuple("Pair", "left right")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "checkpoints"


class Gate:
    """Holds ``write_checkpoint`` until it is opened, so that a test decides what is in progress."""

    def __init__(self, monkeypatch):
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.threads = []
        self._write = writer.write_checkpoint
        monkeypatch.setattr(writer, "write_checkpoint", self)

    def __call__(self, *arguments):
        self.threads.append(threading.current_thread().name)
        self.entered.release()
        assert self.open.wait(WAIT_S)
        return self._write(*arguments)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def steps_in(folder):
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


@pytest.mark.parametrize("background", [True, False])
def test_writes_keeps_and_counts(folder, background):
    with open_writer(folder, keep=2, background=background) as writing:
        for step in (1, 2, 3, 4):
            future = writing.submit(step, {"state": b"x" * step}, {"mode": "local"}, is_best=step == 1)
            written = future.result(WAIT_S)
            assert (written.step, written.size_bytes) == (step, step)
            assert written.seconds > 0
            assert read_checkpoint(written.path).manifest.metadata == {"mode": "local"}
    assert steps_in(folder) == [1, 3, 4]
    assert (folder / "best").read_text() == "step-00000001\n"
    assert [one.step for one in writing.written] == [1, 3, 4]  # it grows no further


def test_the_thread_has_a_name_and_ends_with_close(folder, gate):
    gate.open.set()
    with open_writer(folder, keep=1, background=True) as writing:
        writing.submit(1, {}, {}).result(WAIT_S)
        assert gate.threads == ["checkpoint-writer"]
    assert "checkpoint-writer" not in [thread.name for thread in threading.enumerate()]


def test_submit_does_not_wait_and_close_does(folder, gate):
    with open_writer(folder, keep=3, background=True) as writing:
        first = writing.submit(1, {}, {})
        assert not first.done()
        gate.open.set()
    assert first.result(0).step == 1


def test_the_newest_takes_the_waiting_place_but_a_best_one_stays(folder, gate, caplog):
    with open_writer(folder, keep=9, background=True) as writing:
        futures = {1: writing.submit(1, {}, {})}
        assert gate.entered.acquire(timeout=WAIT_S)
        with caplog.at_level(logging.WARNING):
            for step, is_best in ((2, False), (3, True), (4, False), (5, False), (6, True), (7, False)):
                futures[step] = writing.submit(step, {}, {}, is_best)
        gate.open.set()
    assert steps_in(folder) == [1, 6, 7]
    assert (folder / "best").read_text() == "step-00000006\n"
    assert find_checkpoint(folder.parent).name == "step-00000007"
    assert [step for step, future in futures.items() if future.cancelled()] == [2, 3, 4, 5]
    assert "checkpoint of step 2 is replaced by step 3" in caplog.text
    with pytest.raises(CancelledError):
        futures[5].result(0)


def test_the_same_step_may_wait_twice(folder, gate):
    """Jobs are compared by identity: comparing their tensors has no truth value."""
    with open_writer(folder, keep=9, background=True) as writing:
        writing.submit(1, {}, {})
        assert gate.entered.acquire(timeout=WAIT_S)
        for is_best in (True, False, False):
            last = writing.submit(2, {"model": {"w": torch.ones(2)}}, {}, is_best)
        gate.open.set()
        assert last.result(WAIT_S).step == 2
    assert steps_in(folder) == [1, 2]


def test_close_finishes_what_waits(folder, gate):
    writing = CheckpointWriter(folder, keep=9, background=True)
    writing.submit(1, {}, {})
    assert gate.entered.acquire(timeout=WAIT_S)
    writing.submit(2, {}, {})
    gate.open.set()
    writing.close(WAIT_S)
    assert steps_in(folder) == [1, 2]
    writing.close(WAIT_S)
    with pytest.raises(ParamserverError, match="must be open to take step 3"):
        writing.submit(3, {}, {})


def test_close_has_a_deadline(folder, gate):
    writing = CheckpointWriter(folder, keep=1, background=True)
    writing.submit(1, {}, {})
    with pytest.raises(DeadlineExceeded, match=r"within 0.01 s of the end"):
        writing.close(0.01)
    gate.open.set()
    writing.close(WAIT_S)
    assert steps_in(folder) == [1]


def block(folder):
    folder.write_text("a file where the folder should be")


def test_a_failure_is_raised_by_the_next_submit_and_by_close(folder):
    block(folder)
    writing = CheckpointWriter(folder, keep=1, background=True)
    future = writing.submit(1, {}, {})
    assert isinstance(future.exception(WAIT_S), TrainingError)
    for again in (lambda: writing.submit(2, {}, {}), lambda: writing.close(WAIT_S)):
        with pytest.raises(TrainingError, match="could not be written") as caught:
            again()
        assert "in write_checkpoint" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert not writing.written


def test_without_background_the_failure_is_that_of_submit(folder):
    block(folder)
    writing = CheckpointWriter(folder, keep=1, background=False)
    with pytest.raises(TrainingError, match="could not be written"):
        writing.submit(1, {}, {})


def test_a_private_copy_changes_no_more_and_is_what_was_written(folder, gate):
    model = torch.nn.Linear(3, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with open_writer(folder, keep=1, background=True) as writing:
        future = writing.submit(1, stage_copy({"model": model.state_dict()}), {})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(-1)
        gate.open.set()
        loaded = read_checkpoint(future.result(WAIT_S).path).load("model")
    assert all(torch.equal(loaded[name], before[name]) for name in before)


def test_views_of_a_flat_tensor_are_saved_without_the_rest(folder):
    flat = torch.arange(100_000.0)
    copied = stage_copy({"slice": flat[10:14], "columns": flat.view(100, 1000)[:, :2]})
    assert copied["slice"].tolist() == [10, 11, 12, 13]
    assert torch.equal(copied["columns"], flat.view(100, 1000)[:, :2])
    assert [value.untyped_storage().nbytes() for value in copied.values()] == [16, 800]
    with open_writer(folder, keep=1, background=False) as writing:
        assert writing.submit(1, {"model": copied}, {}).result().size_bytes < 10_000


def test_private_copy_keeps_structure_classes_and_leaves():
    leaf = object()
    state = {"list": [torch.ones(1), (1, "a")], "pair": Pair(torch.zeros(2), leaf), "array": np.zeros(2), 3: None}
    copied = stage_copy(state)
    assert copied["list"][1] == (1, "a")
    assert isinstance(copied["pair"], Pair)
    assert copied["pair"].right is leaf
    state["list"][0].add_(1)
    state["pair"].left.add_(1)
    state["array"] += 1
    state["list"].append("more")
    assert copied["list"][0].item() == 1
    assert copied["pair"].left.tolist() == [0, 0]
    assert copied["array"].tolist() == [0, 0]
    assert len(copied["list"]) == 2
    assert copied[3] is None


def test_private_copy_keeps_what_a_state_dict_carries_beside_its_entries():
    original = torch.nn.BatchNorm1d(2).state_dict()
    copied = stage_copy(original)
    assert type(copied) is OrderedDict
    assert copied._metadata[""] == {"version": 2}
    assert list(copied) == list(original)
    grouped = defaultdict(list, {"a": [torch.ones(1)]})
    assert stage_copy(grouped)["new"] == []
    assert "new" not in grouped


def test_private_copy_takes_parameters_detached_and_tied_weights_once():
    weight = torch.nn.Parameter(torch.ones(3))
    copied = stage_copy({"a": weight, "b": weight.detach(), "rest": weight[1:], "empty": [torch.empty(0)] * 2})
    assert type(copied["a"]) is torch.Tensor
    assert not copied["a"].requires_grad
    assert copied["a"] is copied["b"]
    assert copied["rest"].data_ptr() != copied["a"].data_ptr() + 4


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[1.0, 0.0]]).to_sparse(),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2).expand(3, 2),
        torch.arange(3, dtype=torch.int64).flip(0),
        torch.tensor(2.5),
    ],
    ids=["sparse", "bfloat16", "expanded", "integers", "scalar"],
)
def test_private_copy_of_every_kind_of_tensor(tensor):
    copied = stage_copy(tensor)
    assert copied.dtype == tensor.dtype
    assert torch.equal(copied.to_dense(), tensor.to_dense())


@pytest.mark.parametrize("pool", [None, StagingPool()])
def test_stage_copy_keeps_the_order_of_dimensions_in_memory(pool):
    """A matrix product may round otherwise where the memory of a factor has another order."""
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    large = torch.randn(1000, 1000).T
    for value in (torch.randn(2, 3).T, image, image[:, :2], torch.randn(8, 8)[::2, ::2].T, torch.empty(0, 3), large):
        copied = stage_copy(value, pool)
        assert torch.equal(copied, value)
        order = sorted(range(value.dim()), key=lambda i: -value.stride(i))
        assert copied.permute(order).is_contiguous()
        assert copied.untyped_storage().nbytes() == value.numel() * value.element_size()
    assert stage_copy(torch.ones(1, 3).expand(2, 3), pool).is_contiguous()


def test_stage_copy_distinguishes_a_conjugate_from_its_original():
    value = torch.tensor([1 + 2j])
    copied = stage_copy([value, value.conj()])
    assert copied[0].item() == 1 + 2j
    assert copied[1].item() == 1 - 2j


def test_what_is_not_written_yet_can_be_read(folder, gate):
    """A checkpoint that displaces another one before it is written is the newest."""
    with open_writer(folder, keep=2, background=True) as writing:
        assert writing.pending() == []
        first = writing.submit(1, {"state": b"1"}, {})
        assert gate.entered.acquire(timeout=WAIT_S)
        assert writing.pending() == [{"state": b"1"}]
        writing.submit(2, {"state": b"2"}, {})
        last = writing.submit(3, {"state": b"3"}, {})
        assert writing.pending() == [{"state": b"3"}, {"state": b"1"}]
        gate.open.set()
        assert first.result(WAIT_S).step == 1
        assert last.result(WAIT_S).step == 3
    assert writing.pending() == []


@pytest.mark.parametrize("background", [True, False])
def test_a_server_that_is_lost_while_its_rows_are_read_costs_that_checkpoint_only(folder, background, caplog):
    def read(first, end):
        raise PeerLost("server 1 is lost")

    table = torch.ones(3, 2)
    with open_writer(folder, keep=2, background=background) as writing:
        first = writing.submit(1, {"model": table}, {})
        writing.wait(WAIT_S)
        lost = writing.submit(2, {"model": RowStream((3, 2), torch.float32, read)}, {})
        writing.wait(WAIT_S)
        assert isinstance(writing.lost, PeerLost)
        assert isinstance(lost.exception(), PeerLost)
        last = writing.submit(3, {"model": RowStream((3, 2), torch.float32, lambda a, b: table[a:b])}, {})
        writing.wait(WAIT_S)
        assert writing.lost is None
    assert (first.result().step, last.result().step) == (1, 3)
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000001", "step-00000003"]
    assert list(folder.glob(".*.tmp")) == []
    assert "checkpoint of step 2 is not written: server 1 is lost" in caplog.text

"""Worker processes: the same samples as without, errors in one sentence, and nothing is left behind."""

import os
import re
import select
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loader_tasks import (
    Descriptors,
    Fails,
    Kills,
    LateNoise,
    Noisy,
    NoisyGroups,
    ReadingThread,
    ReportsWorker,
    Sleeps,
    Unpicklable,
    UnpicklableSamples,
    raise_in_worker,
    set_mark,
)
from process_states import wait_until_ended

from paramserver import Partition, Task
from paramserver.buffers import make_buffer
from paramserver.config import Config, TrainingConfig
from paramserver.config.schema import BufferConfig
from paramserver.consistency import Readiness
from paramserver.errors import BufferClosed, SourceError, TaskError, UnsupportedConfiguration
from paramserver.runtime.supervisor import describe_error
from paramserver.sources import DatasetSource, Feeder
from paramserver.sources.loader import WorkerOptions
from paramserver.trainers.data import DataStream

pytestmark = pytest.mark.processes


def source(data, workers, init_fn=None, group=4, passes=1):
    made = DatasetSource(data, Partition(0, 1), seed=3, passes=passes, sampler_kwargs={"shuffle": False}, group=group)
    if workers:
        made.use_workers(WorkerOptions(workers, init_fn))
    return made


def read(data, workers, position=0, **options):
    return list(source(data, workers, **options).samples(position))


def plain(pairs):
    return [(key, {name: torch.as_tensor(value).tolist() for name, value in sample.items()}) for key, sample in pairs]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Noisy, NoisyGroups, LateNoise])
def test_samples_are_the_same_with_and_without_workers(kind):
    torch.manual_seed(1)
    expected = plain(read(kind(), 0, passes=2))
    torch.manual_seed(2)
    assert plain(read(kind(), 1, passes=2)) == expected
    assert plain(read(kind(), 4, position=7, passes=2)) == expected[7:]


def test_samples_arrive_in_their_types():
    sample = next(source(Noisy(), 1).samples(0))[1]
    assert [type(value).__name__ for value in sample.values()] == ["int", "Tensor", "ndarray", "float"]
    assert read("abc", 1) == [(0, "a"), (1, "b"), (2, "c")]


def test_a_worker_knows_what_that_of_a_data_loader_knows():
    seen = [sample for _, sample in read(ReportsWorker(), 2, init_fn=set_mark)]
    assert seen == [(0, 2, True, 100, 1)] * 4 + [(1, 2, True, 101, 1)] * 4


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_an_error_of_a_read_names_the_sample_after_those_before_it_were_put(workers, error):
    fed = Feeder(source(Fails(bad=10, error=error), workers), make_buffer("fifo", capacity=100), 0)
    fed.start()
    with pytest.raises(BufferClosed):
        fed.buffer.get_batch(24, 60)
    assert fed.buffer.info().puts == 10
    message = rf"^trainer 0: the source raised at sample 10, .*: {error.__name__}: "
    with pytest.raises(SourceError, match=message) as caught:
        fed.raise_error()
    assert "in __getitem__" in str(caught.value)
    assert ("in DataLoader worker process" in str(caught.value)) == bool(workers)
    fed.close()


@pytest.mark.parametrize(
    ("data", "init_fn", "message"),
    [
        (
            Kills("worker"),
            None,
            r"DataLoader worker (\(pid \d+\) is killed by signal: Killed|\(pid\(s\) \d+\) exited unexpectedly)",
        ),
        (Kills("loader"), None, r"trainer 0: the process that reads its data set \(pid \d+\) was killed by SIGKILL"),
        (UnpicklableSamples(0), None, "samples must be picklable to be sent by a worker process; return tensors"),
        (Noisy(), raise_in_worker, "LookupError in DataLoader worker process 0(.|\n)*no file for worker 0"),
    ],
)
def test_what_ends_a_worker_is_the_error_of_the_run(data, init_fn, message):
    with pytest.raises(SourceError, match=message):
        read(data, 2, init_fn=init_fn)


def test_where_the_rank_noticed_the_end_of_its_loader_is_not_printed():
    with pytest.raises(SourceError) as raised:
        read(Kills("loader"), 2)
    assert describe_error(raised.value)["traceback"] == ""


@pytest.mark.parametrize(("data", "init_fn"), [(Unpicklable(), None), (Noisy(), lambda worker_id: None)])
def test_what_cannot_be_pickled_is_refused_at_once(data, init_fn):
    message = (
        r"training data set \(loader_tasks\.\w+\) and worker_init_fn must be picklable.*training\.loader_workers: 0"
    )
    with pytest.raises(TaskError, match=message):
        source(data, 2, init_fn=init_fn)


def test_a_data_set_that_cannot_be_imported_in_another_process_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("class Here(list):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    from only_here import Here

    made = source(Here(range(8)), 1)
    (tmp_path / "only_here.py").unlink()
    with pytest.raises(SourceError, match=r"cannot be unpickled in another process \(ModuleNotFoundError.*only_here"):
        next(made.samples(0))


def test_workers_hold_no_descriptor_of_the_rank(tmp_path):
    with socket.socket() as listening, (tmp_path / "file").open("w") as file:
        listening.set_inheritable(True)
        file_is = os.fstat(file.fileno())
        reading, writing = os.pipe()
        own = {(os.fstat(d).st_dev, os.fstat(d).st_ino) for d in (listening.fileno(), reading, writing)}
        own.add((file_is.st_dev, file_is.st_ino))
        seen = [eval(sample) for _, sample in read(Descriptors(), 2, group=1)]
        os.close(reading)
        os.close(writing)
    assert len(seen) == 4
    assert all(seen)
    assert not any(own & set(found) for found in seen)


def test_closing_ends_workers_whatever_they_do(tmp_path):
    fed = Feeder(source(Sleeps(tmp_path, 60.0), 2), make_buffer("fifo", capacity=100), 0)
    fed.start()
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 3:
        assert time.monotonic() < deadline, "no worker reads"
        select.select([], [], [], 0.02)
    began = time.monotonic()
    fed.close()
    assert time.monotonic() - began < 3.0
    workers = [int(file.name) for file in tmp_path.iterdir()]
    wait_until_ended(workers)
    assert not [path for pid in workers for path in Path("/dev/shm").glob(f"torch_{pid}_*")]
    fed.raise_error()


def test_a_source_is_read_again_after_it_was_closed():
    made = source(Noisy(), 1)
    first = plain(made.samples(0))
    made.close()
    assert plain(made.samples(0)) == first


_WITH_SHARED_MEMORY_OF = """
mount -t tmpfs -o size=$1,nr_inodes=$2 tmpfs /dev/shm && exec "$3" -c '
from paramserver import Partition
from paramserver.errors import SourceError
from paramserver.sources import DatasetSource
from paramserver.sources.loader import WorkerOptions
if __name__ == "__main__":
    source = DatasetSource(["x" * 1000000] * 8, Partition(0, 1), seed=0, passes=1, group=2)
    source.use_workers(WorkerOptions(2))
    try:
        print(sum(len(sample) for _, sample in source.samples(0)))
    except SourceError as error:
        print(error)
'
"""


def with_shared_memory_of(size, inodes):
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", _WITH_SHARED_MEMORY_OF, "sh", size, inodes]
    done = subprocess.run([*command, sys.executable], capture_output=True, text=True, timeout=120, check=False)
    if "unshare failed" in done.stderr or "permission denied" in done.stderr.lower():
        pytest.skip(f"no mount namespace can be made here: {done.stderr.strip()}")
    return done.stdout.strip().splitlines()[-1], done.stderr


def test_samples_need_no_room_in_shared_memory():
    assert with_shared_memory_of("128k", "0")[0] == "8000000"


def test_a_full_shared_memory_is_one_sentence():
    line, _ = with_shared_memory_of("16k", "4")
    assert line.startswith("trainer 0: training.loader_workers (2) could not be started (")
    assert "give the container a larger /dev/shm (docker run --shm-size)" in line


def test_shared_memory_that_cannot_be_written_to_is_one_sentence():
    line, _ = with_shared_memory_of("16k,ro", "4")
    assert re.fullmatch(
        r"trainer 0: training\.loader_workers \(2\) could not be started \(.+\); make /dev/shm a tmpfs that this user "
        r"can write to, or use 0 workers",
        line,
    )


# In a trainer.


class Reads(Task):
    def __init__(self, data):
        self.data = data

    def train_source(self, partition):
        return self.data


def config(**training):
    return Config(training=TrainingConfig(**{"batch_size": 4, "max_epochs": 1, **training}))


def batches(data, settings):
    found = []
    with DataStream(Reads(data), Partition(0, 1), settings, {}) as stream:
        stream.start()
        while (readiness := stream.available(60.0).readiness) is not Readiness.DRAINED:
            assert readiness is Readiness.READY
            found.append(stream.next_batch()[0])
            stream.read_ahead(60.0)
    return found


def test_without_workers_the_training_thread_reads():
    data = ReadingThread()
    assert sorted(value for batch in batches(data, config()) for value in batch.tolist()) == list(range(24))
    assert data.threads == {"MainThread"}


def test_the_next_step_can_be_announced_during_this_one():
    with DataStream(Reads(ReadingThread()), Partition(0, 1), config(), {}) as stream:
        stream.start()
        assert stream.available(0.0).readiness is Readiness.WAITING, "nothing is read without a wait"
        for _ in range(5):
            assert stream.available().readiness is Readiness.READY
            stream.next_batch()
            assert stream.available(0.0).readiness is Readiness.WAITING
            stream.read_ahead()
            assert stream.available(0.0).readiness is Readiness.READY
        stream.next_batch()
        stream.read_ahead()
        assert stream.available(0.0).readiness is Readiness.DRAINED


def test_a_slow_data_set_is_read_in_several_waits():
    class Slow(ReadingThread):
        def __getitem__(self, index):
            select.select([], [], [], 0.02)
            return super().__getitem__(index)

    with DataStream(Reads(Slow()), Partition(0, 1), config(batch_size=8), {}) as stream:
        stream.start()
        seen = [stream.available(0.01).readiness for _ in range(2)]
        assert seen == [Readiness.WAITING, Readiness.READY]


@pytest.mark.parametrize("kind", ["firo", "reservoir"])
def test_a_random_buffer_draws_the_same_however_long_a_read_takes(kind):
    class Slow(ReadingThread):
        def __getitem__(self, index):
            select.select([], [], [], 0.003)
            return super().__getitem__(index)

    def served(data, wait_s):
        settings = replace(config(max_epochs=3), buffer=BufferConfig(kind=kind, capacity=16))
        found = []
        with DataStream(Reads(data), Partition(0, 1), settings, {}) as stream:
            stream.start()
            while (readiness := stream.available(wait_s).readiness) is not Readiness.DRAINED:
                if readiness is Readiness.READY:
                    found.append(stream.next_batch()[0].tolist())
                    stream.read_ahead(wait_s)
        return found

    assert served(Slow(), 0.001) == served(ReadingThread(), 60.0)


def test_an_error_ends_the_step():
    with DataStream(Reads(Fails(bad=10)), Partition(0, 1), config(), {"shuffle": False}) as stream:
        stream.start()
        stream.available()
        stream.next_batch()
        stream.read_ahead()
        with pytest.raises(SourceError, match=r"^trainer 0: the source raised at sample 10, index 10 .*: ValueError"):
            stream.available()


def test_only_data_sets_are_read_in_workers():
    with pytest.raises(UnsupportedConfiguration, match=r"training\.loader_workers \(2\) must be 0, as train_source"):
        DataStream(Reads(iter([1, 2])), Partition(0, 1), config(loader_workers=2, max_epochs=None), {})


def test_a_trainer_ends_its_workers(tmp_path):
    with DataStream(Reads(Sleeps(tmp_path, 0.0)), Partition(0, 1), config(loader_workers=2), {}) as stream:
        stream.start()
        stream.available(60.0)
    wait_until_ended(int(file.name) for file in Path(tmp_path).iterdir())

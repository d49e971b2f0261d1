"""An IterableDataset in worker processes: whole groups in turns, and every place from which a run can continue."""

import pickle
from itertools import chain
from types import SimpleNamespace

import iterable_tasks
import pytest
from iterable_tasks import Dealt, FailsAt, KillsItself, Noisy, NoisyPlain, Placed, Plain, Undivided
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from paramserver import Partition
from paramserver.errors import CheckpointError, SourceError, TaskError, UnsupportedConfiguration
from paramserver.sources import IterableSource, ResumePosition, iterable, loader
from paramserver.sources.iterable import IterableBatches
from paramserver.sources.loader import WorkerOptions, Workers

pytestmark = pytest.mark.processes

SIZE = 4

BATCHES = [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11], [12, 15, 18, 21], [13, 16, 19, 22], [14, 17, 20]]
"""Of 23 samples and three workers."""


@pytest.fixture
def here(monkeypatch):
    """Workers are iterators of this process, which takes no time."""

    infos = [None]  # of the worker that reads

    def results(self, requests):
        count = self.options.count
        data = [pickle.loads(self._pickled)[0] for _ in range(count)]
        streams = [iter(requests.items(one, None, self._seed)[0]) for one in data]
        while any(streams):
            for number in range(count):
                infos.append(SimpleNamespace(id=number, num_workers=count))
                payload = streams[number] and next(streams[number], None)
                infos.pop()
                if payload is None:
                    streams[number] = None
                else:
                    yield pickle.loads(payload)

    monkeypatch.setattr(Workers, "results", results)
    for module in (iterable_tasks, iterable, loader):
        monkeypatch.setattr(module, "get_worker_info", lambda: infos[-1])


def source(data, workers=3, whole=False, partition=None, drop_last=False):
    iterable = IterableBatches(data, SIZE, drop_last) if whole else data
    made = IterableSource(iterable, partition or Partition(0, 1), seed=5, group=SIZE)
    if workers:
        made.use_workers(WorkerOptions(workers))
    return made


def read(made, position=0):
    """All groups, each with the mark after it and the position that it ends at."""
    found = []
    for group in made.groups(position):
        samples = [sample for _, sample in group]
        assert [key for key, _ in group] == list(range(position, position + len(samples)))
        position += len(samples)
        found.append((samples, made.mark(), position))
    return found


def samples_of(found):
    return list(chain.from_iterable(samples for samples, _, _ in found))


@pytest.mark.parametrize("kind", [Plain, Placed, Dealt, Noisy, NoisyPlain])
@pytest.mark.parametrize("whole", [False, True])
def test_a_run_continues_anywhere_with_the_same_samples(here, kind, whole):
    """23 samples: the last group of one worker is incomplete, and the other workers have fewer groups."""
    made = source(kind(range(23)), whole=whole)
    found = read(made)
    every = samples_of(found)
    if kind in (Plain, Placed, Dealt):
        assert every == (BATCHES if whole else list(chain.from_iterable(BATCHES)))
    before = (None, 0)
    for _, mark, position in found:
        # The buffer holds the mark of the last group of which all samples are in it.
        for at, known in ((before[1] + 1, before[0]), (position, mark)):
            later = source(kind(range(23)), whole=whole)
            later.load_state_dict(made.state_dict(), known)
            assert samples_of(read(later, min(at, position))) == every[min(at, position) :]
        before = mark, position


@pytest.mark.parametrize("kind", [Plain, Placed])
def test_a_replacement_reads_from_the_start_what_was_not_applied(here, kind):
    every = samples_of(read(source(kind(range(23)))))
    later = source(kind(range(23)))
    later.load_state_dict(source(kind(range(23))).state_dict())
    assert samples_of(read(later, 6)) == every[6:]


def test_incomplete_batches_of_each_worker_are_left_out_as_in_a_data_loader(here):
    every = samples_of(read(source(Placed(range(23)), whole=True, drop_last=True)))
    assert every == BATCHES[:-1]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("workers", "then", "trainers"), [(3, 3, 2), (0, 2, 3), (2, 0, 2)])
def test_other_trainers_and_workers_share_what_is_left(here, whole, workers, then, trainers):
    made = source(Dealt(range(23)), workers, whole=whole)
    every = read(made)
    flat = (lambda found: list(chain.from_iterable(found))) if whole else list
    for samples, mark, position in every:
        left = ResumePosition(state=made.state_dict(), position=position, mark=mark)
        shares = []
        for index in range(trainers):
            new = source(Dealt(range(23)), then, whole=whole, partition=Partition(index, trainers))
            new.reshard([left], held=[])
            shares += flat(samples_of(read(new)))
        before = flat(samples_of([one for one in every if one[2] <= position]))
        assert sorted([*before, *shares]) == list(range(23)), samples


def test_another_number_of_workers_needs_a_data_set_that_can_be_dealt(here):
    made = source(Dealt(range(23)))
    every = read(made)
    _, mark, position = every[6]
    for workers in (0, 1, 4):
        later = source(Dealt(range(23)), workers)
        later.load_state_dict(made.state_dict(), mark)
        assert sorted(samples_of(read(later, position))) == sorted(samples_of(every)[position:])
    for kind, before, after in ((Placed, 3, 2), (Placed, 3, 0), (Plain, 3, 2), (Placed, 0, 2), (Plain, 0, 2)):
        made = source(kind(range(23)), before)
        _, mark, _ = read(made)[2]
        with pytest.raises(
            CheckpointError,
            match=rf"^training\.loader_workers \({after}\) must be {before} as before, because each worker reads its "
            rf"own part of iterable_tasks\.{kind.__name__}; set it to {before}, or give",
        ):
            source(kind(range(23)), after).load_state_dict(made.state_dict(), mark)


def test_what_is_read_again_is_noted():
    assert "iterable_tasks.Plain has no state_dict and load_state_dict" in source(Plain([])).resume_note
    assert source(Placed([])).resume_note == ""


def test_a_place_is_kept_without_workers_too():
    made = source(Placed(range(10)), 0, whole=True)
    found = read(made)
    assert [len(batch) for batch in samples_of(found)] == [4, 4, 2]
    for _, mark, position in found:
        later = source(Placed(range(10)), 0, whole=True)
        later.load_state_dict(made.state_dict(), mark)
        assert samples_of(read(later, position)) == samples_of(found)[position:]


@pytest.mark.parametrize(("whole", "place", "at"), [(False, "sample 5", 21), (True, "batch 1", 5)])
def test_an_error_names_the_data_set_and_the_place_after_what_was_read(here, whole, place, at):
    made, found = source(FailsAt(range(23)), whole=whole), []
    with pytest.raises(
        SourceError,
        match=rf"^trainer 0: the source raised at sample {at}, {place} of iterable_tasks\.FailsAt in DataLoader worker "
        r"process 2: ValueError: record 17 is damaged\n",
    ):
        found += [list(group) for group in made.groups(0)]


def test_workers_that_all_read_the_same_are_an_error(here):
    with pytest.raises(SourceError, match=r"Undivided gave more than the 8 samples of .*get_worker_info\(\)"):
        read(source(Undivided(range(8)), 2))


def test_a_worker_that_dies_is_the_error_of_the_run():
    # As torch notices it first: by SIGCHLD, or as it finds the worker gone.
    noticed = r"\(pid \d+\) is killed by signal: Killed|\(pid\(s\) \d+\) exited unexpectedly"
    with pytest.raises(SourceError, match=rf"^trainer 0: DataLoader worker ({noticed})"):
        read(source(KillsItself(range(23)), 2))


def test_processes_deliver_the_batches_of_a_data_loader_and_are_seeded():
    made = source(Noisy(range(23)), 2, whole=True)
    found = read(made)
    every = samples_of(found)
    expected = list(DataLoader(Placed(range(23)), SIZE, num_workers=2, collate_fn=list))
    assert [[sample for sample, *_ in batch] for batch in every] == expected
    assert len({drawn for batch in every for _, drawn, _, _ in batch}) == 23
    _, mark, position = found[2]
    later = source(Noisy(range(23)), 2, whole=True)
    later.load_state_dict(made.state_dict(), mark)
    assert samples_of(read(later, position)) == every[position:]


@pytest.mark.parametrize("data", [iter([1]), [1, 2], IterableWrapper([1, 2])])
def test_what_is_not_divided_among_workers_is_refused(data):
    with pytest.raises(UnsupportedConfiguration, match=r"training\.loader_workers \(2\) must be 0, as train_source"):
        source(data, 2)


def test_a_data_set_that_cannot_be_sent_is_refused():
    with pytest.raises(TaskError, match=r"training data set \(iterable_tasks\.Plain\) .* must be picklable"):
        source(Plain([lambda: 0]), 2)

"""Which parts a checkpoint has when trainers are lost while it is made."""

import itertools

import pytest
import torch

from paramserver.errors import TrainingError
from paramserver.runs.checkpoint_manager import PartCollector, StagedCheckpoint


class Manager:
    """Keeps what would be written."""

    def __init__(self):
        self.written = []

    def commit(self, staged, parts, pause_s):
        parts = {i: dict(part) if isinstance(part, dict) else b"".join(part) for i, part in parts.items()}
        self.written.append((staged.step, parts, pause_s))


@pytest.fixture
def manager():
    return Manager()


@pytest.fixture
def collector(manager):
    return PartCollector(manager)


def substitutes(*trainers):
    return {trainer: {"of": trainer} for trainer in trainers}


def start(collector, step=3, taking_part=(0, 1), trainers=(0, 1)):
    collector.start(StagedCheckpoint(step, {}, False, "periodic", 0.0), set(taking_part), substitutes(*trainers))


def send(collector, trainer, step=3, pause_s=0.5):
    collector.add_chunk(trainer, step, torch.tensor(list(b"part"), dtype=torch.uint8))
    collector.finish_part(trainer, step, pause_s)
    collector.commit_if_complete()


def test_the_part_of_a_lost_trainer_is_its_substitute_and_completes_the_checkpoint(collector, manager):
    start(collector)
    send(collector, 1)
    assert manager.written == []
    collector.replace(0)
    assert manager.written == [(3, {0: {"of": 0}, 1: b"part"}, 0.5)]


def test_the_others_are_waited_for_after_a_loss(collector, manager):
    start(collector)
    collector.replace(0)
    assert manager.written == []
    send(collector, 1)
    assert manager.written == [(3, {0: {"of": 0}, 1: b"part"}, 0.5)]


def test_what_a_lost_trainer_sent_of_its_part_is_discarded(collector, manager):
    start(collector)
    collector.add_chunk(0, 3, torch.zeros(4, dtype=torch.uint8))
    collector.replace(0)
    for late in (lambda: collector.add_chunk(0, 3, torch.zeros(4, dtype=torch.uint8)), lambda: send(collector, 0)):
        with pytest.raises(TrainingError, match="must follow the staging of that step"):
            late()
    send(collector, 1)
    assert manager.written == [(3, {0: {"of": 0}, 1: b"part"}, 0.5)]


def test_a_part_that_has_arrived_stays_although_its_trainer_is_lost(collector, manager):
    start(collector)
    send(collector, 0)
    collector.replace(0)
    assert manager.written == []
    send(collector, 1, pause_s=0.25)
    assert manager.written == [(3, {0: b"part", 1: b"part"}, 0.5)]


def test_a_trainer_that_takes_no_part_is_stored_with_its_substitute(collector, manager):
    start(collector, taking_part=(1,))
    with pytest.raises(TrainingError, match="trainer 0: a part of step 3 must follow the staging"):
        send(collector, 0)
    send(collector, 1)
    assert manager.written == [(3, {0: {"of": 0}, 1: b"part"}, 0.5)]


def test_all_trainers_may_be_lost(collector, manager):
    start(collector)
    collector.replace(1)
    collector.replace(0)
    assert manager.written == [(3, substitutes(0, 1), 0.0)]


def test_a_loss_while_no_checkpoint_is_made_changes_nothing(collector, manager):
    collector.replace(0)
    start(collector)
    for trainer in (0, 1):
        send(collector, trainer)
    collector.replace(0)  # a second time, after the checkpoint
    start(collector, step=6)
    send(collector, 0, step=6)
    assert [step for step, _, _ in manager.written] == [3]
    send(collector, 1, step=6)
    assert manager.written[1] == (6, {0: b"part", 1: b"part"}, 0.5)


ACTS = ("send 0", "send 1", "send 2", "replace 1")


@pytest.mark.parametrize("order", [*itertools.permutations(ACTS)], ids="-".join)
def test_in_every_order_a_checkpoint_is_committed_once_it_is_whole(collector, manager, order):
    start(collector, taking_part=(0, 1, 2), trainers=(0, 1, 2))
    done = set()
    for act in order:
        what, trainer = act.split()
        if what == "replace":
            collector.replace(int(trainer))
        elif act == "send 1" and (manager.written or "replace 1" in done):
            with pytest.raises(TrainingError):
                send(collector, 1)
        else:
            send(collector, int(trainer))
        done.add(act)
        whole = {"send 0", "send 2"} <= done and done & {"send 1", "replace 1"}
        assert len(manager.written) == bool(whole)
    of_1 = b"part" if order.index("send 1") < order.index("replace 1") else {"of": 1}
    assert manager.written == [(3, {0: b"part", 1: of_1, 2: b"part"}, 0.5)]

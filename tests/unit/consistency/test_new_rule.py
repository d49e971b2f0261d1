"""A consistency rule that only this test registers: every place that depends on the rule takes it for what it is."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from paramserver.config import CheckpointConfig, Config, TrainingConfig
from paramserver.consistency import Update, make_consistency
from paramserver.consistency.factory import CLASSES
from paramserver.consistency.free_running import FreeRunning
from paramserver.optim.outer import updates_per_round
from paramserver.tools.chaos.command import _samples_due
from tests.simulation.simulation import World


class Half(FreeRunning):
    """An update is the mean of the gradients of half of the trainers that have data; later ones are dropped."""

    drops_pushes = True

    def __init__(self, terms, step=0, samples=0):
        super().__init__(terms, step, samples)
        self._held = {}

    @classmethod
    def gradients_per_update(cls, config, trainers):
        return (trainers + 1) // 2

    @property
    def has_partial_update(self):
        return bool(self._held)

    def may_start(self, trainer_index):
        return trainer_index not in self._held

    def push(self, trainer_index, version, samples, finite=True):
        del self._permits[trainer_index]
        if not finite:
            return False
        if version < self.step:
            self.dropped[trainer_index] += 1
            return False
        self._held[trainer_index] = samples
        return True

    def next_update(self):
        absent = self._drained | (self._waiting if self._end is not None else set())
        if not self._held or 2 * len(self._held) < len((self.trainers - absent) | self._held.keys()):
            return None
        trainers = tuple(sorted(self._held))
        self.samples += sum(self._held.values())
        self._held = {}
        self._advance()
        return Update(trainers, (0,) * len(trainers), trainers[0])

    def wants_buffers_from(self, trainer_index):
        return True


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(CLASSES, "half", Half)


def config_of(trainers=4, **changes):
    config = Config(task="t.py:T", mode="rpc", training=TrainingConfig(batch_size=1, max_epochs=1, **changes))
    cluster = replace(config.cluster, num_trainers=trainers)
    return replace(config, cluster=cluster, server=replace(config.server, consistency="half"))


@pytest.mark.parametrize("seed", range(40))
def test_it_trains_to_completion_whatever_is_lost(seed):
    world = World(seed)
    config = world.config
    server = replace(config.server, consistency="half", backup_trainers=0, arrivals=1)
    world.scenario = replace(world.scenario, config=replace(config, server=server))
    outcome = world.run()
    assert outcome.violation is None
    assert isinstance(world.server.aggregator.rules, Half)


def test_it_validates_retained_versions():
    config = replace(config_of(validate_every=2), checkpoint=CheckpointConfig(every=3))
    assert make_consistency(config, 4).terms.validate_every == 2


def test_it_makes_one_update_while_each_trainer_pushes_once():
    assert updates_per_round(config_of(uneven_inputs="join")) == 1.0  # and drops what comes later


def test_chaos_does_not_expect_every_sample():
    records = [{"kind": "expected", "total_samples": 48}]
    assert _samples_due(SimpleNamespace(config=config_of(uneven_inputs="join"), records=records)) is None

"""A consistency rule that only this test registers: every place that depends on the rule takes it for what it is."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paramserver import Task
from paramserver.config import CheckpointConfig, Config, ServerConfig, TrainingConfig
from paramserver.consistency import Consistency, Sync, Update, make_consistency
from paramserver.consistency.factory import CLASSES, key_of_choice
from paramserver.consistency.free_running import FreeRunning
from paramserver.errors import UnsupportedConfiguration
from paramserver.optim.outer import updates_per_round
from paramserver.server.parameter_store import ParameterStore, check_optimizers
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


@pytest.mark.parametrize("limit", [{"patience": 2}, {"max_samples": 9}, {"max_seconds": 9.0}, {"max_steps": 9}])
def test_chaos_does_not_expect_every_sample_before_another_limit(limit):
    records = [{"kind": "expected", "total_samples": 48}]
    for further, due in (({}, 48), (limit, None)):
        config = replace(config_of(uneven_inputs="join", **further), server=ServerConfig())
        assert _samples_due(SimpleNamespace(config=config, records=records)) == due


class Twins(Task):
    """A table, or two optimizers."""

    def __init__(self, several):
        self.several = several

    def build_model(self):
        return nn.ModuleDict({"a": nn.Embedding(4, 2, sparse=not self.several), "b": nn.Linear(1, 1)})

    def build_optimizer(self, model):
        if self.several:
            return {name: torch.optim.SGD(model[name].parameters(), lr=0.1) for name in "ab"}
        return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("several", "message"),
    [
        (False, r"server.consistency \(half\) must be sync or bounded or async with embedding tables"),
        (True, r"server.consistency \(half\) must be sync with several optimizers"),
    ],
)
def test_it_is_refused_where_it_declares_nothing(several, message):
    config = config_of()
    with pytest.raises(UnsupportedConfiguration, match=message):
        check_optimizers(config, ParameterStore(Twins(several), config))


@pytest.mark.parametrize(
    ("keys", "choice"),
    [
        ({"backup_trainers": 2}, ("server.backup_trainers", 2, [0])),
        ({"consistency": "async", "arrivals": 3}, ("server.consistency", "async", ["sync"])),
        ({"consistency": "sync"}, ("server.consistency", "sync", ["sync"])),
    ],
)
def test_the_key_that_makes_a_rule_unfit_is_named(keys, choice):
    server = replace(config_of().server, consistency="sync")
    assert key_of_choice(replace(server, **keys), lambda rules: rules.waits_for_all) == choice


@pytest.mark.parametrize(
    ("base", "missing"),
    [
        (Consistency, {"gradients_per_update", "next_update", "pop_decisions", "push", "rejection_reason"}),
        (FreeRunning, {"gradients_per_update", "has_partial_update", "may_start", "next_update", "push"}),
    ],
)
def test_nothing_on_which_others_depend_has_a_default_that_may_be_wrong(base, missing):
    assert base.__abstractmethods__ == missing | {"wants_buffers_from"}
    assert not hasattr(base, "drops_pushes")
    assert not base.waits_for_all
    assert not base.allows_tables
    assert Sync.drops_pushes is False

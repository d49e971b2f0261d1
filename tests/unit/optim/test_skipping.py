"""How many steps in succession may be skipped."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from paramserver import Task
from paramserver.config import TrainingConfig
from paramserver.errors import NotFinite
from paramserver.optim.updater import Skipping, Updater

SKIP = TrainingConfig(nonfinite="skip")


class Two(Task):
    def __init__(self, by_name=False):
        self.by_name = by_name

    def build_optimizer(self, model):
        parts = {name: torch.optim.SGD([p], lr=0.1) for name, p in model.named_parameters()}
        return parts if self.by_name else torch.optim.SGD(model.parameters(), lr=0.1)


def test_those_of_one_trainer_are_counted_until_one_of_its_gradients_is_applied():
    skipping = Skipping(SKIP)
    for _ in range(99):
        skipping.step_skipped([0, 1], "loss", 1.0)
    skipping.update_made([0], 1.0)
    skipping.step_skipped([0], "loss", 1.0)
    with pytest.raises(
        NotFinite, match=r"^100 steps in succession .* \(training.nonfinite: skip\), .* as the gradient"
    ):
        skipping.step_skipped([1], "gradient", 1.0)


def test_the_count_is_part_of_the_state_of_the_updater():
    updater, other = (Updater(Two(), nn.Linear(1, 1), SKIP) for _ in range(2))
    updater.skipping.step_skipped([0], "loss", 1.0)
    other.load_state_dict(updater.state_dict())
    assert other.skipping.in_succession == {0: 1}
    assert "skipping" not in Updater(Two(), nn.Linear(1, 1), TrainingConfig()).state_dict()
    plain = Updater(Two(), nn.Linear(1, 1), TrainingConfig())
    plain.load_state_dict(updater.state_dict())
    assert plain.skipping.in_succession == {}


HALF = TrainingConfig(precision="float16")


def test_the_scale_is_that_of_torch():
    """Without a process: the scale of ``GradScaler`` in as many steps, some of which overflow."""
    skipping, scaler, parameter = Skipping(HALF), torch.amp.GradScaler("cpu"), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for step in range(6100):
        overflows = step in (1, 2, 50) or step == 2060
        parameter.grad = None
        scaler.scale(parameter * (float("inf") if overflows else 1.0)).sum().backward()
        scaler.step(optimizer)
        scaler.update()
        if overflows:
            skipping.step_skipped([0], "gradient", skipping.scale)
        else:
            skipping.update_made([0], skipping.scale)
        assert skipping.scale == scaler.get_scale()
    assert skipping.state_dict() == {"in_succession": {}, "scale": 2.0**15, "updates": 39}


def test_a_push_of_an_earlier_scale_does_not_lower_it_again():
    skipping = Skipping(HALF)
    for index in range(3):  # all took their steps with the first scale
        skipping.step_skipped([index], "gradient", 2.0**16)
    assert skipping.scale == 2.0**15
    skipping.update_made([0], 2.0**16)
    assert skipping.state_dict()["updates"] == 0
    skipping.step_skipped([0], "gradient", 2.0**12)  # of a scale before the last growth, say
    assert skipping.scale == 2.0**11


def test_a_run_without_scale_continues_with_the_first_one():
    before, after = Skipping(SKIP), Skipping(HALF)
    before.step_skipped([0], "loss", 1.0)
    after.load_state_dict(before.state_dict())
    assert (after.scale, after.in_succession) == (2.0**16, {0: 1})
    before.load_state_dict(after.state_dict())
    assert before.scale == 1.0


def test_a_hundred_overflows_end_the_run_by_the_name_of_the_key():
    skipping = Skipping(HALF)
    for _ in range(99):
        skipping.step_skipped([0], "gradient", skipping.scale)
    with pytest.raises(NotFinite, match=r"^100 steps in succession were skipped \(training.precision: float16\)"):
        skipping.step_skipped([0], "gradient", skipping.scale)
    assert skipping.scale == 2.0**-84


def test_a_round_is_never_skipped_and_its_local_steps_are():
    rounds = TrainingConfig(nonfinite="skip", local_steps=2)
    assert not Skipping(rounds).is_possible
    assert Skipping(replace(rounds, local_steps=1)).is_possible


def test_optimizers_that_take_turns_count_their_calls():
    updater = Updater(Two(by_name=True), nn.Linear(1, 1), SKIP)
    updater.skipping.step_skipped([0], "loss", 1.0)
    assert updater.state_dict()["skipping"] == {"in_succession": {0: 1}}

"""The calls that all trainers make together."""

from types import SimpleNamespace

import pytest

from paramserver.errors import TaskError
from paramserver.metrics.records import PhaseClock
from paramserver.server.quorum import Gathers
from paramserver.server.server_run import ServerRun
from paramserver.trainers.base import TrainingLoop
from paramserver.trainers.control import OptimizerCall, OptimizerCalls
from paramserver.trainers.rpc import RpcTrainer


class LosesTrainerThatSkips:
    """All have data but this trainer. The only one whose gradient is not finite is lost before its push."""

    trainer_index, process = 2, SimpleNamespace(trainers=3)

    def __init__(self):
        finite, nonfinite = OptimizerCall("a", version=4), OptimizerCall("a", version=4, nonfinite="gradient")
        self.calls = [[(0, finite), (1, nonfinite), (2, None)], [(0, OptimizerCall(version=5)), (2, None)]]

    def all_gather(self, *args, **options):
        return self.calls.pop(0)


def test_a_trainer_without_data_follows_a_call_that_is_not_skipped_after_a_loss():
    calls = OptimizerCalls(LosesTrainerThatSkips())
    calls.batch_began = 4
    trainer = SimpleNamespace(step=4, hooks=(), optimizer_calls=calls, clock=PhaseClock(), end_step=lambda: None)
    trainer.follow_update = lambda: RpcTrainer.follow_update(trainer)
    assert TrainingLoop(trainer)._follow_calls() == 5


class SecondTrainerMakesTheSameCall:
    """What ``OptimizerCalls`` needs of a control plane."""

    trainer_index, process = 0, SimpleNamespace(trainers=2)

    def all_gather(self, value, call, active, has_limit=True):
        assert active is None
        self.has_limit = has_limit
        return [value, (1, value[1])]


def test_calls_of_several_optimizers_have_no_limit():
    """A slow trainer is no failure: others wait for its step as long as it lives."""
    control = SecondTrainerMakesTheSameCall()
    calls = OptimizerCalls(control)
    calls.batch_began, calls.made = 3, 0
    assert calls.exchange(OptimizerCall("judge"))
    assert sorted(calls.present) == [0, 1]
    assert not control.has_limit


@pytest.mark.parametrize("has_limit", [True, False])
def test_a_run_ends_where_a_trainer_is_late_for_a_call_with_a_limit_only(has_limit):
    run = ServerRun()
    gathers = Gathers(run, lambda: {0, 1}, limit_s=-1.0)
    reply = gathers.add(0, "a", (3, 1, 2, 0), None, has_limit)
    gathers.check_overdue()
    if has_limit:
        assert isinstance(run.error, TaskError)
        assert "was not called by trainer 1" in str(run.error)
        return
    assert run.error is None
    gathers.add(1, "b", (3, 1, 2, 0), None, has_limit)
    gathers.evaluate()
    assert reply.value() == ["a", "b"]

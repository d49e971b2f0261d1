"""The network model in cases that have a formula."""

from dataclasses import replace
from itertools import pairwise

import pytest

from paramserver.config import MODES, ClusterConfig, Config, ServerConfig, TrainingConfig
from paramserver.server.update_pipeline import FIRST_BUCKET_BYTES
from paramserver.tools.bench.link_probe import LinkSpeed, communication_s
from paramserver.tools.bench.simulation import Costs, Deployment, ModelledRun, simulate
from paramserver.tools.bench.slowdown import SlowdownSpec

FREE = Costs(link_share=1.0, message_s=0.0, byte_s=0.0, update_byte_s=0.0, step_s=0.0, two_way=0.0)
MODEL = 20e6
BANDWIDTH = 1e9
COMPUTE_S = 0.1


def deployment(trainers=1, servers=1, latency=0.0, **changes):
    names = ServerConfig.__dataclass_fields__
    server = {"bucket_mb": 0.25, **{name: changes.pop(name) for name in list(changes) if name in names}}
    clip = changes.pop("clip_grad_norm", None)
    colocate = changes.pop("colocate", False)
    config = Config(
        cluster=ClusterConfig(num_trainers=trainers, num_servers=servers, colocate=colocate),
        server=ServerConfig(**server),
        training=TrainingConfig(clip_grad_norm=clip),
    )
    values = {
        "message_bytes": MODEL,
        "link": LinkSpeed(BANDWIDTH, latency),
        "forward_s": COMPUTE_S,
        "costs": FREE,
        **changes,
    }
    return Deployment(config, **values)


def formula(trainers, servers, overlap, latency=0.0, colocated=False):
    return communication_s(MODES["rpc"], MODEL, trainers, servers, BANDWIDTH, latency, overlap, colocated)


COUNTS = [(1, 1), (3, 1), (4, 2), (8, 4), (2, 4)]


@pytest.mark.parametrize(("trainers", "servers"), COUNTS)
def test_bucket_by_bucket_a_step_lasts_as_the_larger_of_both_ends(trainers, servers):
    found = simulate(deployment(trainers, servers), updates=2, warm=1)
    expected = COMPUTE_S + formula(trainers, servers, overlap=True)
    # A bucket waits for the last trainer's, which with several servers may be any.
    assert expected < found.step_s < 1.1 * expected
    assert found.samples_per_second == pytest.approx(trainers / found.step_s)


def test_without_buckets_one_trainer_pushes_and_pulls_one_after_the_other():
    found = simulate(deployment(1, 1, clip_grad_norm=1.0), updates=2, warm=1)
    assert found.step_s == pytest.approx(COMPUTE_S + formula(1, 1, overlap=False), rel=0.01)


@pytest.mark.parametrize(("trainers", "servers"), COUNTS[1:3])
def test_without_buckets_several_overlap_as_far_as_they_take_turns(trainers, servers):
    found = simulate(deployment(trainers, servers, clip_grad_norm=1.0), updates=4, warm=2)
    longest, shortest = (COMPUTE_S + formula(trainers, servers, overlap) for overlap in (False, True))
    assert shortest < found.step_s < longest * 1.01


def test_the_share_of_a_colocated_server_does_not_pass_an_interface():
    found = simulate(deployment(4, 4, colocate=True), updates=3, warm=2)
    assert found.step_s == pytest.approx(COMPUTE_S + formula(4, 4, overlap=True, colocated=True), rel=0.03)


def test_a_free_network_costs_nothing():
    free = deployment(5, 2, link=LinkSpeed(float("inf"), 0.0))
    assert simulate(free, updates=3, warm=2).step_s == pytest.approx(COMPUTE_S)
    assert simulate(replace(free, forward_s=0.04, backward_s=0.06), 3, 2).step_s == pytest.approx(COMPUTE_S)


def test_each_round_trip_adds_two_latencies():
    fast = LinkSpeed(float("inf"), 0.001)
    # Bucket by bucket: the pull of the first bucket, and the push. Otherwise: pull, gradients, report.
    assert simulate(deployment(2, 1, link=fast), 3, 2).step_s == pytest.approx(COMPUTE_S + 0.004)
    assert simulate(deployment(2, 1, link=fast, clip_grad_norm=1.0), 3, 2).step_s == pytest.approx(COMPUTE_S + 0.006)


def test_backward_hides_the_buckets_that_leave_during_it():
    at_once = simulate(deployment(1, 1, forward_s=0.1), 3, 2).step_s
    during = simulate(deployment(1, 1, forward_s=0.0, backward_s=0.1), 3, 2).step_s
    # All but the last bucket have left when the backward ends.
    assert during == pytest.approx(0.1, rel=0.05)
    assert at_once == pytest.approx(0.1 + MODEL / BANDWIDTH, rel=0.05)


SLOW = SlowdownSpec(1, 5.0)
INFINITE = LinkSpeed(float("inf"), 0.0)
SMALL = {"link": INFINITE, "message_bytes": 1e4}


@pytest.mark.parametrize(
    ("server", "rate"),
    [
        ({}, 4 / 5),  # all in the time of the slow one
        ({"consistency": "async"}, 3 + 1 / 5),
        ({"consistency": "bounded", "staleness_bound": 3}, 4 / 5),  # at the bound, to the beat of the slow one
        ({"backup_trainers": 1}, 3.0),  # without it
    ],
)
def test_a_straggler_slows_each_consistency_as_its_rule_says(server, rate):
    found = simulate(deployment(4, 1, slow=SLOW, **SMALL, **server), updates=50, warm=30)
    assert found.samples_per_second * COMPUTE_S == pytest.approx(rate, rel=0.03)


def test_the_slow_batches_are_those_of_the_benchmark():
    slow, seed = SlowdownSpec(1, 5.0, 0.3), 7
    batches = range(2, 32)  # after the warm-up
    expected = sum(COMPUTE_S * (5 if slow.slows(seed, 1, batch) else 1) for batch in batches) / len(batches)
    found = simulate(deployment(3, 1, slow=slow, seed=seed, **SMALL), updates=30, warm=1)
    assert found.step_s == pytest.approx(expected, rel=0.01)


def test_updates_of_async_are_bound_by_the_server():
    costs = replace(FREE, update_byte_s=2e-9)
    apply_s = MODEL * 2 * 2e-9  # one gradient and the parameters
    found = simulate(deployment(8, 1, consistency="async", link=INFINITE, costs=costs), updates=20, warm=5)
    assert found.samples_per_second == pytest.approx(1 / apply_s, rel=0.01)
    alone = simulate(deployment(1, 1, consistency="async", link=INFINITE, costs=costs), updates=20, warm=5)
    assert alone.step_s == pytest.approx(COMPUTE_S + apply_s)


def test_the_bandwidth_of_a_server_bounds_async():
    found = simulate(deployment(16, 1, consistency="async", forward_s=0.01, bucket_mb=4), updates=8, warm=3)
    assert 0.7 * BANDWIDTH / MODEL < found.samples_per_second <= 1.01 * BANDWIDTH / MODEL


def test_hosts_on_one_machine_share_its_cores():
    costs = replace(FREE, step_s=0.05)
    alone = deployment(6, 1, forward_s=0.0, costs=costs, cores=2, **SMALL)
    assert simulate(alone, 3, 2).step_s == pytest.approx(0.05)
    assert simulate(replace(alone, one_machine=True), 3, 2).step_s == pytest.approx(6 * 0.05 / 2)


def test_a_run_replays_exactly():
    noisy = deployment(4, 2, jitter=0.3, seed=3, consistency="async", message_bytes=1e5)
    assert simulate(noisy) == simulate(noisy)
    assert simulate(noisy) != simulate(replace(noisy, seed=4))


def test_jitter_keeps_the_mean_and_costs_sync_the_slowest():
    alone = simulate(deployment(1, 1, jitter=0.3, **SMALL), updates=100, warm=1)
    assert alone.step_s == pytest.approx(COMPUTE_S, rel=0.05)
    several = simulate(deployment(8, 1, jitter=0.3, **SMALL), updates=30, warm=1)
    assert several.step_s > 1.3 * COMPUTE_S


@pytest.mark.nightly
def test_transfers_that_vary_keep_their_mean_and_bring_trainers_out_of_step():
    alone = deployment(1, 1, clip_grad_norm=1.0)
    varied = simulate(replace(alone, transfer_jitter=0.3), updates=200, warm=1)
    assert varied.step_s == pytest.approx(simulate(alone, updates=3, warm=1).step_s, rel=0.05)
    free = deployment(4, 1, consistency="async", forward_s=4 * MODEL / BANDWIDTH)
    steps = [simulate(replace(free, transfer_jitter=sigma), updates=50, warm=10).step_s for sigma in (0.0, 0.3)]
    assert steps[1] > 1.05 * steps[0]


@pytest.mark.parametrize("server", [{}, {"consistency": "async"}, {"consistency": "bounded"}, {"backup_trainers": 1}])
def test_failures_cost_the_time_of_the_missing_trainers(server):
    calm = deployment(4, 2, forward_s=1.0, **SMALL, **server)
    failing = replace(calm, failure_every_s=100.0, restart_s=5.0)
    without = simulate(calm).samples_per_second
    found = simulate(failing, seconds=500.0)
    assert found.failures > 10
    # A trainer is missing for 5 of every 105 s, and its last step is lost; bounded and backup may lose more.
    kept = found.samples_per_second / without
    assert 0.85 < kept < 1.0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("consistency", ["sync", "async"])
@pytest.mark.parametrize("trainers", [16, 64])
def test_with_many_trainers_failures_cost_the_time_of_those_that_are_missing(trainers, consistency):
    every_s, restart_s, seconds = trainers * 2.5, 5.0, 100.0
    calm = deployment(trainers, 2, forward_s=1.0, consistency=consistency, **SMALL)
    found = simulate(replace(calm, failure_every_s=every_s, restart_s=restart_s), warm=3, seconds=seconds)
    expected = trainers * seconds / (every_s + restart_s)
    assert found.failures == pytest.approx(expected, abs=3 * expected**0.5)
    # A trainer that failed is missing until the replacement has joined; the step that it was in is lost, and in sync
    # the replacement waits for the next one.
    lost_s = [found.failures * (restart_s + steps * calm.forward_s) for steps in (0, 2)]
    least, most = (1 - lost / (trainers * seconds) for lost in reversed(lost_s))
    kept = found.samples_per_second / (trainers / calm.forward_s)
    assert least - 0.01 < kept < most + 0.01


@pytest.mark.parametrize(("trainers", "servers"), [(4, 2), (64, 8)])
def test_a_trainer_that_is_lost_before_any_knows_of_the_step_does_not_stall_it(trainers, servers):
    """The next step is decided with an update, and known once all servers have made that."""
    apply_s = 0.3
    shard = 4 * FIRST_BUCKET_BYTES
    costs = replace(FREE, update_byte_s=apply_s / (shard * (trainers + 1)))

    class Run(ModelledRun):
        def before_event(self):
            assert self.now < 60, f"no update since {self.updates[-1][0]:.1f} s"

        def applied(self, *update):
            super().applied(*update)
            if len(self.updates) == 3:
                self.after(apply_s / 20, self.kill, self.processes[1])

    many = deployment(trainers, servers, message_bytes=shard * servers, link=INFINITE, costs=costs, restart_s=1e6)
    run = Run(many)
    run.measure(updates=4, warm=1)
    assert run.failures == 1
    times = [at for at, _ in run.updates]
    assert [count for _, count in run.updates][3:] == [trainers - 1] * (len(times) - 3)
    assert max(after - before for before, after in pairwise(times)) < 3 * (COMPUTE_S + apply_s)


def test_the_update_with_which_the_servers_go_on_after_a_loss_takes_its_time():
    apply_s = 0.3
    costs = replace(FREE, update_byte_s=apply_s / (1e6 * 3))

    class Run(ModelledRun):
        def applied(self, *update):
            super().applied(*update)
            if len(self.updates) == 3:  # trainer 1 is slow: the others have pushed and wait for it when it is killed
                self.after(apply_s + 3 * COMPUTE_S, self.kill, self.processes[1])

    many = deployment(3, 1, message_bytes=1e6, link=INFINITE, costs=costs, restart_s=1e6, by_bucket=False)
    run = Run(replace(many, slow=SlowdownSpec(1, 5.0)))
    run.measure(updates=4, warm=1)
    assert run.failures == 1
    (_, three), (lost_at, two), (next_at, _) = run.updates[2:5]
    assert (three, two) == (3, 2)
    assert next_at - lost_at == pytest.approx(COMPUTE_S + apply_s)

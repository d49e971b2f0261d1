"""The state machine of a run's simulations, without a process: events in, actions out."""

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from paramserver.config import SimulationsConfig
from paramserver.errors import CheckpointError
from paramserver.online.protocol import Header, MessageKind, SimulationReport, TrainerJoined
from paramserver.online.sampler import CheckedSampler
from paramserver.online.tracker import (
    ExternalSimulations,
    KillProcess,
    ManagedSimulations,
    SimulationState,
    StartProcess,
    TrackerEvent,
    describe_exit,
    format_simulations,
)

NOTHING_RECEIVED = TrainerJoined("tcp://127.0.0.1:1", {}, {})


class Numbers:
    """Draws the number of the simulation."""

    def draw(self, index):
        return [float(index)]


def started(trainers=1, state=None, joined=None, begun=True, **options):
    defaults = {"command": "x", "count": 3, "steps": 10, "timeout_s": 60.0, "max_restarts": 2}
    config = SimulationsConfig(**{**defaults, **options})
    sampler = CheckedSampler(Numbers(), (("a", 0.0, 1.0),), "Numbers")
    tracker = ManagedSimulations(config, trainers, sampler, Path("logs"))
    if state is not None:
        tracker.load_state_dict(state)
    if begun:
        tracker.on_trainers_joined(joined or [NOTHING_RECEIVED] * trainers, 0.0)
    return tracker


def outside(trainers=1, state=None, joined=None, first_s=100.0, **options):
    tracker = ExternalSimulations(SimulationsConfig(**{"timeout_s": 60.0, **options}), trainers, first_s)
    if state is not None:
        tracker.load_state_dict(state)
    tracker.on_trainers_joined(joined or [NOTHING_RECEIVED] * trainers, 0.0)
    return tracker


def header(kind, simulation, step=0, member=0, members=1, attempt=0):
    return Header(kind, simulation, step, member, members, attempt)


def hello(tracker, simulation, now=0.0, parameters=(), **fields):
    message = header(MessageKind.HELLO, simulation, **fields)
    assert tracker.check_hello(message) is None
    tracker.on_hello(message, parameters, now)


def bye(tracker, simulation, samples, now=0.0, **fields):
    tracker.on_bye(header(MessageKind.BYE, simulation, samples, **fields), now)


def report(tracker, received, now, active=(), trainer=0):
    tracker.on_report(trainer, SimulationReport(received, [(simulation, 0) for simulation in active]), now)


def of(kind, actions):
    return [action for action in actions if isinstance(action, kind)]


def starts(tracker, now=0.0):
    return [(one.simulation, one.attempt) for one in of(StartProcess, tracker.poll(now))]


def notes(tracker, now):
    return [(one.kind, one.simulation) for one in of(TrackerEvent, tracker.poll(now))]


def finish(tracker, simulation, now, attempt=0, total=10, settled=True):
    """A simulation sends all samples and BYE, and ends."""
    hello(tracker, simulation, now, attempt=attempt)
    report(tracker, {simulation: total}, now)
    bye(tracker, simulation, total, now, attempt=attempt)
    tracker.on_exit(simulation, attempt, 0, now)


# Simulations of the run.


def test_nothing_starts_before_all_trainers_have_joined():
    tracker = started(begun=False)
    assert tracker.poll(0.0) == []
    tracker.on_trainers_joined([NOTHING_RECEIVED], 1.0)
    assert of(StartProcess, tracker.poll(1.0)) == [StartProcess(0, 0, (0.0,))]


def test_at_most_so_many_run_at_once_and_a_place_is_free_when_a_process_is_gone():
    tracker = started(count=5, at_once=2)
    assert starts(tracker) == [(0, 0), (1, 0)]
    report(tracker, {0: 10}, 1.0)
    assert notes(tracker, 1.0) == [("complete", 0)]  # but its process still runs
    assert starts(tracker, 2.0) == []
    tracker.on_exit(0, 0, 0, 3.0)
    assert starts(tracker, 3.0) == [(2, 0)]
    assert tracker.counts() == {"waiting": 2, "running": 2, "complete": 1, "given_up": 0}


def test_it_is_done_when_the_last_is_complete():
    tracker = started(count=2, at_once=2)
    tracker.poll(0.0)
    finish(tracker, 1, 1.0)
    tracker.poll(1.0)
    assert not tracker.done
    finish(tracker, 0, 2.0)
    tracker.poll(2.0)
    assert tracker.done
    assert tracker.failure is None


def test_samples_of_all_trainers_and_of_earlier_runs_count():
    joined = [TrainerJoined("a", {0: 2}, {0: 3, 1: 1}), TrainerJoined("b", {0: 1}, {0: 3, 1: 1})]
    tracker = started(trainers=2, joined=joined, count=1)
    assert tracker.num_received(0) == 6
    assert tracker.num_received(1) == 1
    tracker.poll(0.0)
    report(tracker, {0: 4}, 1.0, trainer=0)
    assert notes(tracker, 1.0) == []
    report(tracker, {0: 3}, 2.0, trainer=1)
    assert tracker.num_received(0) == 10
    assert notes(tracker, 2.0) == [("complete", 0)]


@pytest.mark.parametrize(("code", "why"), [(7, "exit code 7"), (137, "SIGKILL"), (-11, "SIGSEGV")])
def test_a_crash_is_followed_by_another_attempt_with_the_same_parameters(code, why):
    tracker = started()
    tracker.poll(0.0)
    report(tracker, {0: 4}, 1.0)
    tracker.on_exit(0, 0, code, 2.0)
    actions = tracker.poll(2.0)
    (note,) = of(TrackerEvent, actions)
    assert note.kind == "restarted"
    assert why in note.text
    assert of(StartProcess, actions) == [StartProcess(0, 1, (0.0,))]
    assert tracker.restarts == 1


@pytest.mark.claim("wrong-shape")
@pytest.mark.parametrize(("code", "how"), [(1, "it ended with exit code 1"), (0, "it ended after 0 of 10 samples")])
def test_the_last_line_of_a_simulation_that_failed_is_in_every_message(code, how):
    tracker = started(max_restarts=0)
    for number in range(3):
        tracker.poll(0.0)
        hello(tracker, number, 0.5)
        tracker.on_exit(number, 0, code, 1.0, "error: u must have the shape (3,)")
        report(tracker, {}, 1.0)
        report(tracker, {}, 2.0)
        (note,) = of(TrackerEvent, tracker.poll(3.0))
        assert f'{how}, and its last line is "error: u must have the shape (3,)"; ' in note.text
    assert f'{how}, and its last line is "error: u must have the shape (3,)"; its output is in ' in tracker.failure


def test_after_its_last_restart_it_is_given_up_and_a_new_one_takes_its_place():
    tracker = started(count=2, max_restarts=1)
    tracker.poll(0.0)
    tracker.on_exit(0, 0, 1, 1.0)
    assert starts(tracker, 1.0) == [(0, 1)]
    tracker.on_exit(0, 1, 1, 2.0)
    actions = tracker.poll(2.0)
    assert [(one.kind, one.text.endswith("given up for simulation 2")) for one in of(TrackerEvent, actions)] == [
        ("given_up", True)
    ]
    assert of(StartProcess, actions) == [StartProcess(1, 0, (1.0,))]
    finish(tracker, 1, 3.0)
    assert starts(tracker, 3.0) == [(2, 0)]
    finish(tracker, 2, 4.0)
    tracker.poll(4.0)
    assert tracker.done
    assert tracker.counts() == {"waiting": 0, "running": 0, "complete": 2, "given_up": 1}


def test_three_given_up_in_a_row_fail_the_run_with_one_message():
    tracker = started(count=9, max_restarts=1)
    tries = 0
    while tracker.failure is None:
        for number, attempt in starts(tracker, float(tries)):
            tries += 1
            tracker.on_exit(number, attempt, 3, float(tries))
    assert tries == 6
    assert tracker.failure == (
        "3 simulations in a row failed 2 times each; the last of them, simulation 2: it ended with exit code 3; "
        "its output is in logs/simulation-2.log"
    )
    assert tracker.poll(99.0) == []


def starts_of_a_resume(tracker, count, received):
    resumed = started(count=count, max_restarts=0, state=tracker.state_dict(), at_once=9, begun=False)
    resumed.on_trainers_joined([TrainerJoined("tcp://127.0.0.1:1", received, {})], 0.0)
    return starts(resumed)


def fail(tracker, numbers):
    for number in numbers:
        assert tracker.failure is None
        assert starts(tracker, float(number)) == [(number, 0)]
        tracker.on_exit(number, 0, 1, float(number))
    tracker.poll(9.0)
    assert f"simulation {numbers[-1]}" in tracker.failure


@pytest.mark.parametrize(("count", "expected"), [(4, [(0, 1), (1, 1), (2, 1), (3, 0)]), (1, [(2, 1)])])
def test_a_resume_starts_those_again_that_failed_in_a_row(count, expected):
    """Of one simulation, each is the replacement of the one before, and the last is the one that is left."""
    tracker = started(count=count, max_restarts=0)
    fail(tracker, (0, 1, 2))
    assert starts_of_a_resume(tracker, count, {}) == expected


def test_a_resume_draws_others_where_parameters_may_be_the_cause():
    tracker = started(count=4, max_restarts=0)
    starts(tracker)
    finish(tracker, 0, 0.0)
    fail(tracker, (1, 2, 3, 4))  # one more than three, as simulation 0 has come further
    assert starts_of_a_resume(tracker, 4, {0: 10}) == [(5, 0), (6, 0), (7, 0)]


def test_one_complete_in_between_breaks_the_row():
    tracker = started(count=9, max_restarts=0)
    for number in range(8):
        assert starts(tracker, float(number)) == [(number, 0)]
        if number % 3 == 2:
            finish(tracker, number, float(number))
        else:
            tracker.on_exit(number, 0, 1, float(number))
    tracker.poll(8.0)
    assert tracker.failure is None
    assert tracker.counts()["given_up"] == 6


@pytest.mark.parametrize(("better", "limit"), [(0, 3), (2, 5), (9, 10)])
def test_it_takes_more_in_a_row_where_others_come_further(better, limit):
    tracker = started(count=40, at_once=better + 1, max_restarts=0)
    tracker.poll(0.0)
    report(tracker, dict.fromkeys(range(better), 2), 1.0)
    for number in range(better, better + limit):
        assert tracker.failure is None
        tracker.on_exit(number, 0, 1, 1.0)
        tracker.poll(1.0)
    assert f"{limit} simulations in a row failed 1 time each" in tracker.failure


def test_silence_ends_a_process_and_then_counts_as_a_failure():
    tracker = started()
    tracker.poll(0.0)
    assert tracker.poll(60.0) == []
    assert tracker.poll(60.5) == [KillProcess(0, "it was silent for 60 s")]
    assert tracker.poll(61.0) == []  # reported once
    hello_late = header(MessageKind.HELLO, 0)
    tracker.on_hello(hello_late, (), 61.0)
    tracker.on_exit(0, 0, 143, 62.0)
    actions = tracker.poll(62.0)
    assert "silent for 60 s; it is started again" in of(TrackerEvent, actions)[0].text
    assert of(StartProcess, actions) == [StartProcess(0, 1, (0.0,))]


def test_silence_counts_from_the_start_and_not_from_before_the_draw():
    tracker = started(at_once=2)
    assert [one.simulation for one in of(StartProcess, tracker.poll(0.0, max_starts=1))] == [0]
    tracker.on_started(0, 70.0)
    assert [one.simulation for one in of(StartProcess, tracker.poll(70.0, max_starts=1))] == [1]
    tracker.on_started(1, 140.0)
    mark = header(MessageKind.HELLO, 0)
    tracker.on_hello(mark, (), 141.0)
    assert tracker.poll(200.0, max_starts=1) == []
    assert tracker.poll(200.5) == [KillProcess(1, "it was silent for 60 s")]


@pytest.mark.parametrize("sign", ["hello", "bye", "sample or heartbeat"])
def test_any_message_is_a_sign_of_life(sign):
    tracker = started(group_size=2)
    tracker.poll(0.0)
    signs = {
        "hello": lambda: hello(tracker, 0, 50.0, members=2),
        "bye": lambda: bye(tracker, 0, 5, 50.0, members=2),
        "sample or heartbeat": lambda: report(tracker, {}, 50.0, active=[0]),
    }
    tracker.on_report(0, SimulationReport({}, [(0, 1)]), 55.0)
    report(tracker, {0: 3}, 58.0)  # samples in flight are no sign of life of their sender
    signs[sign]()
    assert tracker.poll(109.0) == []
    late = 111.0 if sign != "bye" else 116.0  # after BYE no sign of life is needed
    assert tracker.poll(late - 2) == []
    assert of(KillProcess, tracker.poll(late)) == [KillProcess(0, "it was silent for 60 s")]


def test_one_silent_member_is_silence_although_the_others_send_heartbeats():
    tracker = started(group_size=3)
    tracker.poll(0.0)
    for now in range(1, 62):
        tracker.on_report(0, SimulationReport({}, [(0, 0), (0, 2)]), float(now))
        assert bool(of(KillProcess, tracker.poll(float(now)))) == (now == 61)


ALIVE = [(0, 0), (0, 1)]


def group_report(tracker, trainer, now, **fields):
    tracker.on_report(trainer, SimulationReport(fields.pop("received", {}), ALIVE, **fields), now)


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("moves", [{"received": {0: 4}}, {"pending": [0]}, {"parts": {0: 3}}])
def test_a_group_whose_members_wait_for_each_other_is_ended_or_reported(managed, moves):
    """They send heartbeats; a full buffer, for which they may wait, shows by samples that are pending."""
    make = started if managed else outside
    tracker = make(trainers=2, count=1, group_size=2)
    for member in range(2 if not managed else 0):
        hello(tracker, 0, 0.0, members=2, member=member)
    tracker.poll(0.0)
    found = []
    for now in range(1, 200):
        group_report(tracker, 0, float(now), parts={0: 2})
        group_report(tracker, 1, float(now), **(moves if now == 30 else {}))
        found += [(now, action) for action in tracker.poll(float(now))]
    [(now, action)] = [one for one in found if not isinstance(one[1], StartProcess)]
    assert now == (92 if "parts" in moves else 91)
    waited = "its processes waited for each other's parts of a sample for 60 s"
    assert action == KillProcess(0, waited) if managed else "has waited for parts of a sample for 60 s" in action.text


def test_a_group_that_waits_for_the_replacement_of_a_trainer_is_not_ended():
    tracker = started(trainers=2, count=1, group_size=2)
    tracker.poll(0.0)
    for now in range(1, 300):
        group_report(tracker, 0, float(now), parts={0: 2})
        if now < 50 or now >= 250:
            group_report(tracker, 1, float(now))
        if now == 248:
            tracker.on_trainer_replaced(1, NOTHING_RECEIVED)
        assert tracker.poll(float(now)) == []


def test_outside_a_group_with_a_missing_member_is_reported_once():
    tracker = outside(count=1, group_size=2)
    hello(tracker, 0, 0.0, members=2)
    found = []
    for now in range(1, 200):
        tracker.on_report(0, SimulationReport({}, [(0, 0)]), float(now))
        found += notes(tracker, float(now))
    assert found == [("silent", 0)]
    assert tracker.failure is None


def test_a_process_that_cannot_be_killed_fails_the_run():
    tracker = started(timeout_s=1.0)
    tracker.poll(0.0)
    assert of(KillProcess, tracker.poll(2.0))
    tracker.poll(31.0)
    assert tracker.failure is None
    tracker.poll(33.0)
    assert tracker.failure == "simulation 0 was to be ended (it was silent for 1 s) and still runs"


def test_one_that_continues_after_its_last_sample_is_complete_and_killed_later():
    tracker = started(count=2)
    tracker.poll(0.0)
    report(tracker, {0: 10}, 1.0)
    assert notes(tracker, 1.0) == [("complete", 0)]
    report(tracker, {}, 60.0, active=[0])  # it may send for ever
    assert tracker.poll(61.0) == []
    assert tracker.poll(61.5) == [KillProcess(0, "it continued for 60 s after its last sample was received")]
    tracker.on_exit(0, 0, 143, 62.0)
    assert starts(tracker, 62.0) == [(1, 0)]
    assert tracker.restarts == 0


def test_an_early_end_counts_as_a_crash_once_all_trainers_have_reported():
    tracker = started(trainers=2, count=1)
    tracker.poll(0.0)
    report(tracker, {0: 4}, 1.0)
    tracker.on_exit(0, 0, 0, 1.5)
    for now in (2.0, 3.0):
        report(tracker, {0: 4}, now)
        assert notes(tracker, now) == []
        assert tracker.counts()["running"] == 1
    report(tracker, {}, 3.1, trainer=1)
    assert notes(tracker, 3.1) == []
    report(tracker, {}, 3.2, trainer=1)
    (note,) = of(TrackerEvent, tracker.poll(3.2))
    assert "it ended after 4 of 10 samples" in note.text


@pytest.mark.parametrize("steps", [10, None])
def test_a_command_that_sends_nothing_is_referred_to_the_documents(steps):
    tracker = started(count=1, steps=steps)
    tracker.poll(0.0)
    tracker.on_exit(0, 0, 0, 1.0)
    report(tracker, {}, 2.0)
    report(tracker, {}, 3.0)
    (note,) = of(TrackerEvent, tracker.poll(3.0))
    assert "it ended well without sending anything; the program of simulations.command must send its" in note.text
    documents = re.findall(r"\w[\w/]*\.md", note.text)
    assert documents == ["examples/clients/README.md", "docs/protocol.md"]
    assert all((Path(__file__).parents[3] / document).is_file() for document in documents)


def test_reports_in_flight_do_not_decide():
    tracker = started()
    tracker.poll(0.0)
    tracker.on_exit(0, 0, 0, 1.0)
    for _ in range(5):
        report(tracker, {0: 4}, 1.1)
    assert notes(tracker, 1.1) == []
    report(tracker, {0: 10}, 1.9)
    assert notes(tracker, 1.9) == [("complete", 0)]


def test_without_reports_an_exit_is_decided_after_the_timeout():
    tracker = started()
    tracker.poll(0.0)
    tracker.on_exit(0, 0, 0, 1.0)
    assert notes(tracker, 60.9) == []
    assert notes(tracker, 61.1) == [("restarted", 0)]


def test_a_crash_after_bye_waits_for_the_last_reports():
    tracker = started()
    tracker.poll(0.0)
    bye(tracker, 0, 10, 1.0)
    tracker.on_exit(0, 0, 139, 1.0)
    assert notes(tracker, 1.0) == []
    report(tracker, {0: 10}, 1.5)
    assert notes(tracker, 1.5) == [("complete", 0), ("exited", 0)]


@pytest.mark.parametrize("order", ["received first", "ended first"])
def test_a_crash_after_the_last_sample_is_reported_and_not_restarted(order):
    tracker = started(count=2)
    begun = tracker.poll(0.0)
    hello(tracker, 0)
    if order == "received first":
        report(tracker, {0: 10}, 1.0)
        assert notes(tracker, 1.0) == [("complete", 0)]
        tracker.on_exit(0, 0, 7, 2.0)
    else:
        report(tracker, {0: 4}, 1.0)
        tracker.on_exit(0, 0, 7, 2.0)
        begun = tracker.poll(2.0)
        assert not of(TrackerEvent, begun)
        report(tracker, {0: 10}, 3.0)
    actions = tracker.poll(3.0)
    assert of(TrackerEvent, actions)[-1].text == (
        "of simulation 0 all samples had arrived before it ended with exit code 7; it counts as complete"
    )
    assert [one.simulation for one in of(StartProcess, [*begun, *actions])][-1] == 1
    assert (tracker.restarts, tracker.num_complete) == (0, 1)


def test_a_crash_with_samples_missing_is_reported_with_its_exit_code():
    tracker = started()
    tracker.poll(0.0)
    hello(tracker, 0)
    tracker.on_exit(0, 0, 7, 1.0)
    for now in (1.5, 2.5):
        report(tracker, {0: 9}, now)
    (note,) = of(TrackerEvent, tracker.poll(2.5))
    assert note.text == "simulation 0, attempt 0: it ended with exit code 7; it is started again"


def test_a_crash_is_not_decided_while_its_last_samples_wait_for_room():
    """However long the buffer is full."""
    tracker = started(count=1)
    tracker.poll(0.0)
    hello(tracker, 0)
    tracker.on_exit(0, 0, 7, 1.0)
    for now in range(2, 200):
        tracker.on_report(0, SimulationReport({0: 4}, pending=[0]), float(now))
        assert notes(tracker, float(now)) == []
    report(tracker, {0: 10}, 200.0)
    assert notes(tracker, 200.0) == [("complete", 0), ("exited", 0)]


def test_samples_that_are_counted_late_spare_a_restart():
    tracker = started(count=2)
    tracker.poll(0.0)
    tracker.on_exit(0, 0, 1, 1.0)
    tracker.config = SimulationsConfig(command="x", count=2, steps=10, at_once=0)  # no place for it yet
    assert starts(tracker, 1.0) == []
    report(tracker, {0: 10}, 2.0)
    assert notes(tracker, 2.0) == [("complete", 0)]
    tracker.config = SimulationsConfig(command="x", count=2, steps=10)
    assert starts(tracker, 3.0) == [(1, 0)]


def test_where_steps_are_not_known_bye_completes():
    tracker = started(steps=None, count=1, group_size=2)
    tracker.poll(0.0)
    report(tracker, {0: 7}, 1.0)
    bye(tracker, 0, 7, 1.0, member=0, members=2)
    assert notes(tracker, 1.0) == []
    bye(tracker, 0, 7, 1.0, member=1, members=2)
    assert notes(tracker, 1.0) == [("complete", 0)]
    assert tracker.simulations[0].total == 7
    assert tracker.done


def test_samples_of_which_a_part_was_refused_are_not_lost():
    tracker = started(steps=None, count=1, group_size=2)
    starts(tracker)
    for member, accepted in ((0, 6), (1, 9)):
        bye(tracker, 0, accepted, 1.0, member=member, members=2)
    tracker.on_exit(0, 0, 0, 1.0)
    for now in (2.0, 3.0, 4.0):
        report(tracker, {0: 6}, now)
        tracker.poll(now)
    assert (tracker.counts()["complete"], tracker.num_received(0), tracker.num_lost(0)) == (1, 6, 0)


@pytest.mark.parametrize(
    ("samples", "why"), [(None, "ended after 3 samples without close()"), (0, "ended with no sample")]
)
def test_where_steps_are_not_known_an_end_without_bye_or_samples_is_a_failure(samples, why):
    tracker = started(steps=None, count=1)
    tracker.poll(0.0)
    report(tracker, {0: 3 if samples is None else 0}, 0.5)
    if samples is not None:
        bye(tracker, 0, samples, 0.6)
    tracker.on_exit(0, 0, 0, 1.0)
    report(tracker, {}, 2.0)
    report(tracker, {}, 3.0)
    (note,) = of(TrackerEvent, tracker.poll(3.0))
    assert why in note.text


def test_messages_of_an_old_attempt_do_not_count():
    tracker = started(steps=None)
    tracker.poll(0.0)
    tracker.on_exit(0, 0, 1, 1.0)
    assert starts(tracker, 1.0) == [(0, 1)]
    bye(tracker, 0, 5, 2.0, attempt=0)
    tracker.on_exit(0, 0, 0, 2.0)
    assert tracker.poll(2.0) == []
    assert tracker.simulations[0].process_alive
    assert "must be the present 1" in tracker.check_hello(header(MessageKind.HELLO, 0, attempt=0))
    hello(tracker, 0, attempt=1)


def test_only_simulations_that_run_are_accepted():
    tracker = started(group_size=2)
    tracker.poll(0.0)
    assert tracker.check_hello(header(MessageKind.HELLO, 1, members=2)).startswith(
        "simulation (1) must be one that the run has"
    )
    assert tracker.check_hello(header(MessageKind.HELLO, 77, members=2)).startswith("simulation (77) must be")
    assert "group of 3, which must be simulations.group_size (2)" in tracker.check_hello(
        header(MessageKind.HELLO, 0, members=3)
    )
    assert tracker.check_hello(header(MessageKind.HELLO, 0, members=2)) is None
    assert "starts its simulations itself" in tracker.on_finish(0.0)


def test_how_a_process_ended():
    assert [describe_exit(code) for code in (0, 1, 128, 255, 130, -40)] == [
        "it ended with exit code 0",
        "it ended with exit code 1",
        "it ended with exit code 128",
        "it ended with exit code 255",
        "it was killed by SIGINT",
        "it was killed by signal 40",
    ]
    assert format_simulations(list(range(12))) == "simulations 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"


# Dealing by simulation.


def test_a_simulation_goes_to_the_trainer_with_the_fewest_that_run_then_with_the_fewest_in_all():
    tracker = started(trainers=3, count=9, at_once=9, deal="simulation")
    tracker.poll(0.0)
    assert [tracker.trainer_for(i) for i in (5, 0, 3, 1)] == [0, 1, 2, 0]
    finish(tracker, 5, 1.0)
    finish(tracker, 3, 1.0)
    tracker.poll(1.0)
    assert [tracker.trainer_for(i) for i in (2, 4, 6)] == [2, 1, 0]
    assert tracker.trainer_for(5) == 0  # it stays
    assert started(deal="round_robin").trainer_for(0) is None


def test_the_trainer_of_a_simulation_stays_over_a_resume_if_it_is_still_there():
    tracker = started(trainers=3, count=3, at_once=3, deal="simulation")
    tracker.poll(0.0)
    assert [tracker.trainer_for(i) for i in (2, 1, 0)] == [0, 1, 2]
    again = started(trainers=3, state=tracker.state_dict(), count=3, at_once=3, deal="simulation")
    assert [again.trainer_for(i) for i in (0, 1, 2)] == [2, 1, 0]
    fewer = started(trainers=2, state=tracker.state_dict(), count=3, at_once=3, deal="simulation")
    fewer.poll(0.0)
    assert [fewer.trainer_for(i) for i in (1, 2)] == [1, 0]
    assert fewer.trainer_for(0) in (0, 1)


@pytest.mark.parametrize("lost", [{}, {2: 1}])
def test_a_simulation_that_was_assigned_after_the_coordinators_part_stays_with_the_trainer_that_has_samples(lost):
    """The trainers' parts of a checkpoint are newer: 2 runs by then, and 3 has taken the place of one given up."""
    joined = [TrainerJoined("a", {}, {}), TrainerJoined("b", {} if lost else {2: 1}, {}, lost)]
    options = {"trainers": 2, "joined": joined, "count": 3, "deal": "simulation"}
    before = started(trainers=2, count=3, deal="simulation")
    before.poll(0.0)
    assert before.trainer_for(0) == 0
    resumed, opened = started(state=before.state_dict(), **options), outside(state=outside().state_dict(), **options)
    hello(opened, 2)
    for tracker in (resumed, opened):
        assert tracker.trainer_for(2) == 1
        assert tracker.trainer_for(2) == 1
    everywhere = [TrainerJoined("a", {1: 4}, {}), TrainerJoined("b", {1: 5, 3: 1}, {})]  # resharded
    resumed = started(state=before.state_dict(), **{**options, "joined": everywhere, "count": 4})
    assert [resumed.trainer_for(number) for number in (0, 1, 2, 3)] == [0, 1, 0, 1]


# Resume from a checkpoint.


def opened_state(make, **options):
    tracker = make(**options)
    tracker.poll(0.0)
    hello(tracker, 0, parameters=[0.0])
    return tracker.state_dict()


@pytest.mark.parametrize(
    ("make", "resumed", "must"), [(started, outside, "must be given, as"), (outside, started, "must be null, as")]
)
def test_a_run_is_resumed_with_simulations_of_the_same_origin(make, resumed, must):
    state = opened_state(make)
    assert make(state=state).counts()["waiting"] > 0
    for one in (state, {name: value for name, value in state.items() if name not in ("deal", "parameters")}):
        with pytest.raises(CheckpointError, match=f"simulations.command or function {must} in the checkpoint"):
            resumed(state=one)


@pytest.mark.parametrize("make", [started, outside])
def test_simulations_that_were_opened_are_dealt_as_before_and_keep_their_parameters(make):
    state = opened_state(make, deal="simulation", parameters={"a": [0, 1]})
    same = {"deal": "simulation", "parameters": {"a": [0, 9]}}
    assert make(state=state, **same).simulations[0].parameters == [0.0]
    with pytest.raises(CheckpointError, match=r"simulations.deal \(round_robin\) must be .* \(simulation\), as"):
        make(state=state, **{**same, "deal": "round_robin"})
    with pytest.raises(CheckpointError, match=r"simulations.parameters \(b\) must be .* in their order \(a\), as"):
        make(state=state, **{**same, "parameters": {"b": [0, 1]}})
    del state["deal"], state["parameters"]  # of an earlier release
    assert make(state=state).counts()["waiting"] > 0
    untouched = make(deal="simulation", parameters={"a": [0, 1]}).state_dict()
    assert make(state=untouched).trainer_for(0) is None


def test_a_resumed_run_starts_only_what_is_not_complete_with_new_attempts_and_the_same_parameters():
    tracker = started(count=5, at_once=2)
    tracker._sampler._sampler.draw = lambda index: [index + 0.5]
    tracker.poll(0.0)
    finish(tracker, 0, 1.0)
    tracker.poll(1.0)
    tracker.on_exit(1, 0, 1, 2.0)
    tracker.poll(2.0)  # 1 runs in its attempt 1, 2 in its attempt 0
    again = started(count=5, at_once=9, state=tracker.state_dict(), joined=[TrainerJoined("a", {0: 10, 1: 4}, {})])
    assert of(StartProcess, again.poll(0.0)) == [
        StartProcess(1, 2, (1.5,)),
        StartProcess(2, 1, (2.5,)),
        StartProcess(3, 0, (3.0,)),
        StartProcess(4, 0, (4.0,)),
    ]
    assert again.restarts == 1
    assert again.counts()["complete"] == 1


def test_counts_decide_what_is_complete_whatever_the_state():
    tracker = started(count=2, at_once=2)
    tracker.poll(0.0)
    finish(tracker, 0, 1.0)
    tracker.poll(1.0)
    cut_earlier = [TrainerJoined("a", {0: 9, 1: 5}, {1: 5})]  # the trainer's part of the checkpoint
    again = started(count=2, at_once=2, state=tracker.state_dict(), joined=cut_earlier)
    assert starts(again) == [(0, 1)]
    assert again.in_state(SimulationState.COMPLETE)[0].id == 1


def test_failures_and_replacements_survive_a_resume():
    tracker = started(count=1, max_restarts=1)
    for _ in range(3):
        ((number, attempt),) = starts(tracker)
        tracker.on_exit(number, attempt, 1, 1.0)
    tracker.poll(1.0)
    again = started(count=1, max_restarts=1, state=tracker.state_dict())
    ((number, attempt),) = starts(again)
    assert (number, attempt) == (1, 2)
    again.on_exit(number, attempt, 1, 1.0)
    assert starts(again, 1.0) == [(2, 0)]
    assert again.counts()["given_up"] == 2


def test_more_or_fewer_simulations_may_be_wanted_of_a_resumed_run():
    tracker = started(count=2, max_restarts=0)
    tracker.poll(0.0)
    tracker.on_exit(0, 0, 1, 1.0)
    tracker.poll(1.0)
    more = started(count=4, at_once=9, state=tracker.state_dict())
    assert starts(more) == [(1, 1), (2, 0), (3, 0), (4, 0)]
    fewer = started(count=1, state=more.state_dict(), joined=[TrainerJoined("a", {1: 10}, {})])
    assert starts(fewer) == []
    assert fewer.done


# Simulations from outside.


def test_outside_it_is_done_when_count_are_complete():
    tracker = outside(count=2, steps=5)
    for number in (1, 0):
        hello(tracker, number, 1.0, parameters=[2.5])
        report(tracker, {number: 4}, 2.0)
        assert tracker.poll(2.0) == []
        report(tracker, {number: 5}, 3.0)
        assert notes(tracker, 3.0) == [("complete", number)]
    assert tracker.done
    assert "must be below simulations.count (2)" in tracker.check_hello(header(MessageKind.HELLO, 2))


def test_outside_it_is_done_when_finish_was_received_and_all_that_were_opened_are_complete():
    tracker = outside()
    hello(tracker, 40, 1.0)
    hello(tracker, 7, 1.0)
    bye(tracker, 40, 12, 2.0)
    assert notes(tracker, 2.0) == [("complete", 40)]
    assert tracker.on_finish(3.0) is None
    tracker.poll(3.0)
    assert not tracker.done
    bye(tracker, 7, 0, 4.0)
    assert notes(tracker, 4.0) == [("complete", 7)]
    assert tracker.done


def test_outside_the_parameters_of_a_simulation_outlive_a_resume():
    tracker = outside()
    hello(tracker, 4, parameters=[1.5])
    again = outside(state=tracker.state_dict())
    assert (again.client_parameters(4), again.client_parameters(5)) == ([1.5], None)


def test_outside_no_process_is_started_or_killed_and_silence_is_reported_once():
    tracker = outside(count=3, steps=5)
    hello(tracker, 0, 0.0)
    hello(tracker, 1, 0.0)
    report(tracker, {}, 50.0, active=[1])
    assert notes(tracker, 61.0) == [("silent", 0)]
    assert tracker.poll(100.0) == []
    hello(tracker, 0, 105.0, attempt=1)
    assert notes(tracker, 111.0) == [("silent", 1)]
    assert notes(tracker, 165.1) == [("silent", 0)]
    assert tracker.failure == (
        "nothing came for 60 s, and simulations 0, 1 are not complete; "
        "start what is missing and resume, or raise simulations.timeout_s"
    )


def test_outside_one_that_is_closed_after_too_few_samples_is_reported_at_once_and_named():
    tracker = outside(count=1, steps=10)
    hello(tracker, 0)
    bye(tracker, 0, 4, 1.0)
    report(tracker, {0: 4}, 2.0)
    assert tracker.poll(2.0) == []  # a report that was in flight
    report(tracker, {0: 4}, 3.0)
    (event,) = tracker.poll(3.0)
    cure = "set simulations.steps to null where simulations have different numbers of samples"
    assert event.text == f"simulation 0 was closed after 4 of 10 samples; it is waited for; {cure}"
    assert tracker.poll(4.0) == []  # once
    tracker.poll(64.0)
    assert f"; clients closed simulation 0 after too few samples: {cure}, or start what is missing" in tracker.failure
    again = outside(count=1, steps=10)
    hello(again, 0)
    bye(again, 0, 4, 1.0)
    hello(again, 0, 2.0)  # it goes on
    report(again, {0: 6}, 3.0)
    report(again, {0: 6}, 3.0)
    assert again.poll(3.0) == []


def test_outside_the_first_simulation_may_take_longer():
    tracker = outside(first_s=100.0)
    tracker.poll(100.0)
    assert tracker.failure is None
    tracker.poll(100.1)
    assert tracker.failure == (
        "no simulation came for 100 s; start clients with the address of this run, or start what is missing and "
        "resume, or raise cluster.timeout_s"
    )
    patient = outside(first_s=1.0)
    patient.poll(60.0)
    assert patient.failure is None
    patient.poll(60.1)
    assert patient.failure.endswith("or raise simulations.timeout_s")


def test_outside_the_wait_for_another_ends_too():
    tracker = outside(count=3, steps=5)
    hello(tracker, 0, 1.0)
    report(tracker, {0: 5}, 2.0)
    tracker.poll(2.0)
    tracker.poll(62.5)
    assert tracker.failure.startswith("no simulation came for 60 s after 1 of 3 were complete, and no client ")


def test_outside_a_simulation_may_be_started_again():
    tracker = outside(count=1, group_size=2)
    hello(tracker, 0, 1.0, members=2, member=0)
    bye(tracker, 0, 5, 2.0, members=2, member=0)
    hello(tracker, 0, 3.0, members=2, member=0)  # started again under the same number
    bye(tracker, 0, 9, 4.0, members=2, member=1)
    assert notes(tracker, 4.0) == []
    hello(tracker, 0, 5.0, members=2, member=1, attempt=3)
    report(tracker, {0: 5}, 5.0)
    assert "attempt (2) of simulation 0 must be at least 3" in tracker.check_hello(
        header(MessageKind.HELLO, 0, members=2, attempt=2)
    )
    for member in (0, 1):
        assert notes(tracker, 6.0) == []
        bye(tracker, 0, 9, 6.0, members=2, member=member, attempt=3)
    assert notes(tracker, 6.0) == [("complete", 0)]
    hello(tracker, 0, 7.0, members=2, attempt=3)  # what it sends are duplicates


def test_outside_a_resumed_run_knows_what_was_complete():
    tracker = outside(steps=5)
    for number in (0, 1):
        hello(tracker, number, 1.0, attempt=4)
    tracker.on_finish(2.0)
    joined = [TrainerJoined("a", {0: 5, 1: 4, 8: 5}, {})]  # 8 came between the two parts of the checkpoint
    again = outside(steps=5, state=tracker.state_dict(), joined=joined)
    assert {one.id for one in again.in_state(SimulationState.COMPLETE)} == {0, 8}
    again.poll(0.0)
    assert not again.done
    hello(again, 1, 1.0, attempt=0)
    report(again, {1: 5}, 2.0)
    again.poll(2.0)
    assert again.done


# All at random.


class World:
    """Processes that crash, hang, end too early or do well, and trainers that count what they sent."""

    def __init__(self, seed, **options):
        self.random = random.Random(seed)
        self.options = options
        self.trainers = self.random.choice([1, 2, 3])
        self.counts = [{} for _ in range(self.trainers)]
        self.processes = {}
        self.seen = set()
        self.now = 0.0

    def restart(self, state):
        self.processes.clear()
        joined = [TrainerJoined("a", dict(counts), {}) for counts in self.counts]
        self.tracker = started(self.trainers, state, joined, begun=False, **self.options)
        self.tracker.on_trainers_joined(joined, self.now)

    def step(self):
        self.now += self.random.random()
        for number, process in list(self.processes.items()):
            self.move(number, process)
        for trainer, counts in enumerate(self.counts):
            if self.random.random() < 0.7:
                self.tracker.on_report(trainer, SimulationReport(dict(counts)), self.now)
        self.carry_out(self.tracker.poll(self.now))

    def move(self, number, process):
        fate = self.random.random()
        steps = self.options["steps"]
        if process["hangs"]:
            return
        if fate < 0.02:
            process["hangs"] = True
        elif fate < 0.06:
            self.end(number, self.random.choice([1, 137, 0]))
        elif process["sent"] < steps:
            step, process["sent"] = process["sent"], process["sent"] + 1
            if (number, step) not in self.seen:  # trainers drop duplicates
                self.seen.add((number, step))
                counts = self.counts[(number + step) % self.trainers]
                counts[number] = counts.get(number, 0) + 1
        else:
            self.tracker.on_bye(header(MessageKind.BYE, number, steps, attempt=process["attempt"]), self.now)
            self.end(number, 0)

    def end(self, number, code):
        self.tracker.on_exit(number, self.processes.pop(number)["attempt"], code, self.now)

    def carry_out(self, actions):
        for action in actions:
            if isinstance(action, StartProcess):
                assert action.simulation not in self.processes
                assert action.parameters == (float(action.simulation),)
                self.processes[action.simulation] = {"attempt": action.attempt, "sent": 0, "hangs": False}
            elif isinstance(action, KillProcess):
                self.end(action.simulation, 143)
        self.check()

    def check(self):
        assert len(self.processes) <= self.options["at_once"]
        assert {one.id for one in self.tracker.simulations.values() if one.process_alive} == self.processes.keys()
        for one in self.tracker.simulations.values():
            assert one.failures <= self.options["max_restarts"] + 1
            assert (one.state is SimulationState.GIVEN_UP) == (one.failures > self.options["max_restarts"])
            if one.state is SimulationState.COMPLETE:
                assert self.tracker.num_received(one.id) == self.options["steps"]
        assert sum(self.tracker.counts().values()) - self.tracker.counts()["given_up"] == self.options["count"]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_to_processes_all_that_was_wanted_is_complete_in_the_end(seed, monkeypatch):
    monkeypatch.setattr("paramserver.online.tracker.MAX_GIVEN_UP_IN_A_ROW", 10**6)
    world = World(seed, count=12, at_once=seed % 4 + 1, steps=9, timeout_s=5.0, max_restarts=seed % 3)
    world.restart(None)
    resumes = restarts = 0
    for _ in range(20_000):
        world.step()
        restarts = max(restarts, world.tracker.restarts)
        if world.tracker.done:
            break
        if world.random.random() < 0.01:
            resumes += 1
            world.restart(world.tracker.state_dict())
    assert world.tracker.done
    assert world.tracker.failure is None
    complete = [one.id for one in world.tracker.in_state(SimulationState.COMPLETE)]
    assert len(complete) == len(set(complete)) == 12
    assert all((number, step) in world.seen for number in complete for step in range(9))
    assert restarts > 0 or seed % 3 == 0


def test_what_a_trainer_knows_as_lost_counts_once_after_a_resume():
    before = outside(count=1, steps=10)
    hello(before, 0)
    report(before, {0: 4}, 0.0)
    before.on_report(0, SimulationReport({}, lost={0: 3}), 0.0)
    state = before.state_dict()
    # With another number of trainers none knows them: the checkpoint has their number.
    joined = [TrainerJoined("a", {0: 4}, {}), TrainerJoined("b", {}, {})]
    assert outside(trainers=2, count=1, steps=10, state=state, joined=joined).num_lost(0) == 3
    after = outside(count=1, steps=10, state=state, joined=[TrainerJoined("a", {0: 4}, {}, {0: 3})])
    assert (after.num_lost(0), after.num_complete) == (3, 0)
    hello(after, 0)
    assert after.num_lost(0) == 3
    report(after, {0: 5}, 0.0)
    assert after.num_lost(0) == 0


def test_what_a_trainer_lost_after_the_coordinators_part_was_made_counts_after_a_resume():
    before = outside(count=1, steps=10)
    hello(before, 0)
    report(before, {0: 9}, 0.0)
    before.on_trainer_replaced(0, TrainerJoined("b", {0: 8}, {}))
    before.on_bye(Header(MessageKind.BYE, 0, 10), 0.0)
    for _ in range(3):
        report(before, {0: 8}, 0.0)
        before.poll(0.0)
    assert (before.num_lost(0), before.num_complete) == (2, 1)
    # No trainer knows these two. Then another one is lost, with the part that stands for it in the checkpoint.
    after = outside(count=1, steps=10, state=before.state_dict(), joined=[TrainerJoined("c", {0: 7}, {}, {0: 1})])
    assert (after.num_lost(0), after.num_complete) == (3, 1)


def test_of_a_simulation_that_was_given_up_what_died_with_a_trainer_counts_once():
    tracker = started(count=1, at_once=1, steps=10, max_restarts=0)
    starts(tracker)
    hello(tracker, 0)
    report(tracker, {0: 6}, 0.0)
    tracker.on_exit(0, 0, 1, 0.0)
    for now in range(1, 4):
        report(tracker, {}, now)
        tracker.poll(now)
    assert tracker.counts()["given_up"] == 1
    tracker.on_trainer_replaced(0, TrainerJoined("b", {0: 1}, {}, {0: 2}))
    assert tracker.num_lost(0) == 5
    tracker.on_trainer_replaced(0, TrainerJoined("c", {0: 1}, {}, {0: 2}))
    assert tracker.num_lost(0) == 5


class ModelTrainer:
    """What a trainer has of each simulation, and what it reports."""

    def __init__(self, kept=()):
        self.received = set(kept)
        self.lost = set()

    def receive(self, key):
        self.received.add(key)
        self.lost.discard(key)

    def report(self, tracker, index):
        received, lost = counted(self.received), counted(self.lost)
        tracker.on_report(index, SimulationReport(received, [], lost=lost), 0.0)


class ModelClient:
    """A client of one simulation: sends, hears of ACKs later, and closes once it has heard of all."""

    def __init__(self, number, steps):
        self.number, self.unsent = number, list(range(steps))
        self.unheard, self.acked = [], []
        self.steps, self.closed = steps, False

    def move(self, rng, tracker, trainers):
        if self.unheard and rng.random() < 0.4:
            self.acked.append(self.unheard.pop(0))
        elif self.unsent:
            step = self.unsent.pop(0)
            trainers[step % len(trainers)].receive((self.number, step))
            self.unheard.append(step)
        elif not self.unheard and not self.closed:
            self.closed = True
            bye(tracker, self.number, self.steps)
            if isinstance(tracker, ManagedSimulations):
                tracker.on_exit(self.number, 0, 0, 0.0)

    def meet(self, index, trainers):
        """The replacement of a trainer hears what its predecessor had, and gets what that had not acknowledged."""
        if self.closed:
            return
        mine = {step for step in self.acked if step % len(trainers) == index}
        trainers[index].lost |= {(self.number, step) for step in mine} - trainers[index].received
        for step in self.unheard:
            if step % len(trainers) == index:
                trainers[index].receive((self.number, step))


def counted(keys):
    return dict(Counter(number for number, _ in keys))


@pytest.mark.parametrize("kind", [started, outside])
@pytest.mark.parametrize("steps", [12, None])
@pytest.mark.parametrize("seed", range(25))
def test_received_and_lost_are_what_was_sent_whenever_trainers_die(kind, steps, seed):
    rng = random.Random(f"{kind.__name__} {steps} {seed}")
    tracker = kind(2, count=3, steps=steps, **({"at_once": 3} if kind is started else {"fields": {"u": [2]}}))
    trainers = [ModelTrainer(), ModelTrainer()]
    clients = [ModelClient(number, 12) for number in range(3)]
    tracker.poll(0.0)
    for client in clients:
        hello(tracker, client.number)
    deaths = 0
    while deaths < 2 or not all(client.closed for client in clients):
        move = rng.random()
        if move < 0.85:
            rng.choice(clients).move(rng, tracker, trainers)
        elif move < 0.97:
            index = rng.randrange(2)
            trainers[index].report(tracker, index)
            tracker.poll(0.0)
        elif deaths < 4:
            deaths += 1
            index = rng.randrange(2)
            kept = [key for key in sorted(trainers[index].received) if rng.random() < 0.8]  # that were applied
            trainers[index] = ModelTrainer(kept)
            tracker.on_trainer_replaced(index, TrainerJoined("tcp://127.0.0.1:2", counted(kept), {}))
            for client in clients:
                client.meet(index, trainers)
    for _ in range(4):
        for index, trainer in enumerate(trainers):
            trainer.report(tracker, index)
        tracker.poll(10.0)
    assert tracker.done
    assert tracker.restarts == 0
    received = [tracker.num_received(number) for number in range(3)]
    assert sum(received) == sum(len(trainer.received) for trainer in trainers)
    assert [got + tracker.num_lost(number) for number, got in enumerate(received)] == [12, 12, 12]

"""What the supervisor concludes from the errors and ends of ranks; the ranks here are values."""

import _posixsubprocess
import errno
import json
import os
import signal
import subprocess
import threading
import time
from multiprocessing.util import spawnv_passfds
from types import SimpleNamespace

import pytest
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from paramserver.config import ClusterConfig, Config, ServerConfig, roles
from paramserver.errors import Interrupted, PeerLost, TrainingError
from paramserver.runs.rundir import RunDir
from paramserver.runtime import supervisor
from paramserver.runtime.supervisor import Supervisor, describe_error


class Run:
    """A supervisor of one server, in rpc, and ``trainers`` trainers that never start again unless told."""

    def __init__(self, folder, trainers=2, mode="rpc", **cluster):
        cluster = {"num_trainers": trainers, "max_restarts": 0, **cluster}
        config = Config(mode=mode, cluster=ClusterConfig(**cluster), server=ServerConfig())
        self.records, self.signals = [], []
        sink = SimpleNamespace(write=self.records.append, close=lambda: None)
        self.folder = folder / "run"
        (self.folder / "logs").mkdir(parents=True)
        self.supervisor = Supervisor(config, RunDir(self.folder), [], sink)
        self.supervisor._ranks = [self._rank(role) for role in roles(config, trainers + (mode == "rpc"))]

    def _rank(self, role):
        return SimpleNamespace(
            role=role,
            global_rank=role.global_rank,
            title=f"rank {role.global_rank} ({role})",
            failure={},
            exit_code=None,
            done=False,
            left=False,
            generation=1,
            trains=False,
            started_at=0.0,
            sent=set(),
            send_signal=lambda number: self.signals.append((role.global_rank, number)),
        )

    def end(self, rank, exit_code, kind=None, message="on purpose"):
        process = self.supervisor._ranks[rank]
        if kind is not None:
            failure = {"kind": kind, "message": message, "exit_code": exit_code, "traceback": ""}
            self.supervisor._on_error(process, failure)
        process.exit_code = exit_code
        self.supervisor._on_exit(process, exit_code)


def test_a_replacement_that_comes_too_late_is_no_failure(tmp_path):
    run = Run(tmp_path)
    run.end(2, 1, "RunEnded")
    assert not run.supervisor._is_failing
    assert run.signals == []
    assert run.supervisor._failed == []
    run.end(1, 1, "TaskError")  # an error of its own is one
    assert run.supervisor._is_failing
    assert run.supervisor._first_failure().global_rank == 1


@pytest.mark.parametrize("view_first", [False, True])
def test_a_replacement_that_came_too_late_takes_part_in_what_is_made_again(tmp_path, view_first):
    run = Run(tmp_path, max_restarts=1)
    generation = {"kind": "view", "rank": 0, "view": 2}  # the other trainer died before the last checkpoint was written
    if view_first:
        run.supervisor._on_record(run.supervisor._ranks[0], generation)
    run.end(2, 1, "RunEnded")
    assert [role.global_rank for _, role in run.supervisor._starts_due] == [2] * view_first
    if not view_first:
        run.supervisor._on_record(run.supervisor._ranks[0], generation)
    assert [role.global_rank for _, role in run.supervisor._starts_due] == [2]


def test_a_replacement_that_joins_while_the_run_ends_does_not_wait_for_rank_0(tmp_path):
    run = Run(tmp_path)
    run.supervisor._summary = {"status": "completed"}
    run.supervisor._ranks[2].trains = True
    for rank in run.supervisor._ranks[1:]:
        run.supervisor._on_record(rank, {"kind": "lost", "rank": rank.global_rank, "text": "the server is lost"})
    run.supervisor._limit_end()
    assert run.signals == [(1, signal.SIGKILL)]
    run.end(1, -signal.SIGKILL)
    assert run.supervisor._failed == []
    run.end(2, -signal.SIGKILL)  # one that took part is named
    assert [rank.global_rank for rank in run.supervisor._failed] == [2]


@pytest.mark.claim("rpc-faults")
def test_rank_0_that_lost_a_trainer_before_the_first_update_is_not_killed_when_the_run_is_completed(tmp_path):
    run = Run(tmp_path)
    run.supervisor._on_record(run.supervisor._ranks[0], {"kind": "lost", "trainer": 1, "text": "trainer 1 is lost"})
    run.supervisor._summary = {"status": "completed"}
    run.supervisor._limit_end()
    assert run.signals == [], "it may still write to the folder of the run"


@pytest.mark.parametrize("kind", ["RunEnded", "GenerationChanged", "PeerLost"])
def test_an_error_that_follows_from_another_rank_is_not_reported_for_it(tmp_path, kind):
    run = Run(tmp_path)
    run.supervisor._on_error(run.supervisor._ranks[2], {"kind": kind, "message": "", "traceback": ""})
    run.supervisor._on_error(run.supervisor._ranks[0], {"kind": "TaskError", "message": "", "traceback": ""})
    assert run.supervisor._first_failure().global_rank == 0


def test_a_loss_for_which_rank_0_ended_the_run_is_reported_after_a_signal_too(tmp_path):
    run = Run(tmp_path, mode="ddp")
    run.supervisor._signal = signal.SIGTERM
    for rank in run.supervisor._ranks:
        run.supervisor._on_error(rank, {"kind": "PeerLost", "message": "on purpose", "traceback": ""})
    assert run.supervisor._first_failure() is None  # what follows from the signal
    run.supervisor._summary = {"status": "failed", "error": "PeerLost: on purpose"}
    with pytest.raises(PeerLost, match="on purpose"):
        run.supervisor._raise_outcome()


@pytest.mark.parametrize(("elastic", "continues"), [(True, True), (False, False)])
def test_an_elastic_run_continues_without_its_last_rank_as_others_may_have_joined(tmp_path, elastic, continues):
    run = Run(tmp_path, trainers=1, elastic=elastic)
    run.end(1, -9)
    assert run.supervisor._is_failing is not continues
    assert bool(run.supervisor._failed) is not continues


def test_ranks_of_ddp_that_start_again_are_not_limited_by_the_summary_of_their_loss(tmp_path):
    run = Run(tmp_path, mode="ddp", max_restarts=1)
    run.supervisor._on_record(run.supervisor._ranks[0], {"kind": "start"})
    loss = '{"status": "failed", "error": "PeerLost: rank 1 is lost"}'
    run.folder.joinpath("summary.json").write_text(loss)
    run.end(1, -9)
    run.end(0, 1, "PeerLost")
    assert len(run.supervisor._starts_due) == 2
    run.supervisor._limit_end()
    assert run.supervisor._kill_at is None
    run.supervisor._on_record(run.supervisor._ranks[0], {"kind": "start"})
    run.folder.joinpath("summary.json").write_text(loss)
    run.supervisor._limit_end()
    assert run.supervisor._kill_at is not None, "rank 0 has left another summary"


def test_a_terminal_that_closes_requests_one_stop(tmp_path):
    """The kernel and the shell may each send the signal; a second one ends the step that is in progress."""
    supervisor = Run(tmp_path).supervisor
    for expected in (signal.SIGHUP, None):
        supervisor._on_signal(signal.SIGHUP, None)
        assert supervisor._unforwarded == expected
        supervisor._unforwarded, supervisor._signalled_at = None, -1000.0
    supervisor._on_signal(signal.SIGTERM, None)
    assert supervisor._unforwarded == signal.SIGTERM


def test_a_signal_while_all_ranks_of_ddp_start_again_interrupts_the_run(tmp_path):
    run = Run(tmp_path, mode="ddp", max_restarts=1)
    summary = {"status": "failed", "error": "PeerLost: rank 1 is lost"}
    run.folder.joinpath("summary.json").write_text(json.dumps(summary))
    run.supervisor._on_record(run.supervisor._ranks[0], {"kind": "start"})
    run.supervisor._on_record(run.supervisor._ranks[0], {"kind": "end", "summary": summary})
    run.end(1, -9)
    run.end(0, 1, "PeerLost")
    run.supervisor._signal = signal.SIGTERM
    run.supervisor._start_due()
    assert run.supervisor._failed_end is None
    with pytest.raises(Interrupted):
        run.supervisor._raise_outcome()
    assert json.loads((run.folder / "summary.json").read_text())["status"] == "interrupted"


def test_a_summary_of_rank_0_that_a_signal_ends_while_all_ranks_start_again_is_kept(tmp_path):
    run = Run(tmp_path, mode="ddp", max_restarts=1)
    run.end(1, -9)
    run.supervisor._signal = signal.SIGTERM
    summary = {"status": "interrupted", "steps": 12, "error": "interrupted (SIGTERM); saved step-00000012"}
    run.supervisor.run.summary_file.write_text(json.dumps(summary))
    run.supervisor._on_record(run.supervisor._ranks[0], {"kind": "end", "summary": summary})
    run.end(0, 3, "Interrupted")
    run.supervisor._start_due()
    with pytest.raises(Interrupted):
        run.supervisor._raise_outcome()
    assert json.loads(run.supervisor.run.summary_file.read_text()) == summary


def test_no_run_continues_without_rank_0(tmp_path):
    run = Run(tmp_path, trainers=1, elastic=True)
    run.end(0, -9)
    run.end(1, -9)
    assert [rank.global_rank for rank in run.supervisor._failed] == [0, 1]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_signal_between_two_views_leaves_a_summary_of_an_interrupted_run(tmp_path, checkpoint):
    run, how = Run(tmp_path), "interrupted (SIGTERM) between two generations of the run"
    if checkpoint:
        (run.folder / "checkpoints").mkdir()
        (run.folder / "checkpoints" / "latest").write_text("step-00000004")
    run.supervisor._signal = signal.SIGTERM
    run.end(0, Interrupted.exit_code, "Interrupted", how)
    assert run.supervisor._kill_at is not None, "trainers that leave would wait for rank 0"
    for rank in (1, 2):
        run.supervisor._ranks[rank].sent.add(signal.SIGKILL)
        run.end(rank, -signal.SIGKILL)
    with pytest.raises(Interrupted) as caught:
        run.supervisor._raise_outcome()
    saved = "the last checkpoint is step-00000004; resume with: " if checkpoint else "nothing was saved yet"
    assert str(caught.value).startswith(f"{how}; {saved}")
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["error"] == str(caught.value)


@pytest.mark.parametrize("mode", ["rpc", "ddp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_interrupted_while_it_starts_interrupts_the_others(tmp_path, mode, rank):
    run = Run(tmp_path, mode=mode, max_restarts=3)
    ranks = run.supervisor._ranks
    run.end(rank, Interrupted.exit_code, "Interrupted", "interrupted while waiting for the other ranks")
    assert {(other.global_rank, signal.SIGTERM) for other in ranks} == set(run.signals)
    for other in ranks:
        if other.global_rank != rank:
            other.sent.add(signal.SIGKILL)  # its constructor does not react
            run.end(other.global_rank, -signal.SIGKILL)
    assert run.supervisor._starts_due == []
    with pytest.raises(Interrupted, match="interrupted while waiting for the other ranks; nothing was saved yet"):
        run.supervisor._raise_outcome()


def test_ranks_that_make_steps_are_not_signalled_for_one_that_is_interrupted(tmp_path):
    """They have agreed to end; a second signal would end the hooks of the rank that has received the first."""
    run = Run(tmp_path, max_restarts=3)
    for rank in run.supervisor._ranks:
        rank.trains = True
    run.end(1, Interrupted.exit_code, "Interrupted", "interrupted (signal SIGTERM)")
    assert run.signals == []
    run.end(2, -signal.SIGKILL)
    assert run.supervisor._starts_due == [], "the run ends"


def test_a_trainer_that_is_lost_after_a_signal_neither_fails_the_run_nor_hurries_the_others(tmp_path):
    run = Run(tmp_path)
    run.supervisor._signal = signal.SIGTERM
    run.end(2, -signal.SIGKILL)
    assert "rank 2 (trainer 1) is lost and not started again: killed by SIGKILL" in run.records[-1]["text"]
    assert run.signals == []
    assert run.supervisor._kill_at is None, "rank 0 may take its time for the last checkpoint"
    run.end(1, Interrupted.exit_code, "Interrupted", "interrupted (signal SIGTERM)")
    run.end(0, Interrupted.exit_code, "Interrupted", "interrupted (signal SIGTERM) after step 3")
    with pytest.raises(Interrupted, match="after step 3"):
        run.supervisor._raise_outcome()


@pytest.mark.parametrize("by_signal", [False, True])
def test_a_trainer_that_reports_the_loss_of_another_rank_is_one_that_failed(tmp_path, by_signal):
    run = Run(tmp_path)
    run.supervisor._signal = signal.SIGTERM if by_signal else None
    run.end(1, 1, "PeerLost", "rank 0 is lost")
    assert not run.supervisor._continues_without(run.supervisor._ranks[1])


@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_a_rank_without_which_no_run_continues_that_is_lost_after_a_signal_names_the_last_checkpoint(tmp_path, mode):
    run = Run(tmp_path, mode=mode)
    run.supervisor._signal = signal.SIGTERM
    run.end(0, -signal.SIGKILL)
    for rank in run.supervisor._ranks[1:]:
        run.end(rank.global_rank, 1, "PeerLost", "rank 0 is lost")
    with pytest.raises(Interrupted, match=r"interrupted \(SIGTERM\); nothing was saved yet"):
        run.supervisor._raise_outcome()
    notes = [record["text"] for record in run.records if "failed when the run was interrupted" in record["text"]]
    assert len(notes) == 1
    assert "killed by SIGKILL" in notes[0]


def test_a_rank_that_was_lost_before_a_signal_is_the_cause(tmp_path):
    run = Run(tmp_path, mode="ddp")
    run.end(0, -signal.SIGKILL)
    run.supervisor._signal = signal.SIGTERM
    run.end(1, 1, "PeerLost", "rank 0 is lost")
    with pytest.raises(TrainingError, match=r"rank 0 \(trainer 0\): killed by SIGKILL"):
        run.supervisor._raise_outcome()


@pytest.mark.parametrize("trains", [True, False])
def test_a_trainer_of_an_elastic_run_leaves_once_the_run_trains(tmp_path, trains):
    run = Run(tmp_path, elastic=True)
    run.supervisor._ranks[0].trains = trains
    run.end(2, Interrupted.exit_code, "Interrupted", "interrupted while waiting for rank 0")
    assert run.supervisor._is_ending is not trains
    run.end(1, Interrupted.exit_code, "Interrupted", "interrupted while waiting for rank 0")
    assert run.supervisor._is_ending, "no trainer is left"


def test_rank_0_that_is_killed_at_the_limit_for_its_last_checkpoint_is_not_killed_again_at_its_start(tmp_path):
    run = Run(tmp_path, max_restarts=1)
    for rank in run.supervisor._ranks[1:]:
        rank.done = True
        run.end(rank.global_rank, 0)
    run.supervisor._limit_end()
    assert run.supervisor._kill_at is not None
    run.end(0, -signal.SIGKILL)
    assert [role.global_rank for _, role in run.supervisor._starts_due] == [0]
    assert run.supervisor._kill_at is None


@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_a_rank_that_ends_with_the_code_of_an_interruption_but_reports_none_is_lost(tmp_path, mode):
    """The task may call ``os._exit`` with any code."""
    run = Run(tmp_path, trainers=1, mode=mode, max_restarts=1)
    rank = run.supervisor._ranks[-1].global_rank
    run.end(rank, Interrupted.exit_code)
    assert [role.global_rank for _, role in run.supervisor._starts_due] == [rank]
    assert "is lost (ended with exit code 3)" in run.records[0]["text"]


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (40, "signal 40")])
def test_a_rank_that_any_signal_kills_starts_again(tmp_path, number, name):
    """A real-time signal has no name."""
    run = Run(tmp_path, max_restarts=1)
    run.end(1, -number)
    assert [role.global_rank for _, role in run.supervisor._starts_due] == [1]
    assert f"rank 1 (trainer 0) is lost (killed by {name}); it starts again" in run.records[0]["text"]


@pytest.mark.parametrize(("generation", "starts_again"), [(0, False), (1, True)])
def test_the_run_continues_without_a_rank_that_no_generation_has(tmp_path, generation, starts_again):
    """Another process of it would be evicted too. One that took part may take part again."""
    run = Run(tmp_path, max_restarts=1)
    run.supervisor._ranks[2].generation = generation
    run.end(2, 1, "Evicted")
    assert bool(run.supervisor._starts_due) is starts_again
    assert ("not started again: on purpose" in run.records[0]["text"]) is not starts_again
    assert not run.supervisor._is_failing
    assert run.supervisor._failed == []


@pytest.mark.claim("dead-rank-0")
def test_a_rank_0_that_is_dead_for_good_is_the_error_whatever_the_others_report(tmp_path):
    """The supervisor signals them, while they wait at the port of rank 0, which it keeps open."""
    run = Run(tmp_path)
    RunDir(run.folder).log_file(0).write_text("")
    run.end(0, -signal.SIGKILL)
    assert run.signals == [(rank, signal.SIGTERM) for rank in (0, 1, 2)]
    for rank in (1, 2):
        run.supervisor._ranks[rank].sent.add(signal.SIGTERM)
        run.end(rank, Interrupted.exit_code, "Interrupted", "interrupted while waiting for rank 0")
    with pytest.raises(TrainingError, match=r"^rank 0 \(server 0\): killed by SIGKILL; see the end of its log"):
        run.supervisor._raise_outcome()


def refuse_fork(*_):
    raise BlockingIOError(errno.EAGAIN, "again")


def refuse_thread(*_):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    "start",
    [
        lambda: threading.Thread(target=list).start(),
        lambda: subprocess.run(["true"], close_fds=False, preexec_fn=list, check=False),
        lambda: list(DataLoader([1], num_workers=1, multiprocessing_context="fork")),
        lambda: spawnv_passfds(b"", [], []),  # as for another multiprocessing_context
        lambda: ExceptionWrapper((RuntimeError, RuntimeError("can't start new thread"), None), "in a worker").reraise(),
    ],
    ids=["thread", "process", "fork", "spawn", "worker"],
)
def test_what_cannot_be_started_is_no_traceback(monkeypatch, start):
    monkeypatch.setattr(threading, "_start_new_thread", refuse_thread)
    for module, name in ((subprocess, "_fork_exec"), (_posixsubprocess, "fork_exec"), (os, "fork")):
        monkeypatch.setattr(module, name, refuse_fork)
    with pytest.raises((RuntimeError, BlockingIOError)) as raised:
        start()
    described = describe_error(raised.value)
    assert described["message"].startswith("no more threads or processes can be started here (")
    assert "\n" not in described["message"]
    assert not described["traceback"]


def test_other_errors_are_no_limit_of_processes():
    assert not describe_error(ValueError("another"))["message"].startswith("no more")
    assert describe_error(BlockingIOError(errno.EAGAIN, "of a socket"))["traceback"]


def test_a_rank_that_was_killed_for_lack_of_memory_says_so(tmp_path, monkeypatch):
    run = Run(tmp_path, max_restarts=1)
    known = run.supervisor._oom_kills
    monkeypatch.setattr(supervisor, "oom_kills", lambda: known + 1)
    run.supervisor._ranks[0].sent.add(signal.SIGKILL)  # by the supervisor
    for rank in (0, 1, 2):  # the last one by another process: the kernel has killed one
        run.end(rank, -signal.SIGKILL)
    assert [record["text"].partition(";")[0] for record in run.records] == [
        "rank 0 (server 0) is lost (killed by SIGKILL)",
        "rank 1 (trainer 0) is lost (killed by SIGKILL, probably for lack of memory: the kernel has just killed a "
        "process of this machine or job for it)",
        "rank 2 (trainer 1) is lost (killed by SIGKILL)",
    ]


def test_another_process_that_was_killed_for_lack_of_memory_long_ago_is_no_reason(tmp_path, monkeypatch):
    run, now = Run(tmp_path, max_restarts=1), time.monotonic()
    known = run.supervisor._oom_kills
    kills = iter([known + 1, known + 1, known + 2, known + 2, known + 2, known + 2])
    monkeypatch.setattr(supervisor, "oom_kills", lambda: next(kills))
    for later_s in (11, 22, 33):
        monkeypatch.setattr(time, "monotonic", lambda later_s=later_s: now + later_s)
        run.supervisor._count_oom_kills()
        for rank in {22: (1, 2), 33: (0,)}.get(later_s, ()):  # the kernel has killed a second process just before 22 s
            run.end(rank, -signal.SIGKILL)
    assert ["memory" in record["text"] for record in run.records] == [True, False, False]


@pytest.mark.parametrize(
    ("first", "second"), [(PeerLost("lost"), PeerLost("collective")), (OSError(28, "one"), OSError(28, "two"))]
)
def test_an_error_that_is_among_its_own_causes_is_described(first, second):
    """Two threads raise the error of a lost rank, each while it handles what the other has raised."""
    first.__cause__, second.__context__ = second, first
    first.__context__ = second
    assert describe_error(first)["kind"] == type(first).__name__

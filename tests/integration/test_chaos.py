"""Runs under ``paramserver chaos``: what is injected fires, the run recovers, and violations are noticed."""

import re
import subprocess
import sys

import pytest
from launching import FinishedRun, environment, fork_server, write_config

pytestmark = pytest.mark.processes

# Steps of 10 ms: there is time between two steps, and a run is no longer than it has to be.
TASK = """
import threading

from tasks import ReferenceTask


class Paced(ReferenceTask):
    def training_step(self, model, batch, batch_idx):
        threading.Event().wait(0.01)
        return super().training_step(model, batch, batch_idx)
"""
SERVER = {"lost_after_s": 4.0}


def config_file(folder, *, trainers=2, servers=1, mode="rpc", server=None, epochs=2, task=None, args=(), **training):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "paced.py").write_text(TASK)
    return write_config(
        folder,
        task=task or f"{folder}/paced.py:Paced",
        mode=mode,
        task_args={"batch_norm": False, "validation": 0, "optimizer": "adam", "samples": 240 * trainers, **dict(args)},
        cluster={"num_trainers": trainers, "num_servers": servers, "timeout_s": 60},
        **({"server": {**SERVER, **(server or {})}} if mode == "rpc" else {}),
        training={"max_steps": None, "max_epochs": epochs, "uneven_inputs": "join", **training},
        checkpoint={"every": 15},
    )


def chaos(folder, *flags, **config):
    """The command in processes that are forked; its exit code, its output and the folder of its run."""
    file = config_file(folder, **config)
    arguments = ["--config", file, "--set", "logging.name=run", *flags]
    code, output = fork_server().run(arguments, folder, 150, environment(), program="chaos")
    return FinishedRun(code, output, folder / "runs" / "run")


def checks(finished):
    """Whether each check passed, by name."""
    lines = finished.output.rpartition("checks:\n")[2].splitlines()
    found = [re.match(r"(pass|FAIL)  (.*?)(?:  |$)", line) for line in lines]
    return {match[2].strip(): match[1] == "pass" for match in found if match}


def assert_passed(finished):
    assert finished.code == 0, finished.output
    found = checks(finished)
    assert len(found) >= 8
    assert all(found.values()), finished.output
    assert "did not fire" not in finished.output


@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (2, 1), (2, 2)])
def test_lost_messages_are_sent_again_and_change_no_bit(tmp_path, trainers, servers):
    """Also those of a short partition, during which all messages of a trainer are lost."""
    faults = "lose replies 4%; lose requests 4%; partition trainer:0 @step 20 for 1s"
    server = {"transport": "rpc", "bucket_mb": 0.0005} if servers > 1 else {}
    finished = chaos(tmp_path, "--compare", "--faults", faults, trainers=trainers, servers=servers, server=server)
    assert_passed(finished)
    assert checks(finished)["parameters are those without faults"]
    lost, repeated = map(int, re.search(r"(\d+) lost, (\d+) sent again", finished.output).groups())
    assert lost > 0
    assert repeated > 0
    assert finished.of_kind("lost") == [], "no trainer joined again"


def test_a_trainer_that_is_killed_and_a_short_partition_are_survived(tmp_path):
    finished = chaos(tmp_path, "--faults", "kill trainer:1 @step 20; partition trainer:0 @step 40 for 0.5s")
    assert_passed(finished)
    assert "plan:\n  kill trainer:1 @step 20\n  partition trainer:0 @step 40 for 0.5s\n" in finished.output
    assert re.search(r"kill trainer:1 @step 20: fired after step 2\d; noticed after 0\.\d\d s, next", finished.output)
    assert [record["trainer"] for record in finished.of_kind("lost")] == [1]
    assert [record["trainer"] for record in finished.of_kind("joined")] == [1]


def test_with_rollback_no_fault_changes_a_bit(tmp_path):
    """A partition that is longer than ``lost_after_s`` returns the run to a checkpoint; so does a server's death."""
    faults = "partition trainer:1 @step 20 for 5s; kill server:0 @step 35; slow trainer:0 x3 for 2s"
    server = {"on_loss": "rollback", "lost_after_s": 3.0}
    finished = chaos(tmp_path, "--compare", "--faults", faults, server=server)
    assert_passed(finished)
    assert checks(finished)["parameters are those without faults"]
    assert re.search(r"[1-9]\d* made again", finished.output)
    assert len(finished.summary["faults"]) == 2


# In the normal run: a link of test_hosts.py that returns late, and a silent trainer of test_several_servers.py.
@pytest.mark.nightly
def test_a_trainer_that_is_cut_off_for_long_joins_again_and_the_others_continue(tmp_path):
    """What the server held for its step is released, while its process lives and is still in that step."""
    faults = "partition trainer:1 @step 20 for 3s; partition trainer:0 @step 60 for 3s"
    finished = chaos(tmp_path, "--faults", faults, server={"lost_after_s": 1.5}, epochs=8)
    assert_passed(finished)
    assert [record["trainer"] for record in finished.of_kind("lost")] == [1, 0]
    assert [record["trainer"] for record in finished.of_kind("joined")] == [1, 0]


def test_a_rank_that_holds_the_interpreter_is_replaced(tmp_path):
    """A server that is frozen for less than ``lost_after_s`` is not."""
    faults = "freeze server:0 @step 10 for 0.5s; hold_gil trainer:1 @step 20 for 60s"
    finished = chaos(tmp_path, "--faults", faults)
    assert_passed(finished)
    assert re.search(r"hold_gil .*; noticed after \d+\.\d\d s, next update", finished.output)
    assert "rank 2 (trainer 1) is lost (killed by SIGKILL); it starts again (1 of 3)" in finished.output
    assert not re.search("freeze .*noticed", finished.output)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_steps_that_are_skipped_are_no_violation(tmp_path, consistency):
    server = {"consistency": consistency}
    args = {"task": "invalid_tasks:Nonfinite", "args": {"places": [[0, 3], [1, 7], [1, 12]]}}
    finished = chaos(tmp_path, "--faults", "kill trainer:1 @step 9", server=server, nonfinite="skip", **args)
    assert_passed(finished)
    assert len(finished.of_kind("skipped")) >= 2
    assert re.search(r"each push is applied once .* [2-9] skipped; ", finished.output)


def test_a_fault_that_does_not_fire_fails_the_check_unless_it_is_random(tmp_path):
    finished = chaos(tmp_path, "--faults", "kill trainer:1 @step 100000", "--random", "1", trainers=2)
    assert finished.code == 1
    assert "kill trainer:1 @step 100000: did not fire, the run ended before" in finished.output
    assert [name for name, passed in checks(finished).items() if not passed] == ["every fault fired"]


@pytest.mark.nightly
def test_the_console_command_in_ddp_leaves_nothing_behind(tmp_path):
    """Fresh interpreters: a process that is left would be found by its environment."""
    file = config_file(tmp_path, mode="ddp")
    program = [sys.executable, "-c", "from paramserver.cli import main; main()", "chaos", "--config", str(file)]
    program += ["--faults", "kill trainer:1 @step 20", "--set", "logging.name=run"]
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=200, env=environment(), cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is left behind" in done.stdout
    assert "FAIL" not in done.stdout

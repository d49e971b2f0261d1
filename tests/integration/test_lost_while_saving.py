"""A rank that dies or freezes while a checkpoint is made: who notices and how soon, and what the checkpoint holds."""

import json
import re
import time

import psutil
import pytest
from launching import TASKS, launch, run_concurrently

from paramserver.checkpoint import read_checkpoint

pytestmark = pytest.mark.processes

CARRIERS = TASKS.with_name("faulty_senders.py")
# A collective alone would notice the frozen only after so long.
TIMEOUT_S = 60
LOST_AFTER_S = 2.0


def faulted(folder, carrier, trainers, background=True):
    """The run, what its fault left, and the seconds from the fault to the end of all processes."""
    finished = launch(
        folder,
        mode="ddp",
        trainer=f"{CARRIERS}:{carrier}",
        cluster={"num_trainers": trainers, "timeout_s": TIMEOUT_S, "max_restarts": 0},
        server={"lost_after_s": LOST_AFTER_S},
        training={"max_steps": 100_000},
        checkpoint={"every": 3, "keep": 9, "background": background},
    )
    ended = time.time()
    died = json.loads((folder / "runs" / "died").read_text())
    return finished, died, ended - died["time"]


def check(finished, died):
    """The fault fired in the window, nothing is left of its process, and the checkpoint before is whole."""
    assert finished.code == 1, finished.output
    assert died["step"] >= 6
    assert not psutil.pid_exists(died["pid"])
    left = sorted(path.name for path in (finished.run_dir / "checkpoints").iterdir())
    assert left == ["latest", "step-00000003"]
    before = read_checkpoint(finished.run_dir / "checkpoints" / "step-00000003")
    assert before.file_path("trainer-1").stat().st_size > 512 * (died["chunks"] + 2)  # two chunks are not all
    assert finished.summary["status"] == "failed"
    assert finished.summary["checkpoint"] == "step-00000003"


def test_a_rank_that_dies_while_sending_is_noticed_at_once(tmp_path):
    (sender, died, sender_s), (receiver, zero_died, receiver_s) = run_concurrently(
        lambda: faulted(tmp_path / "sender", "KilledSender", 2),
        lambda: faulted(tmp_path / "receiver", "KilledReceiver", 2),
    )
    check(sender, died)
    check(receiver, zero_died)
    assert "error: rank 1 (trainer 1): killed by SIGKILL" in sender.output
    assert sender.summary["error"].startswith("PeerLost: rank 1 is lost: its connection was closed")
    assert "error: rank 0 (trainer 0): killed by SIGKILL" in receiver.output
    assert "PeerLost: rank 0 is lost: its connection was closed" in receiver.log(1)
    assert max(sender_s, receiver_s) < 15


def check_frozen(faulted, lost, survivors):
    finished, died, elapsed_s = faulted
    check(finished, died)
    assert f"rank {lost}" in finished.output.rpartition("error: ")[2]
    for survivor in survivors:
        # Noticed by its silence, or by its end: the supervisor notices the silence too, and kills the rank.
        assert re.search(
            rf"PeerLost: rank {lost} is lost: it(s connection| gave no sign of life)", finished.log(survivor)
        )
    assert elapsed_s < TIMEOUT_S / 2


def test_a_rank_that_freezes_while_sending_is_noticed_by_its_silence(tmp_path):
    """The others train meanwhile, so their loops wait for the frozen rank too; rank 2 hears of it from rank 0."""
    check_frozen(faulted(tmp_path, "FrozenSender", 3), 1, survivors=(0, 2))


def test_a_rank_zero_that_freezes_and_a_rank_that_freezes_a_waiting_loop_are_noticed(tmp_path):
    zero, waiting = run_concurrently(
        lambda: faulted(tmp_path / "zero", "FrozenReceiver", 2),
        lambda: faulted(tmp_path / "waiting", "FrozenSender", 2, background=False),
    )
    check_frozen(zero, 0, survivors=(1,))
    check_frozen(waiting, 1, survivors=(0,))


@pytest.mark.claim("rpc-faults")
@pytest.mark.parametrize("transport", ["shared_memory", "rpc", "tcp"])
def test_the_part_of_a_lost_trainer_has_the_newest_known_state_of_its_task(tmp_path, transport):
    """So the process that takes its place gets it."""
    mark, resumed = tmp_path / "mark", tmp_path / "resumed"
    finished = launch(
        tmp_path,
        mode="rpc",
        task=f"{TASKS.with_name('supervised_tasks.py')}:KilledWhileSaving",
        task_args={"mark": str(mark), "resumed": str(resumed)},
        cluster={"num_trainers": 2, "timeout_s": 60},
        server={"lost_after_s": 5.0, "transport": transport},
        training={"max_steps": 50},
        checkpoint={"every": 10, "keep": 9, "background": False},  # so that none replaces one that waits
        timeout_s=90,
    )
    assert finished.code == 0, finished.output
    assert mark.exists(), "no trainer was killed"
    saved = [read_checkpoint(path) for path in sorted((finished.run_dir / "checkpoints").glob("step-*"))]
    parts = [checkpoint.load("trainer-1") for checkpoint in saved]
    substituted = [part["random"] is None for part in parts]
    assert substituted[:3] == [False, True, True], "trainer 0 waits at batch 32 for the replacement"
    assert [part["task"]["saves"] for part in parts[:3]] == [1, 1, 1]
    assert resumed.read_text() == "trainer 1 resumes after save 1\n"

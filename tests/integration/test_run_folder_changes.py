"""A run's folder that is removed, moved, thinned or full in mid-run: one sentence that names what happened."""

import re

import pytest
from cli_errors import error_message, invalid_task
from launching import launch, run_in_process

LOST = "must stay in place while the run writes it, and was removed, moved or replaced"


def changed(tmp_path, mode, what, **config):
    mark = tmp_path / "mark"
    start = run_in_process if mode == "local" else launch
    finished = start(
        tmp_path,
        mode=mode,
        task=invalid_task("ChangesRunFolder"),
        task_args={"what": what, "run_dir": str(tmp_path / "runs" / "run"), "mark": str(mark)},
        cluster={"num_trainers": 1 if mode == "local" else 2, "timeout_s": 30},
        **config,
    )
    assert mark.read_text() == what
    return finished


@pytest.mark.parametrize("what", ["remove_records", "replace_records", "remove_all", "move_all"])
@pytest.mark.parametrize(
    "mode",
    ["local", pytest.param("rpc", marks=pytest.mark.processes), pytest.param("ddp", marks=pytest.mark.processes)],
)
def test_a_run_whose_records_are_lost_fails(tmp_path, mode, what):
    finished = changed(tmp_path, mode, what)
    message = error_message(finished, code=1)
    assert message.count("\n") == 1
    rank = {"local": "", "rpc": r"rank 0 \(server 0\): ", "ddp": r"rank 0 \(trainer 0\): "}[mode]
    assert re.match(rf"{rank}(metrics file|checkpoint) \S+/runs/run/\S+ ", message)
    assert LOST in message or what.endswith("_all")
    assert "status  completed" not in finished.output
    if what.endswith("records"):
        assert finished.summary["status"] == "failed"
        assert LOST in finished.summary["error"]
    else:
        assert not finished.run_dir.exists()  # nothing makes it again


@pytest.mark.parametrize("mode", ["local", pytest.param("rpc", marks=pytest.mark.processes)])
def test_a_checkpoint_folder_that_is_removed_is_made_again(tmp_path, mode):
    """A later checkpoint is complete by itself, so the run goes on."""
    finished = changed(tmp_path, mode, "remove_checkpoints", checkpoint={"every": 3, "background": False})
    assert finished.code == 0, finished.output
    assert finished.checkpoints[-1] == "step-00000012"
    assert finished.summary["checkpoint"] == "step-00000012"


def test_a_checkpoint_that_is_removed_is_not_named_in_the_summary(tmp_path):
    """Batch 3 of 12 is after the only checkpoint but that of the end, which is not due a second time."""
    finished = changed(tmp_path, "local", "remove_checkpoints", checkpoint={"every": 4}, training={"max_steps": 4})
    assert finished.code == 0, finished.output
    assert finished.summary["checkpoint"] in (None, *finished.checkpoints)


# The thread of TensorBoard's writer may be about to open a file that is removed just then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("mode", ["local", pytest.param("rpc", marks=pytest.mark.processes)])
@pytest.mark.parametrize("folder", ["logs", "tensorboard"])
def test_logs_that_are_removed_are_noted(tmp_path, mode, folder):
    finished = changed(tmp_path, mode, f"remove_{folder}", logging={"tensorboard": True})
    assert finished.code == 0, finished.output
    *before, note = [record["text"] for record in finished.of_kind("note")]
    assert len(before) == (folder == "tensorboard"), "its sink failed too"
    assert re.search(rf"/runs/run/{folder} was removed while the run wrote it", note)
    assert note in finished.output


@pytest.mark.processes
@pytest.mark.parametrize(
    ("mode", "log_records"), [("rpc", False), ("rpc", True), ("ddp", False)], ids=["server", "trainers", "ddp"]
)
def test_a_full_disk_is_named_as_rank_0s(tmp_path, mode, log_records):
    """With ``trainers`` the first records that are refused are those that trainers send."""
    finished = launch(
        tmp_path,
        mode=mode,
        task=invalid_task("FullDisk"),
        task_args={"log_records": log_records},
        cluster={"num_trainers": 2, "timeout_s": 30},
        training={"max_steps": 5000},
        logging={"log_every": 10_000 if log_records else 1, "progress": "off"},
    )
    message = error_message(finished, code=1)
    rank = "server" if mode == "rpc" else "trainer"
    assert re.fullmatch(
        rf"rank 0 \({rank} 0\): metrics file \S*/metrics\.jsonl must be writable \(\[Errno 27\] File too large\); free "
        r"space there or choose another logging\.run_dir, then start it again under another logging\.name, as it has "
        r"no checkpoint to resume from\n",
        message,
    )

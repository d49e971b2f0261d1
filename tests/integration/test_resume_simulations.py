"""A resume that changes a key of the section ``simulations``: it is refused, or each sample is served once."""

import json
import shutil
from collections import Counter
from itertools import product

import pytest
from cli_errors import error_message
from launching import FinishedRun, write_config
from online_runs import COUNT, SIMULATIONS, STEPS, online_config
from simulations import SHAPE
from stream_tasks import served

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, fork_server):
    """A run that a signal ended in the middle of its first simulation, with samples in its buffers."""
    folder = tmp_path_factory.mktemp("stopped")
    task_args = {"stop": 0, "pace_s": [0.3]}
    config = online_config(folder, task_args=task_args, simulations={"at_once": 1}, buffer={"capacity": 4}, mode="ddp")
    file = write_config(folder, **config)
    code, output = fork_server.run(["--config", file, "--set", "logging.name=run"], folder, timeout_s=90)
    assert code == 3, output
    return folder


@pytest.fixture
def resume(tmp_path, fork_server, stopped):
    """Resumes a copy of that run with other keys of the section."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    run_dir = tmp_path / "runs" / "run"

    def start(**changes):
        outside = changes.get("function", "") is None
        task_args = {"ledger": str(tmp_path / "ledger"), "stop": None, "pace_s": [0.0], "outside": outside}
        settings = {
            "logging.run_dir": run_dir.parent,
            **{f"task_args.{name}": json.dumps(value) for name, value in task_args.items()},
            **{f"simulations.{name}": json.dumps(value) for name, value in changes.items()},
        }
        flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        code, output = fork_server.run(["--resume", run_dir, *flags], tmp_path, timeout_s=90)
        return FinishedRun(code, output, run_dir)

    return start


def contents(run_dir):
    """What a run folder has, without logs, and without the journal of a coordinator, which each one starts anew."""
    files = [file for file in run_dir.rglob("*") if file.is_file() and file.parent.name != "logs"]
    return {file: file.read_bytes() for file in files if file.name != "coordinator.jsonl"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"deal": "simulation"}, "simulations.deal (simulation) must be that of the checkpoint (round_robin)"),
        ({"fields": {"u": list(SHAPE), "w": [2]}}, "(u: float32 [4, 3], w: float32 [2]) must be those of the samples"),
        ({"fields": {"u": {"shape": list(SHAPE), "dtype": "float64"}}}, "simulations.fields (u: float64 [4, 3]) must"),
        ({"fields": {"u": [3, 4]}}, "that the checkpoint holds (u: float32 [4, 3]); resume with them"),
        ({"parameters": {"b": [0, 1], "a": [2, 3]}}, "in their order (a, b)"),
        ({"sampler": "importance"}, "simulations.sampler (importance) learns"),
        ({"function": None}, "simulations.command or function must be given, as in the checkpoint"),
    ],
    ids=["deal", "field", "dtype", "shape", "parameters", "sampler", "function"],
)
def test_what_the_samples_of_the_checkpoint_contradict_is_refused(tmp_path, resume, changes, sentence):
    before = contents(tmp_path / "runs" / "run")
    finished = resume(**changes)
    message = error_message(finished, code=2)
    assert message.count("\n") == 1
    assert sentence in message
    assert contents(finished.run_dir) == before


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "changes",
    [
        {"fields": {"u": list(SHAPE)}},  # need not be finite any more
        {"group_size": 2, "function": f"{SIMULATIONS}:simulate_group"},
        {"count": COUNT + 2},
        {"count": 1},
        {"steps": STEPS + 10},
        {"steps": STEPS // 2},
        {"parameters": {"a": [0.0, 9.0], "b": [2.0, 9.0]}},
        {"sampler": "halton"},
        {"function": f"{SIMULATIONS}:simulate_killed_once"},
    ],
    ids=["finite", "group", "more", "fewer", "longer", "shorter", "range", "sampler", "function"],
)
def test_otherwise_each_sample_is_served_once(tmp_path, resume, changes):
    finished = resume(**changes)
    assert finished.code == 0, finished.output
    times = Counter(served(tmp_path / "ledger"))
    assert max(times.values()) == 1
    assert times.keys() >= {*product(range(changes.get("count", COUNT)), range(changes.get("steps", STEPS)))}

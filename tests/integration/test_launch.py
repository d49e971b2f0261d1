"""The command line: ways to start a run, output, and input that is refused."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from launching import (
    TASKS,
    FinishedRun,
    command,
    differing_tensors,
    environment,
    fork_server,
    free_port,
    launch,
    run_concurrently,
    run_in_process,
    train,
    write_config,
)

pytestmark = pytest.mark.processes


def as_first_process(*words):
    """A command that is process 1 for its children, as in a container; the test is skipped where that is not allowed.

    All that it starts ends with it.
    """
    namespace = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    refused = subprocess.run([*namespace, "true"], capture_output=True, text=True, check=False)
    if refused.returncode:
        pytest.skip(f"no process namespace can be made here: {refused.stderr.strip()}")
    return [*namespace, *words]


@pytest.fixture
def begin(tmp_path):
    """Starts a rank by itself; it is killed at the end of the test."""
    with ExitStack() as stack:
        yield lambda *words, **env: stack.enter_context(fork_server().start(words, tmp_path, environment(**env)))


def ended(rank, timeout_s=90):
    """The exit code and the output of a rank that is a fork."""
    code = rank.wait(timeout_s)
    return -signal.SIGKILL if code is None else code, rank.output.read_text()


@pytest.fixture(scope="module")
def supervised(tmp_path_factory):
    """Twelve steps of two trainers in rpc, with everything that a run writes; validation changes no training."""
    config = {"logging": {"tensorboard": True}, "training": {"validate_every": 6}}
    return train(tmp_path_factory.mktemp("supervised"), "rpc", 2, **config)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("mode", "order"), [("rpc", (2, 1, 0)), ("ddp", (1, 0))])
def test_one_rank_per_terminal_in_any_order_is_the_same_run(tmp_path, begin, supervised, mode, order):
    """In ddp too: with two trainers the result is bit-identical."""
    config = write_config(tmp_path, mode=mode, logging={"name": "by-hand"})
    common = ("--config", config, "--world-size", len(order), "--master-port", free_port())
    ranks = {rank: begin(*common, "--rank", rank) for rank in order}
    codes, outputs = zip(*(ended(ranks[rank], 150) for rank in sorted(order)), strict=True)
    assert set(codes) == {0}, outputs
    by_hand = FinishedRun(0, "", tmp_path / "runs" / "by-hand")
    assert "completed" in outputs[0]
    assert by_hand.summary["steps"] == 12
    assert sorted(path.name for path in (by_hand.run_dir / "logs").iterdir()) == [
        f"rank-{r}.log" for r in sorted(order)
    ]
    assert differing_tensors(by_hand.load("model"), supervised.load("model")) == []
    for output in outputs:
        assert "arning" not in output


@pytest.mark.nightly
def test_torchrun_starts_the_ranks(tmp_path):
    config = write_config(tmp_path, mode="rpc", logging={"name": "torchrun"})
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--master-port", str(free_port())),
            *("-m", "paramserver.launch", "--config", str(config)),
        ],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert FinishedRun(0, "", tmp_path / "runs" / "torchrun").summary["num_trainers"] == 2


def test_a_run_leaves_the_folder_of_the_contract(supervised):
    finished = supervised
    names = {path.name for path in finished.run_dir.iterdir() if not path.name.startswith(".")}
    assert names == {
        "config.yaml",
        "environment.json",
        "logs",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "summary.json",
        "losses.json",
    }
    assert not [path for path in finished.run_dir.iterdir() if path.name.startswith(".launch")]
    stored = yaml.safe_load((finished.run_dir / "config.yaml").read_text())
    assert stored["cluster"]["num_trainers"] == 2
    about = json.loads((finished.run_dir / "environment.json").read_text())
    assert "paramserver.launch" in " ".join(about["command"])
    assert {r["kind"] for r in finished.records} >= {
        "start",
        "train",
        "validation",
        "checkpoint",
        "buffer",
        "phase",
        "end",
    }
    assert set(finished.summary) >= {
        *("status", "mode", "consistency", "num_servers", "num_trainers", "steps", "samples", "samples_served"),
        *("samples_left", "seconds", "samples_per_second", "train_loss", "validation", "step_ms", "phases_ms"),
        *("wire_bytes_per_step", "staleness", "buffer", "trainers", "faults", "restarts", "peak_rss_mb"),
        *("checkpoint", "error"),
    }
    assert finished.summary["wire_bytes_per_step"] > 0
    for rank in range(3):
        assert "arning" not in finished.log(rank)
        assert "[W" not in finished.log(rank)


def test_world_size_without_a_rank_starts_that_many_ranks(tmp_path):
    finished = launch(tmp_path, "--world_size", "2", mode="rpc")
    assert finished.code == 0, finished.output
    assert finished.summary["num_trainers"] == 1  # the config has 2


def test_a_command_may_be_the_first_process_of_a_container(tmp_path):
    """It starts all ranks, by a fork server, or the trainer of its host."""

    def run(name, *flags):
        words = as_first_process(*command("--config", file, "--set", f"logging.name={name}", *flags))
        return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=90, check=False)

    file = write_config(tmp_path, mode="rpc", cluster={"num_trainers": 1}, training={"max_steps": 3})
    host = ["--set", "cluster.colocate=true", "--rank", 0, "--world_size", 1, "--master_port", free_port()]
    for done in run_concurrently(lambda: run("all"), lambda: run("host", *host)):
        assert done.returncode == 0, done.stderr
        assert "each rank imports torch itself" not in done.stderr
    for name in ("all", "host"):
        assert FinishedRun(0, "", tmp_path / "runs" / name).summary["steps"] == 3


def test_flags_override_set_which_overrides_the_file(tmp_path):
    finished = run_in_process(
        tmp_path,
        *("--mode", "local", "--set", "mode=ddp", "--set", "training.max_steps=2"),
        mode="rpc",
        training={"max_steps": 5},
    )
    assert finished.code == 0, finished.output
    assert (finished.summary["mode"], finished.summary["steps"]) == ("local", 2)


def test_dry_run_describes_the_run_and_starts_nothing(tmp_path):
    finished = run_in_process(
        tmp_path, "--dry_run", mode="rpc", task_args={"samples": 100}, training={"max_steps": None, "max_epochs": 2}
    )
    assert finished.code == 0, finished.output
    assert "rank 0: server 0 on cpu" in finished.output
    assert "rank 2: trainer 1 on cpu, 100 samples, 13 batches of 8" in finished.output
    assert "batch_size: 8" in finished.output
    assert not (tmp_path / "runs").exists()


def test_the_python_interface_gives_the_same_run(tmp_path, supervised):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(TASKS.parent)!r})
        import paramserver
        from tasks import ReferenceTask

        class Mine(ReferenceTask):
            pass

        if __name__ == "__main__":
            config = {{
                "mode": "rpc",
                "training": {{"max_steps": 12, "batch_size": 8, "validate_every": 0}},
                "logging": {{"run_dir": "runs", "name": "rpc", "tensorboard": False, "progress": "off"}},
            }}
            result = paramserver.run(Mine(samples=256), config)
            print(result.status, result.run_dir, result.validation["loss"])
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=environment(PYTHONPATH=str(TASKS.parent)),
        cwd=tmp_path,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("completed runs/rpc"), done.stdout
    run = FinishedRun(0, "", tmp_path / "runs" / "rpc")
    assert differing_tensors(run.load("model"), supervised.load("model")) == []


# What is refused: one message, no traceback, exit code 2, nothing left behind.

REFUSALS = {
    "unknown key": ({"training": {"batch_sise": 3}}, "training.batch_sise"),
    "no gpu for the server": ({"mode": "rpc", "device": {"server": "cuda"}}, "device.server (cuda) needs a GPU"),
    "no task": ({"task": None}, "task"),
    "no module": ({"task": "nowhere.at_all:Task"}, "there is no module nowhere"),
    "no file": ({"task": "nowhere.py:Task"}, "there is no file nowhere.py"),
    "no class": ({"task": f"{TASKS}:Missing"}, "has no Missing"),
    "no task class": ({"task": f"{TASKS}:ReferenceModel"}, "must be a class derived from paramserver.Task"),
    "bad argument": ({"task_args": {"colour": "red"}}, "unexpected keyword argument 'colour'"),
    "endless": ({"training": {"max_steps": None}}, "the run has no end"),
    "batch too large": ({"training": {"batch_size": 64}, "buffer": {"capacity": 32}}, "buffer.capacity"),
    "no gpu": ({"device": {"kind": "cuda"}}, "needs"),
    "rank outside": (None, "--rank (5) must be below --world_size (3)"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_input_gets_one_sentence_and_exit_2(tmp_path, name):
    config, expected = REFUSALS[name]
    flags = ("--rank", "5", "--world_size", "3") if config is None else ()
    finished = run_in_process(tmp_path, *flags, **(config or {"mode": "rpc"}))
    assert finished.code == 2, finished.output
    assert expected in finished.output
    assert "Traceback" not in finished.output


def test_a_wrong_task_in_a_rank_is_reported_once_by_the_supervisor(tmp_path):
    finished = launch(tmp_path, mode="rpc", task_args={"colour": "red"})
    assert finished.code == 2
    assert finished.output.count("unexpected keyword argument 'colour'") == 1
    assert "Traceback" not in finished.output
    assert not finished.run_dir.exists()  # the name is free for the next try


def test_a_run_folder_is_never_taken_over(tmp_path):
    first = train(tmp_path, "local", 1)
    again = run_in_process(tmp_path / "local-1", mode="local")
    assert again.code == 2
    assert "exists already" in again.output
    assert first.summary["status"] == "completed"


def test_a_world_that_never_fills_ends_at_the_timeout(tmp_path, begin):
    config = write_config(tmp_path, mode="rpc", cluster={"timeout_s": 2})
    code, output = ended(begin("--config", config, "--rank", 0, "--world_size", 3, "--master_port", free_port()))
    assert code == 1
    assert "missing: rank 1, 2" in output


def test_a_missing_rank_0_is_named(tmp_path, begin):
    config = write_config(tmp_path, mode="rpc", cluster={"timeout_s": 2})
    port = free_port()
    code, output = ended(begin("--config", config, "--rank", 1, "--world_size", 3, "--master_port", port))
    assert code == 1
    assert f"found no rank 0 at 127.0.0.1:{port}" in output


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lost", [0, 1])
def test_ranks_started_by_hand_name_the_lost_rank_last(tmp_path, begin, lost):
    """How a collective failed is printed before."""
    task_args = {"what": "kill", "mark": str(tmp_path / "mark"), "trainer": lost}
    config = write_config(tmp_path, mode="ddp", task="FaultyTask", task_args=task_args, logging={"name": "run"})
    common = ("--config", config, "--world_size", 2, "--master_port", free_port())
    ranks = [begin(*common, "--rank", rank) for rank in (0, 1)]
    codes, outputs = zip(*(ended(rank, 150) for rank in ranks), strict=True)
    assert codes == ((-9, 1) if lost == 0 else (1, -9)), outputs
    above, last = outputs[1 - lost].rstrip().rsplit("\n", 1)
    assert re.fullmatch(
        rf"error: rank {lost} is lost: its connection was closed( \(.+\))?; look for its own error", last
    )
    assert "Traceback" not in above
    if lost == 1:
        assert json.loads((tmp_path / "runs/run/summary.json").read_text())["error"] == f"PeerLost: {last[7:]}"


def test_two_processes_with_one_rank_and_other_configs_are_refused(tmp_path, begin):
    config = write_config(tmp_path, mode="rpc", cluster={"timeout_s": 25})
    port = free_port()
    common = ("--config", config, "--world_size", 3, "--master_port", port)
    zero, one = (begin(*common, "--rank", rank) for rank in (0, 1))
    code, output = ended(begin(*common, "--rank", 2, "--set", "training.batch_size=9"))
    assert code == 2
    assert "training.batch_size: 8 -> 9" in output
    code, output = ended(begin(*common, "--rank", 1))
    assert code == 2
    assert "rank 1 is taken by" in output
    for rank in (zero, one):
        os.kill(rank.pid, signal.SIGTERM)
        code, output = ended(rank)
        assert code in (1, 3), output


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--help"], 0, "launch"),
        (["--help"], 0, "benchmark predict"),
        (["benchmark", "predict", "--help"], 0, "usage: paramserver benchmark predict"),
        ([], 2, "usage"),
        (["doctor", "--set", "mode=none"], 2, "mode"),
        (["lunch"], 2, "there is no such command; did you mean paramserver launch?"),
        (["train"], 2, "there is no such command; did you mean paramserver launch?"),
        (["xyzzy"], 2, "there is no such command; see paramserver --help"),
        (["launch", "--dry-run"], 2, "--config FILE is missing"),
        (["launch", "--confg", "x"], 2, "unrecognized arguments: --confg x; did you mean --config?\n"),
        (["launch", "--set", "a=1", "b=2", "--x"], 2, "b=2 --x; --set takes one key, write --set b=2\n"),
        (["launch", "config.yaml"], 2, "arguments: config.yaml; did you mean --config config.yaml?\n"),
        (["launch", "--config", "c.yaml", "seed=3"], 2, "arguments: seed=3; write --set seed=3\n"),
    ],
)
def test_the_console_script(words, code, expected):
    program = [sys.executable, "-c", "from paramserver.cli import main; main()", *words]
    done = subprocess.run(program, capture_output=True, text=True, timeout=90, env=environment(), check=False)
    assert done.returncode == code
    assert expected in done.stdout + done.stderr


@pytest.mark.sampled(2)
@pytest.mark.parametrize("flags", [[], ["--dry_run"]])
def test_an_allocation_whose_gpus_are_not_visible_is_refused_at_the_start(flags, tmp_path):
    gpus = {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": ""}
    refused = launch(tmp_path, *flags, env=gpus)
    assert refused.code == 2
    assert "has 2 GPU(s) on this host (SLURM_GPUS_ON_NODE), and torch sees 0 of them" in refused.output
    assert "Traceback" not in refused.output
    if not flags:
        assert launch(tmp_path, "--set", "device.kind=cpu", env=gpus).code == 0


def test_a_script_is_run_from_another_folder_than_its_task(tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "own.py").write_text("from tasks import ReferenceTask\nclass Mine(ReferenceTask):\n    pass\n")
    config = {"mode": "rpc", "training": {"max_steps": 2}, "logging": {"name": "run", "progress": "off"}}
    (project / "script.py").write_text(
        "import paramserver\n"
        "from own import Mine\n"
        "if __name__ == '__main__':\n"
        f"    print(paramserver.run(Mine, {config}).status)\n"
    )
    program = [sys.executable, "project/script.py"]
    done = subprocess.run(
        program, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=150, check=False
    )
    assert (done.returncode, done.stdout) == (0, "completed\n"), done.stderr


def test_a_script_that_runs_at_its_top_level_does_not_start_runs_in_its_ranks(tmp_path):
    """Each rank imports the script to find its task; without a guard it would start another run, and so on."""
    script = tmp_path / "script.py"
    script.write_text(
        "import paramserver\n"
        "from tasks import ReferenceTask\n"
        "class Mine(ReferenceTask):\n    pass\n"
        "paramserver.run(Mine, {'mode': 'rpc', 'training': {'max_steps': 2}, 'logging': {'name': 'run'}})\n"
    )
    env = environment(PYTHONPATH=str(TASKS.parent))
    program = [sys.executable, str(script)]
    done = subprocess.run(program, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=150, check=False)
    assert done.returncode == 1
    assert "put the call under if __name__" in done.stderr


def test_an_error_of_one_rank_by_hand_is_reported_by_all_others(tmp_path, begin):
    """A data set that one trainer refuses, with ranks started by hand: every rank exits with 2, and no run begins."""
    task = """
from paramserver.errors import TaskError
from tasks import ReferenceTask

class Refuses(ReferenceTask):
    def train_source(self, partition):
        if partition.index == 1:
            raise TaskError("there is nothing to train with; copy the files to data")
        return super().train_source(partition)
"""
    (tmp_path / "refuses.py").write_text(task)
    config = write_config(tmp_path, task=f"{tmp_path}/refuses.py:Refuses", mode="rpc", logging={"name": "refused"})
    port, path = free_port(), f"{TASKS.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    common = ("--config", config, "--world_size", 3, "--master_port", port)
    ranks = [begin(*common, "--rank", rank, PYTHONPATH=path) for rank in range(3)]
    codes, outputs = zip(*(ended(rank, 150) for rank in ranks), strict=True)
    assert codes == (2, 2, 2), outputs
    for output in outputs:
        assert "there is nothing to train with; copy the files to data" in output
        assert "Traceback" not in output
    assert not (tmp_path / "runs" / "refused").exists()


@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_a_console_on_a_full_disk_ends_no_run(tmp_path, fork_server, mode):
    file = write_config(tmp_path, mode=mode, cluster={"num_trainers": 2}, training={"max_steps": 3, "batch_size": 8})
    arguments = ["--config", file, "--set", "logging.name=run"]
    with fork_server.start(arguments, tmp_path, output=Path("/dev/full")) as run:
        assert run.wait(90) == 0
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 3)


def test_a_resume_in_another_folder_leaves_nothing_there(tmp_path, fork_server):
    """With a relative ``logging.run_dir``, as it is by default."""
    first = launch(
        tmp_path / "first", mode="rpc", cluster={"num_trainers": 2}, training={"max_steps": 3, "batch_size": 8}
    )
    assert first.code == 0, first.output
    (tmp_path / "second").mkdir()
    profile = ["--set", "profile={start_step: 4, steps: 1}"]
    arguments = ["--resume", first.run_dir, "--set", "training.max_steps=6", *profile]
    code, output = fork_server.run(arguments, tmp_path / "second")
    assert code == 0, output
    assert [path.name for path in (tmp_path / "second").iterdir() if not path.name.startswith("output-")] == []
    assert len(list((first.run_dir / "profile").iterdir())) == 3

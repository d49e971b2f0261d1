"""examples/clients: the heat solver in C and in Fortran sends what the one in Python does, also to a real run.

And ``watch``, in C, reads the model of a real run.
"""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from c_client import build, missing
from example_modules import EXAMPLES, load_example
from fake_run import FakeRun
from launching import FinishedRun, environment, free_port, launch

from paramserver.cluster.simulation import SimulationEnvironment
from paramserver.online.protocol import ArrayDescriptor, Header, MessageKind

PACED_TASKS = Path(__file__).parents[1] / "helpers" / "paced_tasks.py"
GIVEN = (150.0, 420.0, 180.0, 350.0, 270.0)
LANGUAGES = [
    pytest.param(name, marks=pytest.mark.skipif(missing(fortran) is not None, reason=str(missing(fortran))))
    for name, fortran in (("heat", False), ("heat_fortran", True))
]


@pytest.fixture
def run():
    with FakeRun(steps=4, fields=(ArrayDescriptor("temperature", "<f4", (5, 5)),)) as fake:
        yield fake


def simulate(program, run, *arguments, parameters=GIVEN, secret=None):
    """Run a solver as a simulation of the run; returns the finished process."""
    given = SimulationEnvironment(run.address, 3, tuple(parameters), 0, 0, 1, None, secret)
    environ = {**os.environ, **({} if arguments else given.to_environ())}
    command = [str(build(program)), *map(str, arguments)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.parametrize("program", LANGUAGES)
def test_a_solver_sends_the_fields_of_the_one_in_python(run, program):
    done = simulate(program, run)
    assert (done.returncode, done.stderr) == (0, "")
    run.wait_for(lambda: run.byes)
    found = {header.step: fields["temperature"] for got in run.samples.values() for header, fields in got}
    expected = list(load_example("heat", "Heat").solver.solve(GIVEN, 5, 4))
    assert sorted(found) == [0, 1, 2, 3]
    for step, field in enumerate(expected):
        assert np.allclose(found[step], field, rtol=1e-6)
    assert [list(vector) for _, vector in run.hellos] == [list(GIVEN)]


@pytest.mark.parametrize("program", LANGUAGES[:1])
def test_arguments_of_a_solver_that_is_started_by_hand(run, program):
    assert simulate(program, run, run.address, 5, *GIVEN).returncode == 0
    run.wait_for(lambda: run.byes)
    assert run.byes == [Header(MessageKind.BYE, 5, 4)]


@pytest.mark.parametrize("program", LANGUAGES)
def test_a_solver_that_fails_says_why_and_one_that_is_not_needed_ends_well(run, program):
    done = simulate(program, run, parameters=[1.0])
    assert done.returncode != 0
    assert "initial, left, right, bottom, top" in done.stderr
    run.answers[MessageKind.HELLO] = lambda header: [header.reply(MessageKind.REFUSED).pack(), b"not you"]
    done = simulate(program, run)
    assert done.returncode != 0
    assert "refused this client: not you" in done.stderr
    run.answers[MessageKind.HELLO] = lambda header: [header.reply(MessageKind.OVER).pack()]
    assert simulate(program, run).returncode == 0


def train(fork_server, folder, program, count, steps, *flags, launcher="launch"):
    """A run of examples/heat that a solver feeds."""
    arguments = ["--config", EXAMPLES / "heat" / "config.yaml", "--set", "logging.name=run", *flags]
    for override in (
        "simulations.function=null",
        f"simulations.command={build(program)}",
        f"simulations.count={count}",
        f"simulations.steps={steps}",
        "simulations.window=2",
        "simulations.fields.temperature={shape: [6, 6], finite: true}",
        "buffer={kind: fifo, capacity: 10, watermark: 1}",
        "training.batch_size=5",
        "training.validate_every=0",
        "checkpoint={every: 3, best: null}",
        f"logging.run_dir={folder / 'runs'}",
    ):
        arguments += ["--set", override]
    code, output = fork_server.run(arguments, folder, 120, environment(), program=launcher)
    assert code == 0, output
    return FinishedRun(code, output, folder / "runs" / "run")


def count(finished, name):
    return sum(trainer["stream"][name] for trainer in finished.summary["trainers"])


@pytest.mark.processes
@pytest.mark.parametrize("program", LANGUAGES)
def test_a_solver_feeds_a_real_run(tmp_path, fork_server, program):
    finished = train(fork_server, tmp_path, program, 4, 10)
    assert finished.summary["samples"] == count(finished, "received") == 40
    simulations = finished.summary["simulations"]
    assert (simulations["complete"], simulations["restarted"], simulations["lost"]) == (4, 0, 0)
    assert count(finished, "duplicated") + count(finished, "refused") == 0


@pytest.mark.processes
@pytest.mark.parametrize("program", LANGUAGES[:1])
@pytest.mark.parametrize("lost", ["trainer:1", "server:0"])
def test_a_solver_survives_the_death_of_a_trainer_and_of_rank_0(tmp_path, fork_server, program, lost):
    faults = ["--faults", f"kill {lost} @step 6"]  # it is an error if it does not fire
    finished = train(fork_server, tmp_path, program, 4, 40, *faults, launcher="chaos")
    simulations = finished.summary["simulations"]
    assert simulations["complete"] == 4
    assert finished.summary["samples"] == count(finished, "received") == 160 - simulations["lost"]
    most = 0 if lost == "server:0" else 10 + 2 * 5  # the content of a buffer, and batches that were not applied
    assert simulations["lost"] <= most
    assert simulations["restarted"] == count(finished, "refused") == 0, finished.output


def watch(*arguments):
    """Run the program that prints a norm of each version; returns the finished process."""
    command = [build("watch"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.processes
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("mode", ["local", "rpc"])
def test_a_program_in_c_watches_a_model_while_it_is_trained(tmp_path, mode):
    """It is started before the run. In rpc rank 0 dies on the way, and returns."""
    address = f"tcp://127.0.0.1:{free_port()}"
    build("watch")
    task = f"{PACED_TASKS}:{'Slow' if mode == 'local' else 'PacedKillsItsServer'}"
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch, address, "conv.weight")
        finished = launch(
            tmp_path,
            mode=mode,
            task=task,
            task_args={"seconds": 0.1, **({} if mode == "local" else {"mark": str(tmp_path / "mark")})},
            training={"max_steps": 20},
            checkpoint={"every": 2},
            publish={"port": int(address.rpartition(":")[2])},
        )
        done = watching.result()
    assert finished.code == 0, finished.output
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("watch: the run has ended, and publishes no more versions\n")
    lines = [re.fullmatch(r"generation (\d+), step (\d+): (\S+)", line).groups() for line in done.stdout.splitlines()]
    versions = [(int(generation), int(step)) for generation, step, _ in lines]
    assert versions == sorted(set(versions))
    assert {generation for generation, _ in versions} == ({1} if mode == "local" else {1, 2})
    assert len(versions) >= 10
    saved = {int(name.removeprefix("step-")) for name in finished.checkpoints}
    compared = [(int(step), float(norm)) for _, step, norm in lines if int(step) in saved]
    assert compared
    for step, norm in compared[-len(saved) :]:
        assert norm == pytest.approx(finished.load("model", step)["conv.weight"].norm().item(), rel=1e-5)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_watch_of_nothing_says_so():
    done = watch()
    assert (done.returncode, done.stderr) == (2, f"usage: {build('watch')} ADDRESS TENSOR [KEYS]\n")
    done = watch("tcp://192.0.2.1:5", "conv.weight")
    assert (done.returncode, done.stdout) == (3, "")
    assert "watch: keys (NULL) must be given with the address tcp://192.0.2.1:5" in done.stderr

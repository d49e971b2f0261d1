"""examples/clients: the heat solver in C and in Fortran sends what the one in Python does, also to a real run."""

import os
import subprocess

import numpy as np
import pytest
from c_client import build, missing
from example_modules import EXAMPLES, load_example
from fake_run import FakeRun
from launching import FinishedRun, environment

from paramserver.cluster.simulation import SimulationEnvironment
from paramserver.online.protocol import ArrayDescriptor, Header, MessageKind

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
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


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


@pytest.mark.processes
@pytest.mark.parametrize("program", LANGUAGES)
def test_a_solver_feeds_a_real_run(tmp_path, fork_server, program):
    arguments = ["--config", EXAMPLES / "heat" / "config.yaml", "--set", "logging.name=run"]
    for override in (
        "simulations.function=null",
        f"simulations.command={build(program)}",
        "simulations.count=4",
        "simulations.steps=10",
        "simulations.window=2",
        "simulations.fields.temperature={shape: [6, 6], finite: true}",
        "buffer={kind: fifo, capacity: 40, watermark: 1}",
        "training.batch_size=5",
        "training.validate_every=0",
        "checkpoint.best=null",
        f"logging.run_dir={tmp_path / 'runs'}",
    ):
        arguments += ["--set", override]
    code, output = fork_server.run(arguments, tmp_path, timeout_s=90, environ=environment())
    finished = FinishedRun(code, output, tmp_path / "runs" / "run")
    assert code == 0, output
    assert finished.summary["samples"] == 40
    assert finished.summary["simulations"]["complete"] == 4
    assert finished.summary["simulations"]["restarted"] == 0
    streams = [trainer["stream"] for trainer in finished.summary["trainers"]]
    assert sum(stream["received"] for stream in streams) == 40
    assert sum(stream["duplicated"] + stream["refused"] for stream in streams) == 0

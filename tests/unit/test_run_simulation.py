"""A function of the user's as one simulation: its client, its end, its errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_run import FakeRun

from paramserver.cluster.simulation import SimulationEnvironment
from paramserver.online.protocol import MessageKind

ROOT = Path(__file__).parents[2]

FUNCTIONS = """
import sys
import numpy as np

def well(parameters, client):
    assert "torch" not in sys.modules
    for step in range(3):
        client.send(step, {"temperature": np.full((2, 3), parameters[1], np.float32)})

def raises(parameters, client):
    well(parameters, client)
    raise LookupError("the mesh is torn")

def reshapes(parameters, client):
    client.send(0, {"temperature": np.zeros((3, 2), np.float32)})
"""


@pytest.fixture
def work(tmp_path):
    (tmp_path / "functions.py").write_text(FUNCTIONS)

    def worked(run, function):
        environment = SimulationEnvironment(run.address, 5, (0.5, 1.25), 2, 0, 1)
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **environment.to_environ()}
        command = [sys.executable, "-m", "paramserver.run_simulation", function, "--folder", str(tmp_path)]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, cwd=tmp_path)

    return worked


@pytest.mark.parametrize("function", ["functions:well", "functions.py:well"])
def test_a_function_gets_its_parameters_and_a_client_that_is_closed_for_it(work, function):
    with FakeRun(trainers=1) as run:
        done = work(run, function)
        run.wait_for(lambda: run.byes)
        assert (done.returncode, done.stderr) == (0, "")
        assert [(header.simulation, header.attempt, header.step) for header in run.byes] == [(5, 2, 3)]
        assert [float(arrays["temperature"][1, 2]) for _, arrays in run.samples[0]] == [1.25] * 3


def test_an_exception_is_shown_and_no_bye_is_sent(work):
    with FakeRun(trainers=1) as run:
        done = work(run, "functions:raises")
        assert done.returncode == 1
        assert "LookupError: the mesh is torn" in done.stderr
        assert "Traceback" in done.stderr
        assert run.byes == []


@pytest.mark.claim("wrong-shape")
def test_what_the_client_refuses_is_one_sentence_with_the_line_of_the_user(work, tmp_path):
    with FakeRun(trainers=1) as run:
        done = work(run, "functions.py:reshapes")
        assert done.returncode == 1
        line = 1 + FUNCTIONS.splitlines().index('    client.send(0, {"temperature": np.zeros((3, 2), np.float32)})')
        assert done.stderr == (
            "error: ClientError: field temperature must have the shape (2, 3), this one has (3, 2); reshape it "
            f"({tmp_path / 'functions.py'}:{line})\n"
        )
        assert run.byes == []


def test_a_run_that_is_over_is_a_success(work):
    with FakeRun(trainers=1) as run:
        run.answers[MessageKind.SAMPLE] = lambda header: [header.reply(MessageKind.OVER).pack(), b"enough"]
        done = work(run, "functions:well")
        assert (done.returncode, done.stdout, done.stderr) == (0, "ended early: enough\n", "")


@pytest.mark.parametrize(
    ("function", "sentence"),
    [("functions:missing", "functions has no missing"), ("nowhere:well", "there is no module nowhere")],
)
def test_a_missing_function_is_reported_with_one_message(work, function, sentence):
    with FakeRun(trainers=1) as run:
        done = work(run, function)
        assert done.returncode == 2
        assert done.stderr.startswith("error: simulations.function")
        assert sentence in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert run.hellos == []

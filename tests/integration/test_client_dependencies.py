"""The client where there is nothing but the standard library, numpy and pyzmq."""

import json
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import numpy
import pytest
import zmq
from fake_run import FakeRun

import paramserver
from paramserver.cluster.simulation import SimulationEnvironment
from paramserver.online.protocol import Header, MessageKind
from paramserver.online.security import ServerSecurity, make_keys

# In addition to the package itself, wheels hold the libraries that it brings.
LIBRARIES = ("numpy.libs", "pyzmq.libs")
ABSENT = ("torch", "yaml", "tensorboard", "filelock", "pytest")

SIMULATION = """
import importlib.util, json, sys
sys.path.insert(0, sys.argv[1])
absent = [name for name in json.loads(sys.argv[2]) if importlib.util.find_spec(name) is None]
import numpy as np
from paramserver.client import Client, RunOver, ping

with Client({arguments}).open({identity}) as client:
    for step in range(5):
        client.send(step, {{"temperature": client.parameters[0] + np.full((2, 3), step)}})
found = {{name.partition(".")[0] for name in sys.modules}}
loaded = sorted(found & set(json.loads(sys.argv[2])))
print(json.dumps([absent, loaded, client.sent, ping(client._address, client._keys)]))
"""


@pytest.fixture
def bare(tmp_path):
    """A folder with links to what a producer installs."""
    folder = tmp_path / "bare"
    folder.mkdir()
    homes = [Path(module.__file__).parent for module in (numpy, zmq, paramserver)]
    homes += [home.parent / name for home in homes for name in LIBRARIES if (home.parent / name).is_dir()]
    for home in dict.fromkeys(homes):
        (folder / home.name).symlink_to(home, target_is_directory=True)
    return folder


def simulate(bare, arguments="", identity="", environ=None):
    """Without site-packages, the current folder, and variables of Python."""
    program = SIMULATION.format(arguments=arguments, identity=identity)
    command = [sys.executable, "-I", "-S", "-c", program, str(bare), json.dumps(ABSENT)]
    done = subprocess.run(command, env=environ or {}, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    absent, loaded, sent, alive = json.loads(done.stdout)
    assert absent == list(ABSENT)
    assert loaded == []
    assert sent == 5
    assert alive == {"alive": True}


def check(run, simulation, attempt):
    run.wait_for(lambda: run.byes)
    assert run.byes == [Header(MessageKind.BYE, simulation, 5, attempt=attempt)]
    got = {h.step: set(fields["temperature"].flat) for trainer in (0, 1) for h, fields in run.samples[trainer]}
    assert got == {step: {step + 0.5} for step in range(5)}
    assert sum(map(len, run.samples.values())) == 5


def test_it_sends_with_explicit_arguments(bare):
    with FakeRun() as run:
        simulate(bare, repr(run.address), "3, [0.5]")
        check(run, 3, attempt=0)


def test_it_sends_as_a_simulation_of_the_run_with_keys(bare, tmp_path):
    make_keys(tmp_path / "keys")
    with FakeRun(security=lambda context: ServerSecurity(context, tmp_path / "keys")) as run:
        environment = SimulationEnvironment(run.address, 8, (0.5,), 1, 0, 1, str(tmp_path / "keys"))
        simulate(bare, environ=environment.to_environ())
        check(run, 8, attempt=1)


def test_the_links_are_all_that_the_wheels_hold():
    """What is next to the packages and is not linked would be missed elsewhere only."""
    for wheel, own in (("numpy", "numpy"), ("pyzmq", "zmq")):
        tops = {file.parts[0] for file in files(wheel) if file.suffix == ".so" or ".so." in file.name}
        assert tops <= {own, *LIBRARIES}

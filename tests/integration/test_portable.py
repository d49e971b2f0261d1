"""Runs in the ways of other systems than Linux, which ``PARAMSERVER_PORTABLE`` forces (paramserver/platform.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from forkserver import ForkServer
from launching import differing_tensors, environment, launch, train, write_config

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
PORTABLE = {"PARAMSERVER_PORTABLE": "1"}
NEEDS_NO_SHARED_MEMORY = "not shared_memory and not complex"
EQUALITY = "tests/integration/test_mode_equivalence.py"
CORE = [
    f"{EQUALITY}::test_one_trainer_is_the_same_in_every_mode_bit_for_bit",
    f"{EQUALITY}::test_two_trainers_are_the_same_in_ddp_and_rpc_bit_for_bit",
    f"{EQUALITY}::test_extra_state_of_modules_is_saved_and_resumed_in_every_mode",
    f"{EQUALITY}::test_a_random_buffer_draws_the_same_in_every_mode",
    "tests/integration/test_survival.py::test_a_run_survives[sync/trainer/first_step/stop/rpc]",
    "tests/integration/test_survival.py::test_a_run_survives[sync/trainer/validation/kill]",
    "tests/integration/test_survival.py::test_a_run_survives[ddp/trainer/checkpoint/kill]",
    "tests/integration/test_survival.py::test_a_run_survives[sync/server/first_step/exit]",
]


def assert_passes(*tests):
    """In a process of its own, whose processes inherit the variable."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-k",
        NEEDS_NO_SHARED_MEMORY,
        *tests,
    ]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))} | PORTABLE
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_core_of_the_tests_passes():
    """Equality of modes, and survival of killed processes."""
    assert_passes(*CORE)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_all_tests_of_the_equality_of_modes_pass():
    assert_passes(EQUALITY)


@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_a_plain_run_is_that_of_linux_bit_for_bit(tmp_path, mode):
    ours = launch(tmp_path / "portable", fresh=True, mode=mode, env=PORTABLE, timeout_s=150)
    assert ours.code == 0, ours.output
    (transport,) = {record["transport"] for record in ours.of_kind("transport")}
    assert transport == {"rpc": "rpc", "ddp": "gloo"}[mode]
    assert "each rank imports torch itself, which takes longer: this system has no fork server" in ours.output
    other = train(tmp_path, mode, 2)
    assert differing_tensors(other.load("model"), ours.load("model")) == []


@pytest.fixture(scope="module")
def portable():
    """A fork server that has imported the package with the variable."""
    with ForkServer(environment(**PORTABLE, TORCH_CPP_LOG_LEVEL="ERROR")) as server:
        yield server


@pytest.mark.nightly  # the plain runs above show which transport is taken
def test_shared_memory_is_refused_where_it_is_asked_for(tmp_path, portable):
    file = write_config(tmp_path, mode="rpc", server={"transport": "shared_memory"})
    code, output = portable.run(["--config", file], tmp_path)
    assert code == 2, output
    assert "server.transport (shared_memory) must have all ranks on one host" in output


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_the_commands_of_the_readme_run(tmp_path, portable, mode):
    arguments = ["--config", ROOT / "examples/digits/config.yaml", "--mode", mode]
    arguments += ["--set", f"logging.run_dir={tmp_path}", "--set", "logging.name=digits"]
    code, output = portable.run(arguments, tmp_path)
    assert code == 0, output
    assert "status       completed" in output
    assert yaml.safe_load((tmp_path / "digits" / "config.yaml").read_text())["mode"] == mode

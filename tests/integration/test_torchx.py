"""The component of TorchX: its two roles are all ranks of a run, as planned and as started on this machine."""

import configparser
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import FinishedRun, differing_tensors, environment, free_port, launch, write_config

from paramserver.cluster import resolve_identity
from paramserver.errors import UnsupportedConfiguration
from paramserver.launch import parse, rank_flags, resolve_run

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("torchx") is None, reason="torchx (extra torchx) is not installed"),
]

ROOT = Path(__file__).parents[2]


def commands(folder, **options):
    """The words of the command of each replica, as a scheduler starts them on hosts of its own."""
    from torchx.specs import macros

    from paramserver.components import train

    flags = options.pop("flags", ())
    for role in train(*flags, config=str(folder / "config.yaml"), **options).roles:
        for replica in range(role.num_replicas):
            values = macros.Values(img_root="", app_id="app-1", replica_id=str(replica), rank0_env="HOST_OF_RANK_0")
            applied = values.apply(role)
            shell, (flag, command) = applied.entrypoint, applied.args
            assert (shell, flag, applied.env["PARAMSERVER_JOB_ID"]) == ("bash", "-c", "app-1")
            printed = command.replace("exec python -m paramserver.launch", "printf '%s\\n'", 1)
            done = subprocess.run(
                ["bash", "-c", printed], env={"HOST_OF_RANK_0": "node0"}, capture_output=True, check=True
            )
            yield done.stdout.decode().splitlines()


@pytest.mark.parametrize(("mode", "servers", "trainers"), [("rpc", 1, 2), ("rpc", 2, 3), ("ddp", 0, 2)])
def test_the_two_roles_are_the_ranks_of_one_run(tmp_path, mode, servers, trainers):
    write_config(tmp_path, mode=mode)
    identities = []
    for words in commands(tmp_path, servers=servers, trainers=trainers, flags=("--set", "task_args.note=a $b 'c'")):
        arguments = parse(words)
        config = resolve_run(arguments)[0]
        assert config.task_args["note"] == "a $b 'c'"
        identities.append(resolve_identity(rank_flags(arguments), {}, config))
    assert [identity.global_rank for identity in identities] == [*range(servers + trainers)]
    assert {(one.world_size, one.master_addr, one.master_port) for one in identities} == {
        (servers + trainers, "node0", 29500)
    }


def test_a_server_that_the_mode_does_not_have_is_refused(tmp_path):
    words = next(commands(tmp_path))  # the config is in the container only
    write_config(tmp_path, mode="ddp")
    arguments = parse(words)
    with pytest.raises(UnsupportedConfiguration, match=r"--role \(server\) must be trainer in mode ddp"):
        resolve_identity(rank_flags(arguments), {}, resolve_run(arguments)[0])


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("rpc", {"servers": 0}, r"--servers \(0\) must be at least 1 in mode rpc; correct it, or choose another mode"),
        ("rpc", {"port": 99999}, r"--master_port: cluster.master_port \(99999\) must be at most 65535; "),
        ("rpc", {"trainers": 0}, r"--trainers \(0\) must be at least 1; give the number of trainers"),
        ("ddp", {}, r"--servers \(1\) must be 0 in mode ddp; correct it, or choose another mode"),
        ("rpc", {"flags": ("--mode", "ddp")}, r"--servers \(1\) must be 0 in mode ddp; "),
    ],
)
def test_numbers_of_processes_that_the_mode_cannot_have_are_refused(tmp_path, mode, options, message):
    write_config(tmp_path, mode=mode)
    with pytest.raises(UnsupportedConfiguration, match=f"^{message}"):
        next(commands(tmp_path, **options))


@pytest.fixture
def torchx(tmp_path):
    """Calls the command with the entry points of setup.cfg, which an installed package has."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    about = tmp_path / "installed" / "components-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: components\nVersion: 0\n")
    entries = setup["options.entry_points"]["torchx.components"]
    (about / "entry_points.txt").write_text(f"[torchx.components]{entries}\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = environment(PATH=path)
    environ["PYTHONPATH"] = f"{about.parent}{os.pathsep}{ROOT}{os.pathsep}{environ['PYTHONPATH']}"

    def call(*words):
        return subprocess.run(
            [sys.executable, "-m", "torchx.cli.main", *words],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return call


def test_torchx_plans_and_runs_the_component_of_the_documentation(tmp_path, torchx):
    document = (ROOT / "docs" / "clusters.md").read_text()
    (line,) = (line for line in document.splitlines() if line.startswith("torchx run --scheduler local_cwd"))
    options = {"mode": "rpc", "cluster": {"num_trainers": 2}}
    alone = launch(tmp_path / "alone", **options)
    write_config(tmp_path, logging={"name": "run"}, **options)
    run, *words = shlex.split(line.replace("FILE", "config.yaml"))[1:]
    words += ["--port", str(free_port())]
    refused = torchx(run, "--dryrun", *" ".join(words).replace("--trainers 2", "--trainers 0").split())
    assert (refused.returncode, "--trainers (0) must be at least 1" in refused.stderr) == (1, True), refused.stderr
    planned = torchx(run, "--dryrun", *words)
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.count("python -m paramserver.launch") >= 3
    assert not (tmp_path / "runs").exists()
    done = torchx(run, "--wait", *words)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    finished = FinishedRun(0, output, tmp_path / "runs" / "run")
    assert "server/0 status       completed" in output
    assert differing_tensors(finished.load("model"), alone.load("model")) == []
    listed = torchx("builtins").stdout
    assert "paramserver.components.train" in listed
    assert "dist.ddp" in listed  # a component of TorchX

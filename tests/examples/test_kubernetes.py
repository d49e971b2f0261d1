"""examples/kubernetes: what the containers of a job run parses, and together they are all ranks of one run."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from paramserver.cluster import resolve_identity
from paramserver.config import with_world_size
from paramserver.launch import parse, rank_flags, resolve_run

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
ROOT = FOLDER.parents[1]


def pods_of_pytorchjob(job):
    """The variables that the operator sets, the pod, and its name in the network."""
    specs = job["spec"]["pytorchReplicaSpecs"]
    world_size = sum(spec["replicas"] for spec in specs.values())
    master = {"MASTER_ADDR": f"{job['metadata']['name']}-master-0", "MASTER_PORT": "23456"}
    for kind, first in (("Master", 0), ("Worker", 1)):
        for index in range(specs[kind]["replicas"]):
            environ = {**master, "RANK": str(first + index), "WORLD_SIZE": str(world_size), "PYTHONUNBUFFERED": "0"}
            yield environ, specs[kind], f"{job['metadata']['name']}-{kind.lower()}-{index}"


def pods_of_jobset(job):
    name = job["metadata"]["name"]
    for role in job["spec"]["replicatedJobs"]:
        spec = role["template"]["spec"]
        assert spec["completionMode"] == "Indexed"
        assert spec["parallelism"] == spec["completions"]
        for index in range(spec["completions"]):
            yield {"JOB_COMPLETION_INDEX": str(index)}, spec, f"{name}-{role['name']}-0-{index}.{name}"


def expand(word, environ):
    """As the kubelet does it with the arguments of a container."""
    return re.sub(r"\$\((\w+)\)", lambda found: environ[found[1]], word)


def container_file():
    """Instruction -> its arguments, in the order of the file."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split(None, 1) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("name", "pods_of"), [("pytorchjob.yaml", pods_of_pytorchjob), ("jobset.yaml", pods_of_jobset)]
)
def test_the_pods_of_a_job_are_the_ranks_of_one_run(name, pods_of, monkeypatch):
    monkeypatch.chdir(ROOT / "examples" / "digits")
    job = yaml.safe_load((FOLDER / name).read_text())
    ranks, hosts = {}, {}
    for environ, spec, host in pods_of(job):
        pod = spec["template"]["spec"]
        assert "OnFailure" in (spec.get("restartPolicy"), pod.get("restartPolicy"))
        (container,) = pod["containers"]
        words = [
            re.sub(r"\$\((\w+)\)", lambda found, given=environ: given[found[1]], word) for word in container["args"]
        ]
        arguments = parse(words)
        config, run, _ = resolve_run(arguments)
        assert run is None
        assert config.cluster.timeout_s == 600
        identity = resolve_identity(rank_flags(arguments), environ, config)
        with_world_size(config, identity.world_size)
        assert identity.global_rank not in ranks
        ranks[identity.global_rank], hosts[identity.global_rank] = identity, host
        names = {variable["name"] for variable in container.get("env", ())}
        mounts = {mount["mountPath"] for mount in container.get("volumeMounts", ())}
        if identity.global_rank == 0:  # which owns the run folder, and finds it again
            assert names == {"PARAMSERVER_JOB_ID"}
            assert mounts == {"/training/runs"}
        else:
            assert not names | mounts
    assert sorted(ranks) == [0, 1, 2]
    assert {identity.world_size for identity in ranks.values()} == {3}
    assert {(identity.master_addr, identity.local_world_size) for identity in ranks.values()} == {(hosts[0], 1)}
    assert len({identity.master_port for identity in ranks.values()}) == 1


def test_the_container_file_starts_the_command_of_the_example(monkeypatch):
    instructions = container_file()
    assert [name for name, _ in instructions] == ["FROM", "COPY", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"]
    given = dict(instructions)  # of two COPY the last
    assert json.loads(given["ENTRYPOINT"]) == ["python", "-m", "paramserver.launch"]
    *copied, folder = given["COPY"].split()
    assert folder == f"{given['WORKDIR']}/"
    assert all((ROOT / file).is_file() for file in copied)
    monkeypatch.chdir(ROOT / "examples" / "digits")
    assert resolve_run(parse(json.loads(given["CMD"])))[0].mode == "rpc"
    words = shlex.split(given["RUN"])
    assert words[:2] == ["pip", "install"]
    assert words[-1] == "/src[examples]"

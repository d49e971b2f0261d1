"""A launcher that only this test registers: one class and its place in the registry."""

import pytest

from paramserver.cluster import Job, RankFlags, allocated_gpus, find_job, resolve, resolve_identity, unused_tasks
from paramserver.cluster.base import VariableEnvironment
from paramserver.config import Config

RANK = {"LS_RANK": "1", "LS_SIZE": "2", "LS_LOCAL": "0", "LS_NODE": "1"}


class Queue(VariableEnvironment):
    """A scheduler whose ``qrun`` starts a rank on each host."""

    source = set_by = "qrun"
    known_by = "LS_RANK is set"
    variables = {  # noqa: RUF012
        **{"global_rank": "LS_RANK", "world_size": "LS_SIZE", "local_rank": "LS_LOCAL", "node_rank": "LS_NODE"},
        **{"restart_count": "LS_RESTARTS", "num_gpus": "LS_GPUS"},
    }
    master_addr = "first"
    master_port = 1234
    local_world_size = 1

    @classmethod
    def detect(cls, environ, flags):
        return "LS_RANK" in environ

    @classmethod
    def job_id(cls, environ):
        return f"queue/{environ['LS_JOB']}" if "LS_JOB" in environ else None

    @classmethod
    def allocated_gpus(cls, environ):
        return int(environ.get(cls.variables["num_gpus"], 0))

    @classmethod
    def unused_tasks(cls, environ):
        return "" if "LS_RANK" in environ or "LS_JOB" not in environ else f"{environ['LS_HOSTS']} hosts (LS_HOSTS)"


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(resolve, "ENVIRONMENTS", (*resolve.ENVIRONMENTS, Queue))


def test_it_gives_the_rank():
    identity = resolve_identity(RankFlags(), RANK, Config(mode="ddp"))
    assert (identity.global_rank, identity.world_size, identity.node_rank, identity.source) == (1, 2, 1, "qrun")
    assert (identity.master_addr, identity.master_port) == ("first", 1234)


def test_it_names_the_job_and_counts_its_restarts():
    assert find_job({"LS_JOB": "5", "LS_RESTARTS": "2"}) == Job("queue/5", 2)
    assert find_job({"LS_JOB": "5", "SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "a"}) == Job("queue/5", 0)
    assert find_job({}) is None


def test_one_without_a_variable_for_restarts_counts_them_itself(monkeypatch):
    class Flagged(Queue):
        variables = {key: name for key, name in Queue.variables.items() if key != "restart_count"}  # noqa: RUF012

        @classmethod
        def num_restarts(cls, environ):
            return int(environ.get("LS_AGAIN") == "Y")

    monkeypatch.setattr(resolve, "ENVIRONMENTS", (*resolve.ENVIRONMENTS[:-1], Flagged))
    assert find_job({"LS_JOB": "5", "LS_AGAIN": "Y"}) == Job("queue/5", 1)
    assert find_job({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "3"}).restarts == 3


def test_its_gpus_and_tasks_are_asked_for():
    assert allocated_gpus({"LS_GPUS": "4"}) == (4, "LS_GPUS")
    assert allocated_gpus({"SLURM_JOB_ID": "1", "SLURM_GPUS_ON_NODE": "2"}) == (2, "SLURM_GPUS_ON_NODE")
    assert allocated_gpus({})[0] == 0
    warning = unused_tasks({"LS_JOB": "5", "LS_HOSTS": "3"})
    assert warning.startswith("warning: this allocation has 3 hosts (LS_HOSTS), ")
    assert "start the command with qrun" in warning
    assert unused_tasks({"LS_JOB": "5", **RANK}) == ""

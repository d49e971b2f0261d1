"""Runs with a job token: ranks that are started separately, and under a supervisor that starts them again."""

import json
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from launching import FinishedRun, environment, fork_server, free_port, launch, write_config

from paramserver.distributed.timeouts import poll_until
from paramserver.runtime.rank_guard import RankGuard

pytestmark = pytest.mark.processes

TASK = f"{Path(__file__).parents[1] / 'helpers' / 'token_tasks.py'}:Looks"
SECRET = "5f1d7a84db00d2fce00b31a7fc73224f"
TIMEOUT_S = 90


class Ranks:
    """Ranks of one run, each started by hand."""

    def __init__(self, folder, mode, world_size, **config):
        task_args = {"folder": str(folder)}
        logging = {"name": "run"}
        self.config = write_config(folder, mode=mode, task=TASK, task_args=task_args, logging=logging, **config)
        self.folder, self.world_size, self.port = folder, world_size, free_port()
        self._running = ExitStack()

    def start(self, rank, *flags, **env):
        words = ["--config", self.config, "--rank", rank, "--world_size", self.world_size, "--master_port", self.port]
        started = fork_server().start([*words, *flags], self.folder, environment(**env))
        return self._running.enter_context(started)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._running.close()


def connected(port):
    """A connection to rank 0, as soon as it listens."""

    def attempt():
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        except ConnectionRefusedError:
            return None

    connection = poll_until(time.monotonic() + TIMEOUT_S, attempt, threading.Event())
    assert connection is not None
    return connection


def ended(*ranks):
    """The exit codes and the outputs of ranks."""
    return [rank.wait(TIMEOUT_S) for rank in ranks], [rank.output.read_text() for rank in ranks]


def assert_not_shown(folder, *outputs):
    """The token is in no output, no file of the run, no environment, and no command line."""
    seen = [json.loads(file.read_text()) for file in folder.glob("seen-*")]
    assert seen
    for environ, child, line in seen:
        assert "PARAMSERVER_TOKEN" not in environ
        assert "PARAMSERVER_TOKEN" not in child
        assert SECRET not in line
    files = [file for file in (folder / "runs").rglob("*") if file.is_file()]
    assert {"environment.json", "config.yaml", "metrics.jsonl"} <= {file.name for file in files}
    for content in [*(file.read_bytes() for file in files), *(output.encode() for output in outputs)]:
        assert SECRET.encode() not in content


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mode", "world_size", "servers"), [("rpc", 3, 1), ("rpc", 4, 2), ("ddp", 2, 1)])
def test_ranks_with_the_token_train(tmp_path, mode, world_size, servers):
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(SECRET + "\n")
    with Ranks(tmp_path, mode, world_size, cluster={"num_servers": servers}) as ranks:
        # By file or by variable: that is the business of each host.
        last = ranks.start(world_size - 1, PARAMSERVER_TOKEN=SECRET)
        others = [ranks.start(rank, "--set", f"cluster.token_file={token}") for rank in range(world_size - 1)]
        codes, outputs = ended(*others, last)
    assert codes == [0] * world_size, outputs
    run = FinishedRun(0, "", tmp_path / "runs" / "run")
    assert run.summary["status"] == "completed"
    assert run.summary["steps"] == 12
    assert "arning" not in "".join(outputs)
    assert_not_shown(tmp_path, *outputs)


def test_a_run_begins_while_strangers_and_wrong_ranks_try(tmp_path):
    with Ranks(tmp_path, "rpc", 3) as ranks, ExitStack() as stack:
        first = [ranks.start(rank, PARAMSERVER_TOKEN=SECRET) for rank in (0, 1)]
        strangers = [stack.enter_context(connected(ranks.port)) for _ in range(201)]
        strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        other = tmp_path / "other"
        other.touch(mode=0o600)
        other.write_text("another token of sufficient length")
        wrong, none = ranks.start(2, "--set", f"cluster.token_file={other}"), ranks.start(2)
        codes, texts = ended(wrong, none)
        assert codes == [2, 2], texts
        where = f"rank 0 at 127.0.0.1:{ranks.port}"
        cure = "give all ranks the same one, by cluster.token_file or PARAMSERVER_TOKEN\n"
        assert texts[0].endswith(
            f"error: rank 2 has another job token, from cluster.token_file ({other}), than {where}; {cure}"
        )
        assert texts[1].endswith(f"error: rank 2 has no job token, and {where} asks for it; {cure}")
        right = ranks.start(2, PARAMSERVER_TOKEN=SECRET)
        codes, outputs = ended(*first, right)
        assert codes == [0, 0, 0], outputs
    assert "127.0.0.1: it is no rank of a run" in outputs[0]
    assert "127.0.0.1: rank 2 has another job token" in outputs[0]
    assert_not_shown(tmp_path, *outputs, *texts)


def test_a_rank_with_a_token_is_refused_by_a_rank_zero_without_one(tmp_path):
    with Ranks(tmp_path, "ddp", 2) as ranks:
        ranks.start(0)
        (code,), (output,) = ended(ranks.start(1, PARAMSERVER_TOKEN=SECRET))
    assert code == 2, output
    assert output.endswith(
        f"error: rank 1 has a job token, from PARAMSERVER_TOKEN, and rank 0 at 127.0.0.1:{ranks.port} asks for none; "
        "give all ranks the same one, by cluster.token_file or PARAMSERVER_TOKEN\n"
    )
    assert SECRET not in output


def test_a_file_that_others_can_read_is_refused_before_a_rank_starts(tmp_path):
    token = tmp_path / "token"
    token.write_text(SECRET)
    token.chmod(0o644)
    finished = launch(tmp_path, "--set", f"cluster.token_file={token}", mode="rpc")
    assert finished.code == 2
    assert finished.output.count("\n") == 1
    assert f"cluster.token_file ({token}) must be closed to other users" in finished.output
    assert not (tmp_path / "runs" / "run").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("kill", ["server", "trainer"])
def test_ranks_that_start_again_prove_the_token_again(tmp_path, kill):
    finished = launch(
        tmp_path,
        mode="rpc",
        task=TASK,
        task_args={"folder": str(tmp_path), "kill": kill},
        cluster={"num_trainers": 2, "timeout_s": 150},
        checkpoint={"every": 3, "background": False},
        server={"lost_after_s": 3.0},
        env={"PARAMSERVER_TOKEN": SECRET},
        fresh=True,
    )
    assert (tmp_path / "killed").exists()
    assert finished.code == 0, finished.output
    assert finished.summary["steps"] == 12
    assert_not_shown(tmp_path, finished.output)


def test_the_guard_process_of_a_supervisor_does_not_inherit_the_token(monkeypatch):
    monkeypatch.setenv("PARAMSERVER_TOKEN", SECRET)
    guard = RankGuard(10.0)
    try:
        file = Path(f"/proc/{guard._process.pid}/environ")
        deadline = time.monotonic() + 10
        while not (environ := file.read_bytes()) and time.monotonic() < deadline:
            time.sleep(0.01)  # empty while the kernel replaces the program
    finally:
        guard.close()
    assert b"PATH=" in environ
    assert SECRET.encode() not in environ

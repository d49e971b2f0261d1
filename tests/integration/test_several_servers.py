"""Parameters over several servers: the same training as with one, whatever travels how, and one end for all."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from launching import (
    TASKS,
    FinishedRun,
    differing_tensors,
    launch,
    ranks_without_supervisor,
    relative_difference,
    resume,
    run_concurrently,
    train,
    write_config,
)
from step_oracle import Ledger, PacedTask, Replay
from supervised_tasks import ranks_of
from tasks import OPTIMIZERS, ReferenceTask
from torch import nn

from paramserver.distributed.membership import HeartbeatReply
from paramserver.distributed.rpc_calls import completed_future
from paramserver.parameters.flat import FlatLayout
from paramserver.parameters.sharding import plan_shards
from paramserver.server import shard_server
from paramserver.server.client import ServerClient
from paramserver.trainers import RpcTrainer

pytestmark = pytest.mark.processes

HERE = Path(__file__)
REPLAY = TASKS.with_name("step_oracle.py")
HARD = {
    "task_args": {"groups": True, "schedule": "step", "unused": True, "optimizer": "adamw", "dtype": "float64"},
    "training": {"max_steps": 11, "clip_grad_norm": 0.05, "accumulate_batches": 2, "validate_every": 4},
    "checkpoint": {"every": 4},
}


class Whole(ReferenceTask):
    """An optimizer that looks at whole tensors."""

    def build_optimizer(self, model):
        return torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad], lr=0.01)


class Wide(ReferenceTask):
    """A model of several sections, of which each server owns a part."""

    def build_model(self):
        layers = [nn.Flatten(), nn.Linear(36, 256)]
        for _ in range(4):
            layers += [nn.ReLU(), nn.Linear(256, 256)]
        return nn.Sequential(*layers, nn.ReLU(), nn.Linear(256, 5))


class Listed(ReferenceTask):
    """A class of the user's own, derived from one that could be split."""

    def build_optimizer(self, model):
        class Own(torch.optim.Adagrad):
            pass

        return Own(model.parameters(), lr=0.02)


class Apart(ReferenceTask):
    """Server 1 cannot reach the memory of server 0, as if it were on another host."""

    def __init__(self, **options):
        super().__init__(**options)
        if "--rank 1 " in " ".join(sys.argv):
            shard_server.can_attach = lambda *_: False


class Asks(RpcTrainer):
    """Looks at the optimizer that all share, as a user would; and uses the server as the tutorial does, in vain."""

    def leave(self, totals, decision):
        state = self.optimizer.state_dict()
        elements = sum(parameter.numel() for parameter in self.unwrapped_model.parameters() if parameter.requires_grad)
        self.log("moments", sum(one["exp_avg"].numel() for one in state["state"].values()) / elements)
        self.log("groups", len(self.optimizer.param_groups))
        with pytest.raises(Exception, match=r"cluster.num_servers \(2\) must be 1 for ParameterServer.forward"):
            self.server.rref.rpc_sync().get_param_rrefs()
        super().leave(totals, decision)


class Dies(ReferenceTask):
    """Its optimizer ends the process of one server at the fifth step, or stops it, and leaves a mark."""

    def __init__(self, mark, number, **options):
        super().__init__(**options)
        self.mark, self.number = Path(mark), number

    def build_optimizer(self, model):
        optimizer = OPTIMIZERS[self.optimizer]([p for p in model.parameters() if p.requires_grad])
        if "--rank 1 " in " ".join(sys.argv):
            optimizer.register_step_pre_hook(self._count)
            self.steps = 0
        return optimizer

    def _count(self, optimizer, args, kwargs):
        self.steps += 1
        if self.steps == 5:
            self.mark.write_text(json.dumps({"pid": os.getpid(), "time": time.time()}))
            if self.number == 0:
                raise RuntimeError("this optimizer fails on purpose")
            os.kill(os.getpid(), self.number)


class Silent(ReferenceTask):
    """Trainer 1 sends no heartbeat in its third step, which lasts until it is taken for lost.

    Args:
        runs: the folder of the run's folder.
    """

    def __init__(self, runs, **options):
        super().__init__(**options)
        self.runs, self.was_silent = Path(runs), False

    def training_step(self, model, batch, batch_idx):
        if (self.trainer.trainer_index, batch_idx) == (1, 2) and not self.was_silent:
            self.was_silent = True
            send, ServerClient._send_heartbeat = (
                ServerClient._send_heartbeat,
                lambda client: completed_future(HeartbeatReply("")),
            )
            (losses,) = self.runs.glob("*/losses.json")
            deadline = time.monotonic() + 60
            while "trainer 1" not in losses.read_text():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            ServerClient._send_heartbeat = send
        return super().training_step(model, batch, batch_idx)


def of(servers, folder, trainers=2, transport="auto", **config):
    """A run with so many servers that must end well."""
    server = {"transport": transport, "bucket_mb": 0.0005, **config.pop("server", {})}  # many messages of gradients
    folder = folder / f"{servers}-{transport}-{server.get('consistency', 'sync')}"
    finished = train(folder, "rpc", trainers, server=server, cluster={"num_servers": servers}, **config)
    assert finished.summary["num_servers"] == servers
    return finished


@pytest.mark.parametrize("transport", ["shared_memory", "rpc", "tcp"])
def test_the_same_as_with_one_server(tmp_path, transport):
    """Clipping over all of it, a schedule, groups, accumulation, BatchNorm, a parameter that nobody uses."""
    one, two, three = (
        of(n, tmp_path, transport=transport, server={"wire_dtype": "float32"}, **HARD) for n in (1, 2, 3)
    )
    for other in (two, three):
        assert relative_difference(one.load("model"), other.load("model")) < 1e-9
        assert relative_difference(one.load("optimizer"), other.load("optimizer")) < 1e-9
        assert one.load("optimizer")["param_groups"] == other.load("optimizer")["param_groups"]
        assert one.summary["validation"] == pytest.approx(other.summary["validation"], rel=1e-9)
        assert [r["lr"] for r in one.of_kind("train")] == [r["lr"] for r in other.of_kind("train")]
        assert one.summary["samples"] == other.summary["samples"]
        moved = one.summary["wire_bytes_per_step"]
        assert other.summary["wire_bytes_per_step"] == pytest.approx(moved, rel=1e-3)  # but for where ranges end
    loose = {**HARD, "training": {**HARD["training"], "clip_grad_norm": None}}
    free = of(1, tmp_path / "free", transport=transport, **loose)
    assert (
        relative_difference(one.load("model"), free.load("model")) > 1e-6
    )  # the clipping that is compared takes place


@pytest.mark.parametrize(
    ("transport", "wire_dtype"), [("shared_memory", "float32"), ("rpc", "float32"), ("rpc", "bfloat16")]
)
def test_sgd_without_clipping_is_the_same_bit_for_bit(tmp_path, transport, wire_dtype):
    config = {"task_args": {"samples": 128}, "training": {"max_steps": 10}, "server": {"wire_dtype": wire_dtype}}
    one, two, three = (of(n, tmp_path, transport=transport, **config) for n in (1, 2, 3))
    for other in (two, three):
        assert differing_tensors(one.load("model"), other.load("model")) == []
        assert differing_tensors(one.load("optimizer"), other.load("optimizer")) == []


@pytest.mark.parametrize(("transport", "servers"), [("shared_memory", 2), ("rpc", 2), ("rpc", 3)])
def test_a_model_in_sections_over_servers_is_the_same_bit_for_bit(tmp_path, transport, servers):
    layout = FlatLayout.of(list(Wide().build_model().named_parameters()))
    assert all(len(shard.ranges) > 1 for shard in plan_shards(layout, servers, splittable=True)), "sections"
    config = {"task": f"{HERE}:Wide", "task_args": {"optimizer": "adam"}, "training": {"max_steps": 12}}
    ddp = train(tmp_path, "ddp", 2, **config)
    sections = {"cluster": {"num_servers": servers}, "server": {"transport": transport}, "checkpoint": {"every": 6}}
    begun = train(tmp_path, "rpc", 2, **{**config, "training": {"max_steps": 6}}, **sections)
    rpc = resume(begun, "--set", "training.max_steps=12")
    assert rpc.code == 0, rpc.output
    assert differing_tensors(ddp.load("model"), rpc.load("model")) == []
    assert differing_tensors(ddp.load("optimizer"), rpc.load("optimizer")) == []


def test_a_server_that_is_apart_makes_all_go_over_rpc(tmp_path):
    config = {"task": f"{HERE}:Apart", "task_args": {"samples": 128}, "training": {"max_steps": 6}}
    near, apart = (of(servers, tmp_path, **config) for servers in (1, 2))
    assert differing_tensors(near.load("model"), apart.load("model")) == []
    assert differing_tensors(near.load("optimizer"), apart.load("optimizer")) == []
    assert apart.summary["wire_bytes_per_step"] > 20 * near.summary["wire_bytes_per_step"]
    strict = launch(
        tmp_path / "strict",
        mode="rpc",
        cluster={"num_trainers": 1, "num_servers": 2},
        server={"transport": "shared_memory"},
        **config,
    )
    assert strict.code == 2, strict.output
    assert "server.transport (shared_memory) must have all ranks on one host; server 1" in strict.output


@pytest.mark.parametrize("task", ["Whole", "Listed"])
def test_an_optimizer_of_whole_tensors_gets_whole_tensors(tmp_path, task):
    config = {"task": f"{HERE}:{task}", "task_args": {"dtype": "float64"}, "training": {"max_steps": 6}}
    one, two = (of(n, tmp_path, **config) for n in (1, 2))
    assert relative_difference(one.load("model"), two.load("model")) < 1e-9
    ours, theirs = one.load("optimizer")["state"], two.load("optimizer")["state"]
    assert ours.keys() == theirs.keys()
    assert relative_difference(ours, theirs) < 1e-9


FREE = {
    "async": {"consistency": "async", "stale_scaling": "inverse"},
    "bounded": {"consistency": "bounded", "staleness_bound": 1},
    "backup": {"consistency": "sync", "backup_trainers": 1},
}


@pytest.mark.parametrize(
    ("kind", "transport"), [("async", "shared_memory"), ("async", "rpc"), ("bounded", "rpc"), ("backup", "rpc")]
)
def test_free_trainers_push_what_one_process_computes_bit_for_bit(tmp_path, kind, transport):
    """All parts of what a trainer pulls are of the version that it names, also where others went on meanwhile."""
    options = {"samples": 400, "optimizer": "adamw", "groups": True, "schedule": "step", "unused": True}
    run = of(
        3,
        tmp_path,
        trainers=4,
        transport=transport,
        task=f"{REPLAY}:PacedTask",
        task_args={**options, "pace_ms": 4.0, "slow": 3, "slow_ms": 60.0},
        trainer=f"{REPLAY}:LedgerTrainer",
        server=FREE[kind],
        training={"max_steps": 40, "validate_every": 15},
        checkpoint={"every": 20},
    )
    ledger = Ledger.of(run)
    assert ledger.ways == {transport}
    assert len(ledger.updates()) == 40
    assert kind == "backup" or sum(entry.staleness > 0 for entry in ledger.applied) >= 10
    assert kind != "backup" or ledger.dropped
    replay = Replay(PacedTask(**options), stale_scaling=FREE[kind].get("stale_scaling", "none")).run(ledger)
    assert replay.wrong == []
    assert differing_tensors(replay.model.state_dict(), run.load("model")) == []
    assert differing_tensors(replay.optimizer.state_dict(), run.load("optimizer")) == []
    assert run.checkpoints == ["step-00000020", "step-00000040"]
    assert len(run.of_kind("validation")) >= 2


@pytest.mark.parametrize("transport", ["shared_memory", "rpc", "tcp"])
def test_one_trainer_that_runs_freely_is_one_that_does_not(tmp_path, transport):
    config = {"training": {"max_steps": 10, "validate_every": 5}, "checkpoint": {"every": 5}}
    step, free = (
        of(servers, tmp_path, trainers=1, transport=transport, server={"consistency": word}, **config)
        for servers, word in ((1, "sync"), (2, "async"))
    )
    assert differing_tensors(step.load("model"), free.load("model")) == []
    assert step.summary["validation"] == free.summary["validation"]


def goes_on(run, steps, *flags):
    """The next part of a run."""
    finished = resume(run, "--set", f"training.max_steps={steps}", *flags)
    assert finished.code == 0, finished.output
    return finished


def test_a_checkpoint_is_of_any_number_of_servers(tmp_path):
    """One server, two, three and one again; then all-reduce and a single process read what two servers wrote."""
    config = {**HARD, "training": {**HARD["training"], "max_steps": 16, "validate_every": 0}}
    whole = of(1, tmp_path / "whole", **config)
    run = of(1, tmp_path, **{**config, "training": {**config["training"], "max_steps": 4}})
    for servers, steps in ((2, 8), (3, 12), (1, 16)):
        run = goes_on(run, steps, "--set", f"cluster.num_servers={servers}")
        assert run.summary["num_servers"] == servers
    assert relative_difference(whole.load("model"), run.load("model")) < 1e-9
    assert relative_difference(whole.load("optimizer"), run.load("optimizer")) < 1e-9


@pytest.mark.parametrize("mode", ["local", "ddp"])
def test_what_two_servers_wrote_goes_on_without_a_server(tmp_path, mode):
    trainers = 1 if mode == "local" else 2
    training = {"max_steps": 6, "clip_grad_norm": 0.5}
    config = {"task_args": {"dtype": "float64", "optimizer": "adam"}, "training": training, "checkpoint": {"every": 6}}
    whole = train(tmp_path / "whole", "rpc", trainers, **{**config, "training": {**training, "max_steps": 12}})
    run = of(2, tmp_path, trainers=trainers, **config)
    run = goes_on(run, 12, "--mode", mode)
    assert relative_difference(whole.load("model"), run.load("model")) < 1e-9
    assert relative_difference(whole.load("optimizer"), run.load("optimizer")) < 1e-9


def test_an_interrupt_ends_several_servers_with_a_checkpoint(tmp_path):
    mark = tmp_path / "mark"
    task_args = {"what": "terminate", "mark": str(mark), "trainer": 1}
    config = {"task": "FaultyTask", "task_args": task_args, "training": {"max_steps": 2000}}
    run = launch(tmp_path, mode="rpc", cluster={"num_trainers": 2, "num_servers": 2, "timeout_s": 30}, **config)
    assert mark.exists()
    assert run.code == 3, run.output
    assert run.summary["status"] == "interrupted"
    assert run.checkpoints
    again = goes_on(
        run, run.summary["steps"] + 3, "--set", f"task_args.mark={tmp_path / 'other'}", "--set", "task_args.batch=-1"
    )
    assert again.summary["status"] == "completed"


@pytest.mark.parametrize("whom", ["all", "server 1"])
def test_a_signal_to_a_server_is_one_to_the_run(tmp_path, fork_server, whom):
    config = {"training": {"max_steps": 100_000}, "checkpoint": {"every": 20}, "logging": {"name": "run"}}
    config["server"] = {"lost_after_s": 40.0}  # no rank counts as lost meanwhile
    file = write_config(tmp_path, mode="rpc", cluster={"num_trainers": 2, "num_servers": 2}, **config)
    finished = FinishedRun(0, "", tmp_path / "runs" / "run")
    with fork_server.start(["--config", file], tmp_path) as run:
        deadline = time.monotonic() + 60
        while not (finished.run_dir / "checkpoints" / "latest").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        asked = time.monotonic()
        if whom == "all":
            os.killpg(run.pid, signal.SIGTERM)
        else:
            ranks_of(run.pid)[1].send_signal(signal.SIGTERM)
        code, output = run.wait(60), run.output.read_text()
    assert code == 3, output
    assert time.monotonic() - asked < 10
    assert "interrupted (signal SIGTERM)" in output.splitlines()[-1]
    assert finished.summary["status"] == "interrupted"
    assert finished.summary["checkpoint"] == f"step-{finished.summary['steps']:08d}"


def test_the_shared_optimizer_has_the_state_of_all_servers(tmp_path):
    args = {"optimizer": "adam", "groups": True}
    run = of(2, tmp_path, trainer=f"{HERE}:Asks", task_args=args, training={"max_steps": 5})
    logged = {(r["trainer"], r["name"]): r["value"] for r in run.of_kind("log")}
    assert logged == {(i, name): value for i in (0, 1) for name, value in (("moments", 1.0), ("groups", 2.0))}


def fatal_config(folder, number, transport):
    """Server 1 is lost at the fifth step, which ends the run."""
    return {
        "mode": "rpc",
        "task": f"{HERE}:Dies",
        "task_args": {"mark": str(folder / "mark"), "number": int(number)},
        "cluster": {"num_trainers": 2, "num_servers": 2, "timeout_s": 30, "max_restarts": 0},
        "server": {"lost_after_s": 2.0, "transport": transport, "on_loss": "fail"},
        "training": {"max_steps": 2000},
        "checkpoint": {"every": 3, "background": False},
    }


def fatal(folder, number, transport):
    mark = folder / "mark"
    run = launch(folder, **fatal_config(folder, number, transport))
    ended = time.time()
    fired = json.loads(mark.read_text())
    assert not psutil.pid_exists(fired["pid"])
    assert run.code == 1, run.output
    assert run.summary["status"] == "failed"
    assert run.checkpoints == ["step-00000003"]
    return run, ended - fired["time"]


@pytest.mark.parametrize("transport", ["shared_memory", "rpc", "tcp"])
def test_a_server_that_is_killed_ends_the_run_with_its_name(tmp_path, transport):
    run, elapsed_s = fatal(tmp_path, signal.SIGKILL, transport)
    assert "error: rank 1 (server 1): killed by SIGKILL" in run.output
    assert run.summary["error"].startswith("PeerLost: server 1 (")
    assert elapsed_s < 20


def test_a_server_that_freezes_or_fails_ends_the_run(tmp_path):
    (frozen, _), (failed, _) = run_concurrently(
        lambda: fatal(tmp_path / "frozen", signal.SIGSTOP, "auto"), lambda: fatal(tmp_path / "failed", 0, "rpc")
    )
    # Server 0 notices it, or the supervisor, which kills it.
    silent = r"no heartbeat for server\.lost_after_s \(2 s\)"
    assert re.fullmatch(
        rf"PeerLost: server 1 \(.*\) is lost: ({silent}|its connection was closed.*)", frozen.summary["error"]
    )
    assert re.search(r"server 1\b", frozen.output.rstrip().splitlines()[-1])
    assert "failed elsewhere" not in frozen.output.rpartition("error: ")[2]
    assert "this optimizer fails on purpose" in failed.output
    assert "server 1" in failed.summary["error"]


def test_a_frozen_server_is_detected_by_its_heartbeats(tmp_path):
    """Without a supervisor, which would notice it too."""
    config = fatal_config(tmp_path, signal.SIGSTOP, "auto")
    with ranks_without_supervisor(tmp_path, 4, **config) as (server, _, *trainers):
        assert [one.wait(60) for one in (server, *trainers)] == [1, 1, 1]
        named = r"server 1 \(.*\) is lost: no heartbeat for server.lost_after_s \(2 s\)"
        for one in (server, *trainers):
            assert re.search(named, one.output.read_text().rstrip().splitlines()[-1])
    assert (tmp_path / "mark").exists()
    summary = FinishedRun(1, "", tmp_path / "runs" / "run").summary
    assert re.fullmatch(f"PeerLost: {named}", summary["error"])


def test_more_servers_than_the_model_has_parts_for_are_refused(tmp_path):
    file = tmp_path / "small.py"
    file.write_text(
        f"import sys\nsys.path.insert(0, {str(TASKS.parent)!r})\nimport torch\nfrom tasks import ReferenceTask\n\n\n"
        "class Small(ReferenceTask):\n    def build_model(self):\n"
        "        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 5, bias=False))\n\n"
        "    def build_optimizer(self, model):\n        return torch.optim.Adafactor(model.parameters())\n"
    )
    run = launch(tmp_path, mode="rpc", task=f"{file}:Small", cluster={"num_trainers": 1, "num_servers": 2})
    assert run.code == 2, run.output
    assert "cluster.num_servers (2) must be at most 1" in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("transport", ["shared_memory", "rpc", "tcp"])
def test_a_trainer_that_was_taken_for_lost_during_a_step_joins_again(tmp_path, servers, transport):
    """It lives, so the servers must not end the context of its step; its push is refused."""
    finished = train(
        tmp_path,
        "rpc",
        2,
        task=f"{HERE}:Silent",
        task_args={"runs": str(tmp_path / "rpc-2" / "runs"), "batch_norm": False},
        server={"transport": transport, "lost_after_s": 2.0, "bucket_mb": 0.0005},
        cluster={"num_servers": servers},
        training={"max_steps": None, "max_epochs": 1, "uneven_inputs": "join"},
    )
    assert finished.summary["samples"] == 256
    assert [(record["trainer"], record["incarnation"]) for record in finished.of_kind("joined")] == [(1, 2)]
    assert "starts again" not in finished.output

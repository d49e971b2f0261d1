"""Rounds of local steps (docs/rounds.md): the same in every mode, exact after stops and losses."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_errors import error_message
from launching import differing_tensors, launch, relative_difference, resume, run_in_process, train
from round_tasks import FEATURES, Rows

pytestmark = pytest.mark.processes

HELPERS = Path(__file__).parents[1] / "helpers"
TASKS = HELPERS / "round_tasks.py"
NESTEROV = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}


def rounds(training=(), **sections):
    """A config of the reference task with an optimizer that has state, a schedule, and module buffers."""
    arguments = {"optimizer": "adam", "schedule": "step", "dtype": "float64", **sections.pop("task_args", {})}
    given = {"max_steps": 6, "batch_size": 7, "local_steps": 3, "outer": NESTEROV, "validate_every": 2}
    return {
        "task": f"{TASKS}:Mixed",
        "task_args": arguments,
        "training": {**given, **dict(training)},
        "checkpoint": {"every": 2, "keep": 9, "background": False},
        "logging": {"log_every": 1, "tensorboard": False},
        **sections,
    }


def assert_same(one, other, names=("model", "optimizer"), limit=0.0):
    assert one.summary["samples"] == other.summary["samples"]
    for name in names:
        if limit:
            assert relative_difference(one.load(name), other.load(name)) <= limit, name
        else:
            assert differing_tensors(one.load(name), other.load(name)) == [], name
    for kind, field in (("train", "loss"), ("validation", "values")):
        ours, theirs = ([[r["step"], r[field]] for r in run.of_kind(kind)] for run in (one, other))
        assert ours == theirs if not limit else ours == [[step, pytest.approx(v, rel=1e-9)] for step, v in theirs]


# A round is what it is defined as.


@pytest.mark.claim("rounds")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("mode", "trainers"), [("local", 1), ("rpc", 2), ("ddp", 2)])
def test_rounds_of_one_step_are_steps(tmp_path, mode, trainers):
    """With an outer SGD of 1, the mean of what the inner SGD did is the step with the mean of the gradients."""
    config = {
        "task_args": {"dtype": "float64", "batch_norm": False, "dropout": 0.0, "optimizer": "sgd"},
        "training": {"max_steps": 6, "batch_size": 8, "validate_every": 3},
        "logging": {"log_every": 1},
    }
    if trainers > 1:  # momentum is that of each trainer
        config["task"], config["task_args"] = f"{TASKS}:Rows", {}
    steps = train(tmp_path / "steps", mode, trainers, **config)
    config["training"] = {**config["training"], "outer": {"optimizer": "sgd", "lr": 1.0, "momentum": 0.0}}
    assert_same(train(tmp_path / "rounds", mode, trainers, **config), steps, names=["model"], limit=1e-12)


class Numpy:
    """The algorithms in plain numpy: ``theta`` after each update, given who arrives with what."""

    def __init__(self, kind, lr, momentum=0.0, delay=1, beta2=0.99, eps=1e-3):
        self.kind, self.lr, self.mu, self.delay, self.beta2, self.eps = kind, lr, momentum, delay, beta2, eps
        self.theta = np.zeros(FEATURES)
        self.m, self.v, self.sum, self.t = np.zeros(FEATURES), np.zeros(FEATURES), np.zeros(FEATURES), 0
        self.taken = {}

    def local(self, trainer, steps, lr=0.1):
        own = self.theta.copy()
        for _ in range(steps):
            number = self.taken.get(trainer, 0)
            features, target = (value.numpy() for value in Rows.row(trainer, number))
            own -= lr * (own @ features - target) * features
            self.taken[trainer] = number + 1
        return self.theta - own

    def update(self, change):
        self.t += 1
        if self.kind == "sgd":
            self.m = self.mu * self.m + change
            self.theta = self.theta - self.lr * self.m
        elif self.kind == "nesterov":
            self.m = self.mu * self.m + change
            self.theta = self.theta - self.lr * (change + self.mu * self.m)
        elif self.kind == "adam":
            self.m = self.mu * self.m + (1 - self.mu) * change
            self.v = self.beta2 * self.v + (1 - self.beta2) * change**2
            root = np.sqrt(self.v / (1 - self.beta2**self.t)) + self.eps
            self.theta = self.theta - self.lr * self.m / (1 - self.mu**self.t) / root
        else:
            self.sum = self.sum + change
            self.theta = self.theta - self.lr * change / self.delay
            if self.t % self.delay == 0:
                self.m, self.sum = self.mu * self.m + self.sum / self.delay, np.zeros(FEATURES)
                self.theta = self.theta - self.lr * self.mu * self.m


def weights_of(run):
    return np.array([run.load("model", step)["weight"].numpy()[0] for step in range(1, run.summary["steps"] + 1)])


OUTER = [
    ("sgd", {"lr": 0.5, "momentum": 0.3}),
    ("nesterov", {"lr": 0.7, "momentum": 0.9}),
    ("adam", {"lr": 0.1, "momentum": 0.9}),
    ("delayed_nesterov", {"lr": 0.7, "momentum": 0.9, "delay": 2}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "options"), OUTER, ids=[kind for kind, _ in OUTER])
@pytest.mark.parametrize(
    ("mode", "trainers", "consistency"), [("ddp", 2, "sync"), ("rpc", 2, "sync"), ("rpc", 1, "async")]
)
def test_each_algorithm_is_that_of_plain_numpy(tmp_path, mode, trainers, consistency, kind, options):
    run = train(
        tmp_path,
        mode,
        trainers,
        task=f"{TASKS}:Rows",
        training={"max_steps": 5, "batch_size": 1, "local_steps": 4, "outer": {"optimizer": kind, **options}},
        checkpoint={"every": 1, "keep": 9, "background": False},
        server={"consistency": consistency},
    )
    plain, expected = Numpy(kind, **options), []
    for _ in range(5):
        plain.update(sum(plain.local(i, 4) for i in range(trainers)) / trainers)
        expected.append(plain.theta)
    assert np.abs(weights_of(run) - np.array(expected)).max() <= 1e-12


# The same in every mode.


@pytest.mark.claim("rounds")
def test_one_trainer_is_a_local_run(tmp_path):
    config = rounds({"clip_grad_norm": 0.5, "accumulate_batches": 2})
    local = train(tmp_path, "local", 1, **config)
    for mode in ("rpc", "ddp"):
        assert_same(train(tmp_path, mode, 1, **config), local)


VARIANTS = {
    "shared memory": {},
    "messages": {"server": {"transport": "rpc"}},
    "three servers": {"cluster": {"num_servers": 3}},
    "messages to two servers": {"cluster": {"num_servers": 2}, "server": {"transport": "rpc"}},
}


@pytest.mark.claim("rounds")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_server_is_the_twin_of_all_reduce(tmp_path, variant):
    config = rounds({"clip_grad_norm": 0.5, "accumulate_batches": 2, "ema_decay": 0.5})
    rpc = train(tmp_path, "rpc", 2, **{**config, **VARIANTS[variant]})
    assert_same(rpc, train(tmp_path, "ddp", 2, **config), ("model", "optimizer", "ema"))
    assert rpc.of_kind("train")[-1]["local_steps"] == 3
    assert 0 < rpc.of_kind("train")[-1]["drift"] < 1
    assert rpc.summary["inner_steps"] == 2 * 6 * 3
    inner = [(r["step"], r["trainer"], r["inner_step"], r["lr"]) for r in rpc.of_kind("inner")]
    expected = [
        (round_, i, 3 * round_, [pytest.approx(1e-3 * 0.7 ** (round_ - 1))]) for round_ in range(1, 7) for i in (0, 1)
    ]
    assert sorted(inner, key=lambda row: row[:2]) == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("weighting", ["trainers", "samples"])
@pytest.mark.parametrize("uneven_inputs", ["stop", "join"])
def test_data_that_ends_within_a_round(tmp_path, uneven_inputs, weighting):
    """94 samples of two trainers in batches of 7: the last round of each is shorter, and the last batch smaller."""
    outer = {**NESTEROV, "weighting": weighting}
    training = {"max_steps": None, "max_epochs": 1, "uneven_inputs": uneven_inputs, "outer": outer}
    config = rounds(training, task_args={"samples": 94})
    rpc, ddp = (train(tmp_path, mode, 2, **config) for mode in ("rpc", "ddp"))
    assert_same(rpc, ddp)
    assert rpc.summary["samples"] == 94
    assert rpc.summary["samples_left"] == 0


@pytest.mark.parametrize("buffer", [{"kind": "firo", "pseudo_epochs": 2}, {"kind": "reservoir", "capacity": 64}])
def test_other_buffers(tmp_path, buffer):
    config = rounds(buffer={"watermark": 8, **buffer})
    assert_same(train(tmp_path, "rpc", 2, **config), train(tmp_path, "ddp", 2, **config))


def test_a_round_may_have_more_samples_than_the_buffer_holds(tmp_path):
    config = rounds({"local_steps": 9, "max_steps": 2}, buffer={"capacity": 14})
    assert_same(train(tmp_path, "rpc", 2, **config), train(tmp_path, "ddp", 2, **config))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["ddp", "rpc"])
def test_others_wait_for_a_slow_round_as_long_as_for_its_steps(tmp_path, mode):
    training = {"max_steps": 2, "batch_size": 1, "local_steps": 10, "validate_every": 0}
    config = rounds(training, task_args={}, cluster={"timeout_s": 2}, server={"lost_after_s": 1.5})
    config |= {"task": f"{TASKS}:OneIsSlow", "task_args": {"batch_s": 0.25}}
    assert train(tmp_path, mode, 2, **config).summary["steps"] == 2


# Stops and losses.


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Runs of two trainers that several tests compare others with, or resume as copies: each is made once."""
    made = {}

    def run(steps=6, copy=None, **sections):
        name = f"{steps}-{sections}"
        if name not in made:
            made[name] = train(tmp_path_factory.mktemp("shared"), "rpc", 2, **rounds({"max_steps": steps}, **sections))
        return made[name] if copy is None else replace(made[name], run_dir=shutil.copytree(made[name].run_dir, copy))

    return run


@pytest.mark.claim("rounds")
@pytest.mark.sampled(5)
@pytest.mark.parametrize(("mode", "trainers"), [("local", 1), ("ddp", 2), ("rpc", 2)])
@pytest.mark.parametrize("schedule", ["step", "validation"])
def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path, mode, trainers, schedule):
    whole = train(tmp_path / "whole", mode, trainers, **rounds(task_args={"schedule": schedule}))
    half = train(tmp_path / "half", mode, trainers, **rounds({"max_steps": 2}, task_args={"schedule": schedule}))
    more = resume(half, "--set", "training.max_steps=6")
    assert more.code == 0, more.output
    assert_same(more, whole)
    for trainer in range(trainers):
        one, other = (run.load(f"trainer-{trainer}") for run in (more, whole))
        assert differing_tensors(one["local_steps"], other["local_steps"]) == []
        assert one["counters"]["inner_steps"] == other["counters"]["inner_steps"] == 18


def test_a_schedule_that_follows_a_metric_waits_where_a_trainer_has_no_validation_sample(tmp_path):
    """In ``async`` each trainer has the values of its own share."""
    finished = train(
        tmp_path,
        "rpc",
        2,
        task=f"{TASKS}:FollowsLoss",
        training={"max_steps": 40, "batch_size": 1, "local_steps": 2, "validate_every": 2},
        server={"consistency": "async"},
        logging={"log_every": 1, "tensorboard": False},
    )
    rates = {r["trainer"]: r["lr"] for r in finished.of_kind("inner")}
    assert rates[1] == [0.1]
    assert rates[0] < [0.1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("victim", [1, -1], ids=["trainer", "rank 0"])
def test_a_loss_in_mid_round_changes_no_bit_with_rollback(tmp_path, shared, victim):
    server = {"on_loss": "rollback", "lost_after_s": 3.0}
    whole = shared(server=server)
    task_args = {"die": str(tmp_path / "died"), "victim": victim}
    other = train(tmp_path / "other", "rpc", 2, **rounds(server=server, task_args=task_args))
    assert (tmp_path / "died").exists()
    assert other.summary["faults"]
    assert_same(other, whole, ("model", "optimizer", "trainer-0", "trainer-1"))


def test_a_trainer_that_is_lost_in_mid_round_loses_that_round_only(tmp_path):
    """Each sample is applied once: those of its local steps were not applied, and are dealt to its replacement."""
    training = {"max_steps": None, "max_epochs": 1, "uneven_inputs": "join"}
    config = rounds(training, task_args={"die": str(tmp_path / "died"), "victim": 1}, server={"lost_after_s": 3.0})
    run = train(tmp_path, "rpc", 2, **config)
    assert (tmp_path / "died").exists()
    assert run.summary["samples"] == 256
    assert "; of its round, of at most 3 local steps, nothing is applied" in run.summary["faults"][0]["text"]
    assert [record["restored"] for record in run.of_kind("local_steps") if record["trainer"] == 1] == [True]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mode", "trainers"), [("local", 1), ("ddp", 3), ("rpc", 1), ("rpc", 3)])
def test_a_run_of_rounds_resumes_with_other_trainers_and_in_another_mode(tmp_path, shared, mode, trainers):
    begun = shared(2, tmp_path / "run")
    flags = [f"training.max_steps=4 mode={mode} cluster.num_trainers={trainers}"]
    more = resume(begun, *(word for change in flags[0].split() for word in ("--set", change)))
    assert more.code == 0, more.output
    assert more.summary["steps"] == 4
    # A trainer beyond those of the checkpoint begins with a new optimizer.
    restored = [record["restored"] for record in more.of_kind("local_steps") if record["step"] == 2]
    assert sorted(restored) == [False] * max(trainers - 2, 0) + [True] * min(trainers, 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("begins", [True, False])
def test_a_resume_with_rounds_of_a_run_without_is_refused(tmp_path, begins):
    training = {"local_steps": 1, "outer": None} if begins else {}
    begun = train(tmp_path, "local", 1, **rounds(training))
    change = "training.local_steps=2" if begins else "training.local_steps=1"
    more = resume(begun, "--set", change, *(() if begins else ("--set", "training.outer=null")))
    assert more.code == 2, more.output
    assert "is of a run " + ("without" if begins else "with") + " rounds of local steps" in more.output


def test_a_resume_with_another_kind_of_outer_optimizer_is_refused(tmp_path):
    begun = train(tmp_path, "local", 1, **rounds({"max_steps": 2}))
    more = resume(begun, "--set", "training.outer.optimizer=adam")
    assert more.code == 2, more.output
    assert "training.outer.optimizer (adam) must be sgd or nesterov to resume" in more.output
    more = resume(begun, "--set", "training.outer.optimizer=sgd", "--set", "training.max_steps=3")
    assert more.code == 0, more.output


def test_local_steps_of_all_trainers_are_counted_after_a_resume_with_other_trainers(tmp_path, shared):
    for trainers, expected in ((1, 12 + 3), (3, 12 + 9)):
        flags = [f"cluster.num_trainers={trainers}", "training.max_steps=3", "training.batch_size=4"]
        more = resume(shared(2, tmp_path / f"copy-{trainers}"), *(word for flag in flags for word in ("--set", flag)))
        assert more.code == 0, more.output
        assert more.summary["inner_steps"] == expected


# Bad input.


BAD = [
    ({"training": {"local_steps": 0}}, "training.local_steps (0) must be at least 1"),
    ({"training": {"local_steps": 1.5}}, "training.local_steps (1.5) must be a whole number"),
    ({"training": {"outer": {"lr": 0}}}, "training.outer.lr (0) must be above 0"),
    ({"training": {"outer": {"optimizer": "adam", "beta2": 1}}}, "training.outer.beta2 (1) must be below 1"),
    ({"training": {"outer": {"momentum": 1}}}, "training.outer.momentum (1) must be below 1"),
    (
        {
            "task": f"{TASKS}:Complex",
            "task_args": {},
            "training": {"local_steps": 1, "outer": None},
            "server": {"transport": "rpc", "compression": "bfloat16"},
        },
        "server.compression (bfloat16) must be none with complex parameters (weight)",
    ),
    ({"training": {"outer": {"delay": 2}}}, "training.outer.delay (2) must be null"),
    ({"server": {"arrivals": 2}}, "server.arrivals (2) must be 1 with server.consistency sync"),
    ({"server": {"dynamic_local_steps": True}, "training": {"local_steps": 1}}, "server.dynamic_local_steps (true)"),
    ({"server": {"compute": "server"}}, "must be left out with server.compute server"),
    ({"mode": "ddp", "ddp": {"comm_hook": "bf16"}}, "ddp.comm_hook (bf16) must be none"),
    ({"task": f"{HELPERS / 'optimizer_tasks.py'}:Adversarial", "task_args": {}}, "several optimizers that take turns"),
    ({"task": f"{TASKS}:Tables", "task_args": {}}, "embedding tables (0.weight)"),
    (
        {"training": {"local_steps": 99}, "buffer": {"kind": "reservoir", "capacity": 64}},
        "training.local_steps (99) must be at most 9 with a buffer of 64",
    ),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("change", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_what_does_not_go_with_rounds_is_refused_in_one_sentence(tmp_path, change, sentence):
    config = rounds()
    for section, values in change.items():
        config[section] = {**config.get(section, {}), **values} if isinstance(values, dict) and values else values
    mode = config.pop("mode", "rpc" if "server" in config else "local")
    start = run_in_process if mode == "local" else launch
    refused = start(tmp_path / "run", mode=mode, **config)
    assert refused.code == 2, refused.output
    assert sentence in error_message(refused)


# Compression.

COMPRESSED = {"transport": "rpc", "compression": "int8", "compression_block": 6}


@pytest.mark.claim("compression")
@pytest.mark.sampled(5)
@pytest.mark.parametrize("compression", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_compressed_pushes_do_not_depend_on_servers_and_buckets(tmp_path, compression, local_steps):
    training = {"local_steps": local_steps, "outer": None if local_steps == 1 else NESTEROV}
    config = rounds(training, server={**COMPRESSED, "compression": compression})
    one = train(tmp_path / "one", "rpc", 2, **config)
    config["server"] = {**config["server"], "bucket_mb": 0.001}
    other = train(tmp_path / "other", "rpc", 2, **config, cluster={"num_servers": 2})
    assert_same(other, one)
    plain = train(tmp_path / "plain", "rpc", 2, **rounds(training, server={"transport": "rpc"}))
    assert 0 < relative_difference(one.load("model"), plain.load("model")) < 0.1
    assert one.summary["wire_bytes_per_step"] < plain.summary["wire_bytes_per_step"]


@pytest.mark.claim("compression")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("on_loss", [None, "rollback"])
def test_residuals_are_part_of_what_a_trainer_stores(tmp_path, shared, on_loss):
    """A run that is stopped and resumed, or whose trainer is lost in mid-round, is the one that is not, bit for bit."""
    whole = shared(server=COMPRESSED)
    if on_loss is None:
        half = shared(2, tmp_path / "half", server=COMPRESSED)
        assert half.load("trainer-1")["residuals"]
        more = resume(half, "--set", "training.max_steps=6")
        assert more.code == 0, more.output
    else:
        server = {**COMPRESSED, "on_loss": on_loss, "lost_after_s": 3.0}
        task_args = {"die": str(tmp_path / "died"), "victim": 1}
        more = train(tmp_path / "more", "rpc", 2, **rounds(server=server, task_args=task_args))
        assert (tmp_path / "died").exists()
    assert_same(more, whole, ("model", "optimizer"))
    for trainer in range(2):
        ours, theirs = (run.load(f"trainer-{trainer}")["residuals"] for run in (more, whole))
        assert differing_tensors(ours, theirs) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("mode", "trainers"), [("rpc", 1), ("rpc", 3), ("ddp", 2)])
def test_residuals_move_to_other_trainers_or_are_dropped_with_a_note(tmp_path, shared, mode, trainers):
    begun = shared(2, tmp_path / "run", server=COMPRESSED)
    changes = [f"mode={mode}", f"cluster.num_trainers={trainers}", "training.max_steps=3"]
    more = resume(begun, *(word for change in changes for word in ("--set", change)))
    assert more.code == 0, more.output
    assert ("is dropped, as they are not compressed now" in more.output) is (mode == "ddp")
    restored = [record["restored"] for record in more.of_kind("residuals") if record["step"] == 2]
    assert len(restored) == (trainers if mode == "rpc" else 0)


def test_compression_of_what_is_in_shared_memory_is_named(tmp_path):
    run = train(tmp_path, "rpc", 2, **rounds({"max_steps": 2}, server={"compression": "int8"}))
    assert "server.compression (int8) compresses nothing here" in run.output


# Trainers that do not wait for each other.


@pytest.mark.sampled(7)
@pytest.mark.parametrize("server", [{"arrivals": 3}, {}, {"consistency": "bounded"}, {"dynamic_local_steps": True}])
@pytest.mark.parametrize("transport", ["auto", "rpc", "tcp"])
def test_rounds_without_lockstep_apply_each_sample_once(tmp_path, server, transport):
    config = rounds(
        {"max_steps": None, "max_epochs": 2, "uneven_inputs": "join", "outer": None},
        server={"consistency": "async", "transport": transport, **server},
    )
    run = train(tmp_path, "rpc", 2, **config)
    assert run.summary["samples"] == 2 * 256
    if "dynamic_local_steps" not in server:  # 37 batches of each, in rounds of 3
        assert run.summary["steps"] == -(-2 * 13 // server.get("arrivals", 1))
    lr = run.of_kind("train")[-1]["lr"][0]
    assert lr == pytest.approx(1.0 if "arrivals" in server else 0.5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("arrivals", [1, 2, 3, 4])
@pytest.mark.parametrize("trainers", [1, 2])
def test_the_schedule_of_epochs_counts_the_samples_before_an_update_of_several_arrivals(tmp_path, arrivals, trainers):
    """Also of the last update, which has fewer: no epoch begins that the run does not have."""
    training = {"max_steps": None, "max_epochs": 2, "batch_size": 5, "uneven_inputs": "join", "validate_every": 0}
    config = {"task_args": {"schedule": "epoch", "samples": 60}, "training": training, "logging": {"log_every": 1}}
    run = train(tmp_path, "rpc", trainers, **config, server={"consistency": "async", "arrivals": arrivals})
    records = run.of_kind("train")
    before = [0, *(record["samples"] for record in records[:-1])]
    assert [record["epoch"] for record in records] == [samples // 60 for samples in before]
    assert [record["lr"] for record in records] == [[0.05 * 0.5 ** (samples // 60)] for samples in before]


def test_the_scale_of_losses_grows_with_updates_and_not_with_arrivals(tmp_path):
    training = {"max_steps": 6, "batch_size": 8, "precision": "float16", "validate_every": 0}
    for arrivals in (1, 3):
        server = {"consistency": "async", "arrivals": arrivals}
        run = train(tmp_path / str(arrivals), "rpc", 1, training=training, server=server)
        assert run.load("run")["skipping"]["updates"] == 6


def test_a_version_of_several_arrivals_has_the_module_buffers_of_the_last(tmp_path):
    run = train(tmp_path, "rpc", 1, **rounds(server={"consistency": "async", "arrivals": 2}))
    assert run.summary["steps"] == 6
    assert run.load("model")["bn.num_batches_tracked"].item() == 6 * 2 * 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("compression", ["none", "int8"])
def test_what_compression_loses_of_a_parameter_that_is_not_always_used_comes_later(tmp_path, compression):
    """Its sum over all steps is applied but for the residual."""
    config = {
        "task": f"{TASKS}:EveryOther",
        "training": {"max_steps": 20, "batch_size": 1, "validate_every": 0},
        "server": {"transport": "rpc", "compression": compression},
    }
    run = train(tmp_path, "rpc", 1, **config)
    residuals = run.load("trainer-0").get("residuals", {})
    for name, weight in run.load("model").items():
        received = -weight + residuals.get(name, 0)
        assert torch.allclose(received, torch.arange(1.0, 5.0) * (20 if name == "always" else 10) * 0.3, atol=1e-3), (
            name
        )


def test_arrivals_are_those_of_plain_numpy(tmp_path):
    """One trainer, whose rounds begin from the newest version: an update is the mean of two of them."""
    outer = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}
    run = train(
        tmp_path,
        "rpc",
        1,
        task=f"{TASKS}:Rows",
        training={"max_steps": 4, "batch_size": 1, "local_steps": 3, "outer": outer},
        checkpoint={"every": 1, "keep": 9, "background": False},
        server={"consistency": "async", "arrivals": 2},
    )
    plain, expected = Numpy("nesterov", 0.7, 0.9), []
    for _ in range(4):
        plain.update((plain.local(0, 3) + plain.local(0, 3)) / 2)
        expected.append(plain.theta)
    assert np.abs(weights_of(run) - np.array(expected)).max() <= 1e-12
    assert run.summary["samples"] == 4 * 2 * 3

"""``profile``: each rank writes a trace of the same steps, with spans of what it does in a step."""

import json

import pytest
from launching import differing_tensors, resume, train

pytestmark = pytest.mark.processes

COMPUTE = {"data", "forward", "backward"}
TRAINER = COMPUTE | {"pull", "push", "wait"}
SERVER = {"pull", "push", "wait", "apply"}
OPTIONS = {"start_step": 4, "steps": 3}


def events_of(run, rank):
    """The spans of a rank's trace, as Perfetto and TensorBoard's plugin read them: by name, in the order of time."""
    trace = json.loads((run.run_dir / "profile" / f"rank-{rank}.pt.trace.json").read_text())
    found = {}
    for event in sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda event: event["ts"]):
        assert event["dur"] >= 0
        if event["cat"] in ("user_annotation", "cpu_op"):
            found.setdefault(event["name"], []).append(event)
    return found


def assert_spans(run, rank, names):
    events = events_of(run, rank)
    assert names <= set(events), (rank, names - set(events))
    assert any(name.startswith("aten::") for name in events)
    return events


@pytest.mark.sampled(3)
@pytest.mark.parametrize("servers", [2, 1])
@pytest.mark.parametrize("transport", ["shared_memory", "rpc", "tcp"])
def test_servers_and_trainers_have_the_spans_of_a_step(tmp_path, transport, servers):
    config = {"server": {"transport": transport}, "cluster": {"num_servers": servers}}
    plain = train(tmp_path / "plain", "rpc", 2, **config)
    run = train(tmp_path / "traced", "rpc", 2, **config, profile=OPTIONS)
    assert not (plain.run_dir / "profile").exists()
    assert differing_tensors(plain.load("model"), run.load("model")) == []
    assert sorted(file.name for file in (run.run_dir / "profile").iterdir()) == [
        f"rank-{rank}.pt.trace.json" for rank in range(servers + 2)
    ]
    for rank in range(servers):
        # Of a server that is not the first, trainers read and write the memory that it shares with that.
        shares = rank and transport == "shared_memory"
        events = assert_spans(run, rank, {"wait", "apply"} if shares else SERVER)
        assert len(events["apply"]) >= OPTIONS["steps"]
    for rank in range(servers, servers + 2):
        events = assert_spans(run, rank, TRAINER)
        assert len(events["forward"]) == len(events["pull"]) == OPTIONS["steps"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mode", "trainers", "config", "names"),
    [
        ("ddp", 2, {}, {"push", "wait", "apply"}),
        ("ddp", 2, {"ddp": {"shared_memory": "off"}}, {"gloo:all_reduce", "wait", "apply"}),
        ("local", 1, {}, {"apply"}),
    ],
)
def test_modes_without_servers_have_those_that_correspond(tmp_path, mode, trainers, config, names):
    run = train(tmp_path, mode, trainers, **config, profile=OPTIONS)
    for rank in range(trainers):
        events = assert_spans(run, rank, COMPUTE | names)
        assert len(events["forward"]) == len(events["apply"]) == OPTIONS["steps"]


def test_free_running_trainers_and_rounds_are_traced_too(tmp_path):
    run = train(
        tmp_path,
        "rpc",
        2,
        training={"max_steps": 12, "batch_size": 8, "validate_every": 0, "local_steps": 2},
        server={"consistency": "async"},
        profile={"start_step": 2, "steps": 8},
    )
    assert_spans(run, 0, SERVER)
    # A trainer may make no update in these steps, as the other one makes all.
    files = (run.run_dir / "profile" / f"rank-{rank}.pt.trace.json" for rank in (1, 2))
    traced = [events_of(run, rank) for rank, file in enumerate(files, start=1) if file.exists()]
    assert traced
    assert all(set(events) >= TRAINER | {"apply"} for events in traced)


def test_a_run_that_ends_in_the_traced_steps_writes_what_it_has(tmp_path):
    run = train(tmp_path, "rpc", 1, profile={"start_step": 10, "steps": 100})
    assert len(assert_spans(run, 1, TRAINER)["forward"]) == 2
    assert_spans(run, 0, SERVER)


def test_steps_that_a_resumed_run_does_not_take_have_no_trace(tmp_path):
    run = train(tmp_path, "local", 1)
    again = resume(run, "--set", "training.max_steps=20", "--set", "profile={start_step: 4, steps: 8}")
    assert again.code == 0, again.output
    assert not (run.run_dir / "profile").exists()
    again = resume(run, "--set", "training.max_steps=30", "--set", "profile={start_step: 22, steps: 2}")
    assert again.code == 0, again.output
    assert len(assert_spans(run, 0, COMPUTE | {"apply"})["forward"]) == 2


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path):
    run = train(tmp_path, "local", 1)
    (run.run_dir / "profile").write_text("in the way")
    again = resume(run, "--set", "training.max_steps=20", "--set", "profile={start_step: 13, steps: 2}")
    assert again.code == 0, again.output
    assert "was not written" in again.output + run.log(0)

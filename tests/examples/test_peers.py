"""examples/peers: every program computes the same losses, step by step; what the comparison makes of their steps."""

import math
import os
import sys
from itertools import islice
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATH = list(sys.path)
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "peers")]

import compare as peers  # noqa: E402
import work  # noqa: E402

sys.path[:] = PATH
MODEL, TRAINERS, STEPS = "small", 2, 5
# Lightning and Ray take part where they are installed.
HERE = [name for name in peers.CASES if name not in peers.missing_packages(list(peers.CASES))]


# The same training.


@pytest.fixture(scope="module")
def losses():
    """Of each trainer, step by step, as one process alone computes them."""
    task = work.make_task(MODEL)
    model = work.make_network(task)
    optimizer = task.build_optimizer(model)
    found = [[] for _ in range(TRAINERS)]
    loaders = [islice(work.make_batches(task, i, TRAINERS, STEPS), STEPS) for i in range(TRAINERS)]
    for step, batches in enumerate(zip(*loaders, strict=True)):
        optimizer.zero_grad()
        for own, batch in zip(found, batches, strict=True):
            loss = task.training_step(model, batch, step)
            (loss / TRAINERS).backward()
            own.append(loss.item())
        optimizer.step()
    return found


@pytest.mark.processes
@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", HERE)
def test_every_program_computes_the_same_losses(case, losses):
    trainers = peers.run(case, MODEL, TRAINERS, STEPS)
    for rows, expected in zip(trainers, losses, strict=True):
        assert [samples for _, samples, _ in rows] == [work.BATCH_SIZE] * STEPS
        assert [loss for _, _, loss in rows] == pytest.approx(expected, rel=1e-6)
        moments = [moment for moment, _, _ in rows]
        assert moments == sorted(moments)


def test_losses_differ_for_another_update(losses):
    """What the test above holds programs to depends on updates, and not on the batches alone."""
    task = work.make_task(MODEL)
    model = work.make_network(task)
    batches = list(zip(work.make_batches(task, 0, TRAINERS, STEPS), range(STEPS), strict=False))
    untrained = [task.training_step(model, batch, step).item() for batch, step in batches]
    assert untrained[0] == pytest.approx(losses[0][0], rel=1e-6)
    assert untrained[-1] != pytest.approx(losses[0][-1], rel=1e-5)


def test_a_program_that_fails_is_reported_in_its_own_words(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "commands_of", lambda *_: [["-c", "raise ValueError('no such thing')"]])
    with pytest.raises(peers.PeerError, match="ValueError: no such thing"):
        peers.run("loop", MODEL, TRAINERS, STEPS)


def test_each_rank_is_started_once_unless_the_program_starts_them(tmp_path):
    ranks = peers.commands_of("loop", MODEL, 3, STEPS, tmp_path)
    assert [words[words.index("--rank") + 1] for words in ranks] == ["0", "1", "2"]
    assert len({words[words.index("--port") + 1] for words in ranks}) == 1
    (words,) = peers.commands_of("rpc", MODEL, 3, STEPS, tmp_path)
    assert words[:3] == [str(ROOT / "examples" / "peers" / "ours.py"), "--mode", "rpc"]
    assert peers.environment()["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    assert peers.environment()["OMP_NUM_THREADS"] == "1"


# The figures.


def rows_of(moments, samples=32):
    return [(moment, samples, 1.0) for moment in moments]


def test_a_speed_is_what_lies_between_the_first_warm_step_and_the_last():
    # 3 steps of 0.5 s after a first one that does not count; the last step's end is not known
    one = rows_of([0.0, 10.0, 10.5, 11.0, 11.5])
    assert peers.speed([one], warm=1) == pytest.approx(64)
    assert peers.speed([one, rows_of([0.0, 1.0, 2.0])], warm=1) == pytest.approx(64 + 32)
    short = [(0.0, 32, 1.0), (1.0, 4, 1.0), (2.0, 32, 1.0)]
    assert peers.speed([short], warm=0) == pytest.approx(18)


def test_ratios_are_of_the_same_repeat():
    loads = [0.5, 2.0, 1.0]
    speeds = {
        name: {i: s * load for i, load in enumerate(loads)}
        for name, s in (("rpc", 200.0), ("ddp", 100.0), ("ray", 50.0))
    }
    lines = peers.table(speeds).splitlines()
    assert lines[0].split() == ["samples/s", "rpc,", "times", "this", "ddp,", "times", "this"]
    assert lines[1].rstrip().endswith("0.500 (0.500 to 0.500)")
    assert lines[3].split(maxsplit=1)[0] == "ray"
    assert "4 (4.00 to 4.00)" in lines[3]
    assert " 2 (2.00 to 2.00)" in lines[3]


def test_what_failed_has_no_speed_and_is_named_once_a_repeat():
    def measure(case):
        if case == "ray":
            raise peers.PeerError("a line\nthe last line")
        return 100.0

    failures = []
    speeds = peers.measure_all(["rpc", "ray"], 2, measure, failures, "mlp")
    assert speeds == {"rpc": {0: 100.0, 1: 100.0}, "ray": {0: None, 1: None}}
    assert sorted(failures) == [f"mlp, ray, repeat {i} failed: the last line" for i in (1, 2)]
    assert peers.table(speeds).splitlines()[2].split() == ["ray", "-", "-"]


def test_programs_take_turns(capsys):
    measured = []
    peers.measure_all(["rpc", "loop"], 2, lambda case: measured.append(case) or 1.0, [], "mlp")
    assert measured == ["rpc", "loop", "loop", "rpc"]
    assert capsys.readouterr().err.count("1 samples/s") == 4


def test_what_is_not_installed_is_left_out_in_one_sentence():
    assert peers.missing_packages(["rpc", "loop", "ray", "lightning"], lambda package: package == "ray") == [
        "lightning"
    ]
    sentence = peers.missing_sentence(["lightning", "ray"])
    assert sentence.startswith("Left out, because they are not installed: lightning and ray (")
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "10", "--warm", "9"], "--steps at least"),
        (["--repeats", "0"], "at least 1"),
        (["--official", "nowhere"], r"must hold distributed/rpc"),
        (["--models", "resnet"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_refused(monkeypatch, capsys, flags, message):
    monkeypatch.setattr(sys, "argv", ["compare.py", *flags])
    with pytest.raises(SystemExit) as ended:
        peers.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_data_lasts_for_all_steps():
    for name in ("digits", MODEL):
        task = work.make_task(name)
        assert len(work.make_batches(task, 0, 2, 100)) >= 100
        assert math.prod(next(iter(work.make_batches(task, 1, 2, 3)))[0].shape[1:]) in (64, 784)

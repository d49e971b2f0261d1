"""``logging.sinks``: the table of curves, sinks of the user, and the recipes of docs/sinks.md in offline mode."""

import csv
import json
import os
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import environment, main_in_process, resume_in_process, run_in_process, train, write_config

from paramserver.metrics import scalars

GUIDE = Path(__file__).parents[2] / "docs" / "sinks.md"
CONFIG = {
    "training": {"max_steps": 10, "batch_size": 8, "validate_every": 5},
    "checkpoint": {"every": 5, "background": False},
}
OWN = """
import json
from pathlib import Path
from paramserver.metrics import Sink

class Copies(Sink):
    def write(self, record):
        if record["kind"] == "start":
            self.file = (Path(record["run_dir"]) / "copy.jsonl").open("a")
        self.file.write(json.dumps(dict(record), default=str) + "\\n")

    def close(self):
        self.file.write("closed\\n")
        self.file.close()

class Fails(Copies):
    def write(self, record):
        if record["kind"] == "train":
            raise OSError("no connection")

    def close(self):
        pass

class FailsAtClose(Copies):
    def write(self, record):
        pass

    def close(self):
        raise OSError("no connection")

class MustNotFail(Fails):
    required = True

class HasArguments(Copies):
    def __init__(self, project):
        pass

class Incomplete(Sink):
    def write(self, record):
        pass

class Other:
    pass
"""


def table(run):
    with (run.run_dir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def curves(run):
    """What the table must hold, from metrics.jsonl."""
    points = [(record["step"], record["time"], *point) for record in run.records for point in scalars(record)]
    return [(str(step), str(time), name, str(float(value))) for step, time, name, value in points]


def own_sinks(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own.py").write_text(OWN)
    return {"sinks": [f"{folder}/own.py:{name}" for name in names]}


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_the_table_has_every_curve_and_a_resume_continues_it(tmp_path, mode):
    config = {**CONFIG, "logging": {"sinks": ["csv"]}}
    run = train(tmp_path, mode, 1 if mode == "local" else 2, **config)
    assert [tuple(row.values()) for row in table(run)] == curves(run)
    assert {row["name"] for row in table(run)} >= {"train/loss", "valid/loss", "valid/accuracy", "lr"}
    # Rows of steps that are made again are gone, and a damaged table is made anew.
    (run.run_dir / "metrics.csv").write_text("torn")
    checkpoint = run.run_dir / "checkpoints" / "step-00000005"
    code, output = main_in_process("--resume", checkpoint, "--set", "training.max_steps=12")
    assert code == 0, output
    assert [tuple(row.values()) for row in table(run)] == curves(run)
    steps = [row["step"] for row in table(run) if row["name"] == "train/loss"]
    assert steps == [str(step) for step in range(1, 13)]


@pytest.mark.parametrize("log_every", [5, 10])
def test_tensorboard_shows_the_curves_of_a_run_that_was_not_stopped(tmp_path, log_every):
    """Without those of the last step of a start, or with them where they were due then: each point once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    training = {"max_steps": 15, "batch_size": 8, "validate_every": 2 * log_every}
    logging = {"sinks": ["csv"], "tensorboard": True, "log_every": log_every}
    run = run_in_process(tmp_path, training=training, logging=logging, checkpoint={"background": False})
    resumed = resume_in_process(run, "--set", "training.max_steps=30")
    assert resumed.code == 0, resumed.output
    events = EventAccumulator(str(run.run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    shown = [(name, event.step) for name in events.Tags()["scalars"] for event in events.Scalars(name)]
    assert sorted(shown) == sorted((row["name"], int(row["step"])) for row in table(run))
    assert [step for name, step in shown if name == "train/loss"] == list(range(log_every, 31, log_every))


def test_a_resume_that_is_refused_leaves_the_table_as_it_was(tmp_path):
    run = run_in_process(tmp_path, **CONFIG, logging={"sinks": ["csv"]})
    before = (run.run_dir / "metrics.csv").read_bytes()
    assert resume_in_process(run, "--set", "task_args.optimizer=none", "--set", "training.max_steps=12").code != 0
    assert (run.run_dir / "metrics.csv").read_bytes() == before


def test_values_that_are_not_finite_survive_in_the_table(tmp_path):
    from paramserver.metrics import Csv, JsonLines

    record = {"time": 1.0, "kind": "validation", "step": 3, "values": {"loss": float("nan"), "gap": float("inf")}}
    with JsonLines(tmp_path / "metrics.jsonl") as lines:
        lines.write(record)
    with Csv(tmp_path / "metrics.csv", tmp_path / "metrics.jsonl") as sink:
        sink.write(record)
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert rows[1:3] == rows[3:] == ["3,1.0,valid/loss,nan", "3,1.0,valid/gap,inf"]


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_a_sink_of_ones_own_gets_every_record(tmp_path, mode):
    logging = own_sinks(tmp_path, "Copies", "Fails")
    run = train(tmp_path, mode, 1 if mode == "local" else 2, **CONFIG, logging=logging)
    *copied, last = (run.run_dir / "copy.jsonl").read_text().splitlines()
    assert last == "closed"
    assert [json.loads(line)["kind"] for line in copied] == [record["kind"] for record in run.records]


def test_a_sink_that_fails_is_dropped_unless_it_is_required(tmp_path):
    run = run_in_process(tmp_path / "dropped", **CONFIG, logging=own_sinks(tmp_path, "Fails"))
    assert (run.code, run.summary["steps"]) == (0, 10)
    assert "Fails failed (OSError: no connection) and gets no more records" in run.output
    run = run_in_process(tmp_path / "required", **CONFIG, logging=own_sinks(tmp_path, "MustNotFail"))
    assert run.code == 1
    assert "MustNotFail failed, which is required (OSError: no connection" in run.output
    assert run.summary["status"] == "failed"


@pytest.mark.parametrize(
    ("sinks", "expected"),
    [
        (["own.py:Other"], "it must be derived from paramserver.metrics.Sink"),
        (["own.py:HasArguments"], "it must take no arguments"),
        (["own.py:Incomplete"], "close"),
        (["own.py:Missing"], "own.py has no Missing; it has "),
        (["csv", "csv"], "must name each once"),
        ("csv", "write it like [csv, sinks.py:Wandb]"),
        ([1], "must be a list of csv"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry_run"]], ids=["run", "dry"])
def test_what_is_no_sink_is_refused_before_anything_begins(tmp_path, sinks, expected, dry):
    own_sinks(tmp_path)
    config = write_config(tmp_path, logging={"sinks": sinks})
    code, output = main_in_process("--config", config, *dry)
    assert (code, "error: " in output, "logging.sinks" in output) == (2, True, True), output
    assert expected in output
    assert not list((tmp_path / "runs").glob("*"))


FAILURES = {
    "Fails": "Fails failed (OSError: no connection) and gets no more records",
    "FailsAtClose": "FailsAtClose failed (OSError: no connection) when it was closed; its last records may be lost",
}


@pytest.mark.processes
@pytest.mark.claim("failing-sink")
@pytest.mark.parametrize("mode", ["local", "rpc", "ddp"])
def test_a_sink_that_fails_is_named_on_the_console_and_in_the_summary(tmp_path, mode):
    run = train(tmp_path, mode, 1, **CONFIG, logging=own_sinks(tmp_path, *FAILURES))
    assert run.summary["status"] == "completed"
    assert run.summary["sink_failures"] == list(FAILURES.values())
    lines = run.output.splitlines()
    for text in FAILURES.values():
        assert lines.count(text) == 1, run.output
        assert text in run.output.partition("sinks        ")[2]
    assert FAILURES["Fails"] in [record["text"] for record in run.of_kind("note")]


# The recipes.


def block(marker):
    found = re.search(rf"^<!-- {marker} -->\n```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert found, marker
    return found[1]


def train_with(folder, recipe, **environ):
    """Train with a recipe of the guide, in a process of its own; return its folder."""
    if find_spec(recipe) is None:
        pytest.skip(f"{recipe} is not installed")
    (folder / "own_sinks.py").write_text(block(f"file: {recipe}"))
    config = write_config(folder, **CONFIG, logging={"sinks": [f"own_sinks.py:{recipe.capitalize()}"]})
    done = subprocess.run(
        [sys.executable, "-m", "paramserver.launch", "--config", str(config), "--set", "logging.name=digits"],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gets no more records" not in done.stdout + done.stderr
    assert "failed when closed" not in done.stdout + done.stderr
    return folder / "runs" / "digits"


@pytest.mark.processes
def test_the_recipe_for_wandb(tmp_path):
    run_dir = train_with(tmp_path, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    (file,) = run_dir.glob("wandb/offline-run-*-digits/run-digits.wandb")
    content = file.read_bytes()
    assert all(name in content for name in (b"train/loss", b"valid/accuracy", b"ReferenceTask"))


@pytest.mark.processes
def test_the_recipe_for_mlflow(tmp_path):
    store = f"file:{tmp_path}/mlruns"
    train_with(tmp_path, "mlflow", MLFLOW_TRACKING_URI=store, MLFLOW_ALLOW_FILE_STORE="true")
    (curve,) = tmp_path.glob("mlruns/0/*/metrics/train/loss")
    assert [line.split()[2] for line in curve.read_text().splitlines()] == [str(step) for step in range(1, 11)]
    (accuracy,) = tmp_path.glob("mlruns/0/*/metrics/valid/accuracy")
    assert [line.split()[2] for line in accuracy.read_text().splitlines()] == ["5", "10"]


def test_the_recipe_for_pandas(tmp_path, monkeypatch, capsys):
    if find_spec("pandas") is None:
        pytest.skip("pandas is not installed")
    run = run_in_process(tmp_path, **CONFIG, name="digits", logging={"sinks": ["csv"]})
    monkeypatch.chdir(tmp_path)
    exec(block("run: pandas"), {})
    smallest = min(record["loss"] for record in run.of_kind("train"))
    assert float(capsys.readouterr().out.split()[0]) == pytest.approx(smallest)


def test_a_recipe_has_ten_lines_or_a_few_more():
    for recipe in ("wandb", "mlflow"):
        assert len([line for line in block(f"file: {recipe}").splitlines() if line]) <= 13


SCRAPING = """
import re
import urllib.request
from pathlib import Path
from tasks import ReferenceTask

class Scrapes(ReferenceTask):
    def on_batch_start(self, batch_idx):
        if batch_idx == 6 and self.trainer.trainer_index == 0:
            (records,) = Path("runs").glob("*/metrics.jsonl")
            address = re.search(r"http://[0-9.:]+/metrics", records.read_text())[0]
            with urllib.request.urlopen(address, timeout=10) as reply:
                assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                Path("scraped.txt").write_text(f"{address}\\n{reply.read().decode()}")
"""


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_prometheus_scrapes_a_run_and_its_port_is_closed_at_the_end(tmp_path, fork_server, mode):
    (tmp_path / "scraping.py").write_text(SCRAPING)
    config = {**CONFIG, "task": "scraping.py:Scrapes", "logging": {"prometheus_port": 0}}
    config["training"] = {**CONFIG["training"], "validate_every": 2}
    trainers = 1 if mode == "local" else 2
    file = write_config(tmp_path, mode=mode, cluster={"num_trainers": trainers}, **config)
    words = ["--config", file, "--set", "logging.name=run"]
    code, output = fork_server.run(words, tmp_path, 120, environment())
    assert code == 0, output
    address, *lines = (tmp_path / "scraped.txt").read_text().splitlines()
    found = dict(re.fullmatch(r"(\w+\{.*\}) (\S+)", line).groups() for line in lines if line[0] != "#")
    types = [line.split()[2] for line in lines if line[0] == "#"]
    assert types == list(dict.fromkeys(name.partition("{")[0] for name in found))
    records = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    step = float(found['paramserver_step{run="run"}'])
    # In ddp a step is recorded with the next agreement.
    assert step in (5, 6)
    (train,) = [record for record in records if record["kind"] == "train" and record["step"] == step]
    assert float(found['paramserver_train_loss{run="run"}']) == train["loss"]
    assert float(found['paramserver_samples{run="run"}']) == train["samples"]
    assert 0 <= float(found['paramserver_valid_accuracy{run="run"}']) <= 1
    assert 'paramserver_buffer_population{run="run",trainer="0"}' in found
    port = int(address.split(":")[2].split("/")[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.processes
def test_a_port_for_prometheus_that_is_in_use_is_named_in_one_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = run_in_process(tmp_path, **CONFIG, logging={"prometheus_port": port})
    assert (run.code, len(run.output.splitlines())) == (2, 1), run.output
    assert f"logging.prometheus_port ({port}) on cluster.master_addr (127.0.0.1) cannot be opened: " in run.output
    assert "choose a free port" in run.output
    assert not run.run_dir.exists()

"""Sinks: the output of each is read back by its consumer."""

import errno
import fcntl
import io
import json
import logging
import os
import pty
import select
import socket
import struct
import termios
import threading
import urllib.error
import urllib.request
from contextlib import nullcontext, redirect_stderr
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paramserver.cluster import bind_listener
from paramserver.config import Config, LoggingConfig, TrainingConfig
from paramserver.errors import StorageError, TrainingError
from paramserver.metrics import FanOut, JsonLines, Prometheus, Sink, TensorBoard, console, scalars, sinks
from paramserver.metrics.console import Progress
from paramserver.metrics.records import make_record
from paramserver.runs.monitor import RunMonitor


def record(kind, step=1, **fields):
    return {"time": 1000.0 + (step or 0), "kind": kind, "step": step, "rank": 0, **fields}


def train(step, loss=0.5, **fields):
    values = {"samples": step * 8, "lr": [0.1], "samples_per_second": 64.0, "step_ms": 2.0, **fields}
    return record("train", step, loss=loss, **values)


def validation(step, **values):
    return record("validation", step, values=values, best=False)


class Collecting(Sink):
    def __init__(self, failing_at=None, required=False):
        self.records, self.closed, self.failing_at, self.required = [], 0, failing_at, required

    def write(self, record):
        if len(self.records) == self.failing_at:
            raise OSError("no space left")
        self.records.append(record)

    def close(self):
        self.closed += 1
        if self.failing_at is not None:
            raise OSError("nor for the rest")


def lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def logged(name, value=7.0, **fields):
    return record("log", name=name, value=value, trainer=0, **fields)


def test_a_logged_number_has_no_tag_of_another_curve():
    """As ``train/loss``, which is the mean since the last record, and which modules log of each batch."""
    staleness = {"mean": 1.0, "histogram": {}, "trainers": [{"trainer": 1, "mean": 2.0, "histogram": {}}]}
    buffers = {"trainer": 0, "unseen": 1, "stream": {"stale": 1, "fields": {"u": {"mean": 1.0}}}}
    records = [
        train(1, lr=[0.1, 0.2], losses={"critic": 1.0}, gradient_norm=1.0),
        train(2),
        validation(1, loss=1.0),
        record("buffer", **buffers),
        record("staleness", **staleness),
        record("inner", trainer=0, lr=[0.1]),
        record("checkpoint", seconds=1.0, pause_ms=1.0),
    ]
    tags = {tag for one in records for tag, _ in scalars(one)}
    assert len(tags) > 15
    for tag in (*tags, "kind", "samples", "step", "time"):
        assert scalars(logged(tag)) == [(f"log/{tag}", 7.0)]
        assert scalars(record("reduced", name=tag, value=7.0, reduce="sum")) == [(f"log/{tag}", 7.0)]
        assert scalars(logged(tag, reduce="none")) == [(f"log/{tag}/trainer-0", 7.0)]
    for name in ("train_loss", "train/accuracy", "val/loss", "lr/scale", "lrs"):
        assert scalars(logged(name)) == [(name, 7.0)]
    with Prometheus(bind_listener("127.0.0.1", 0), "run") as sink:
        for one in (*records, *map(logged, (*tags, "train_loss", "valid_loss", "samples", "val_loss"))):
            sink.write(one)
        sevens = [line for line in sink.text().splitlines() if line.endswith(" 7.0")]
    assert [line for line in sevens if "paramserver_log_" not in line] == ['paramserver_val_loss{run="run"} 7.0']
    assert 'paramserver_log_train_loss{run="run"} 7.0' in sevens


def test_fan_out_drops_a_failing_sink_once_and_continues(caplog):
    failing, good = Collecting(failing_at=1), Collecting()
    fan = FanOut([failing, good])
    for step in range(4):
        fan.write(train(step))
    fan.close()
    fan.close()
    assert len(good.records) == 4
    assert (failing.closed, good.closed) == (1, 1)
    assert caplog.text.count("Collecting failed (OSError: no space left) and gets no more records") == 1
    assert len([entry for entry in caplog.records if entry.levelno >= logging.WARNING]) == 1


def test_fan_out_raises_the_failure_of_a_required_sink_after_the_others_received_the_record():
    required, good = Collecting(failing_at=0, required=True), Collecting()
    fan = FanOut([required, good])
    with pytest.raises(StorageError, match=r"Collecting failed, which is required \(OSError: no space left"):
        fan.write(train(1))
    assert len(good.records) == 1
    with pytest.raises(StorageError, match="nor for the rest"):
        fan.close()
    assert good.closed == 1


def test_fan_out_leaves_the_sinks_of_others_open_and_tells_them_what_failed_at_the_end():
    own, failing, kept = Collecting(failing_at=0), Collecting(failing_at=0), Collecting()
    fan = FanOut([own], kept=[failing, kept])
    fan.on_failure = lambda text: fan.write({"kind": "note", "text": text})
    fan.write(train(1))
    assert [record["kind"] for record in kept.records] == ["train", "note", "note"]
    fan.close()
    fan.write(train(2))
    assert len(kept.records) == 3
    assert (own.closed, failing.closed, kept.closed) == (1, 0, 0)


class FailsAt(Collecting):
    """Fails with the record ``end``, or when it is closed."""

    def __init__(self, failing_at, required):
        super().__init__(required=required)
        self.failing_at_end = failing_at

    def write(self, record):
        super().write(record)
        if record["kind"] == self.failing_at_end:
            raise OSError("no space left")

    def close(self):
        if self.failing_at_end == "close":
            raise OSError("no space left")


@pytest.mark.parametrize("failing_at", ["end", "close"])
@pytest.mark.parametrize("required", [True, False])
def test_a_sink_that_fails_at_the_end_of_a_run_is_in_its_only_outcome(tmp_path, failing_at, required):
    sink, kept, stored_lines = FailsAt(failing_at, required), Collecting(), JsonLines(tmp_path / "metrics.jsonl")
    monitor = RunMonitor(Config(), fan := FanOut([stored_lines, sink], kept=[kept]), tmp_path / "summary.json")
    fan.on_failure = monitor.sink_failed
    with pytest.raises(StorageError, match="no space left") if required else nullcontext():
        monitor.close("completed", [])
    [end] = [record for record in kept.records if record["kind"] == "end"]
    assert end["status"] == end["summary"]["status"] == ("failed" if required else "completed")
    assert len(end["summary"]["sink_failures"]) == (not required)
    stored = json.loads((tmp_path / "summary.json").read_text())
    assert [stored[name] for name in ("status", "error")] == [end["summary"][name] for name in ("status", "error")]
    assert [record["kind"] for record in sink.records] == ["end"]
    last = lines(tmp_path / "metrics.jsonl")[-1]
    for name in ("status", "error", "sink_failures"):
        assert last["summary"][name] == end["summary"][name]
    assert (last["kind"], last["status"]) == ("end", end["status"])


def test_a_run_without_sinks_of_its_own_has_one_outcome(tmp_path):
    kept = Collecting()
    RunMonitor(Config(), FanOut([], kept=[kept]), tmp_path / "summary.json").close("completed", [])
    assert [record["kind"] for record in kept.records] == ["end"]


def test_json_lines_are_flushed_one_by_one_and_appended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as sink:
        sink.write(train(1))
        assert lines(path) == [train(1)]
    with JsonLines(path) as sink:
        sink.write(train(2))
    assert [line["step"] for line in lines(path)] == [1, 2]


def test_json_lines_are_valid_json_whatever_a_value_is(tmp_path):
    path = tmp_path / "metrics.jsonl"
    values = {"tensor": torch.tensor(0.5, requires_grad=True), "numpy": np.float32("inf"), "count": np.int64(3)}
    with JsonLines(path) as sink:
        sink.write(train(torch.tensor(4), loss=float("nan"), lr=np.array([0.25, 0.5])))
        sink.write(validation(1, **values, minus=torch.tensor(float("-inf"))))
    first, second = lines(path)
    assert (first["step"], first["loss"], first["loss_text"], first["lr"]) == (4, None, "nan", [0.25, 0.5])
    expected = {"tensor": 0.5, "numpy": None, "numpy_text": "inf", "count": 3, "minus": None, "minus_text": "-inf"}
    assert second["values"] == expected


def test_a_full_disk_for_metrics_is_the_runs_failure():
    fan = FanOut([JsonLines(Path("/dev/full"))])
    with pytest.raises(TrainingError, match=r"metrics file /dev/full must be writable .*No space left"):
        fan.write(train(1))
    with pytest.raises(TrainingError):
        fan.close()


def test_a_metrics_file_that_cannot_be_opened_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="must be writable"):
        JsonLines(tmp_path / "missing" / "metrics.jsonl")


@pytest.mark.parametrize("what", ["remove", "replace", "move", "remove folder"])
@pytest.mark.parametrize("noticed_by", ["check", "write", "fan-out"])
def test_a_metrics_file_that_no_longer_has_its_name_is_an_error(tmp_path, monkeypatch, what, noticed_by):
    """A write alone succeeds: the open file is still there, without a name."""
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    sink = JsonLines(path)
    sink.write(train(1))
    sink.check()
    if what == "move":
        path.parent.rename(tmp_path / "elsewhere")
    else:
        path.unlink()
    if what == "replace":
        path.write_text("")
    if what == "remove folder":
        path.parent.rmdir()
    sink.write(train(2))  # the path is looked at once a second
    monkeypatch.setattr(sinks, "_CHECK_EVERY_S", -1.0)
    fan = FanOut([sink])
    actions = {"check": sink.check, "write": lambda: sink.write(train(3)), "fan-out": fan.check}
    with pytest.raises(StorageError, match=rf"^metrics file {path} must stay in place .* was removed, moved or repl"):
        actions[noticed_by]()
    fan.close()


def test_a_metrics_file_is_looked_at_once_a_second(tmp_path, monkeypatch):
    times = iter([0.0, 0.5, 0.9, 1.1, 1.1])
    monkeypatch.setattr(sinks.time, "monotonic", lambda: next(times))
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.path.unlink()
    sink.write(train(1))
    sink.write(train(2))
    with pytest.raises(StorageError, match="records are lost"):
        sink.write(train(3))
    sink.close()


def curves(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, round(event.value, 6)) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_shows_every_kind_under_its_name(tmp_path):
    with TensorBoard(tmp_path) as sink:
        sink.write(record("start", None, name="x"))
        sink.write(train(1))
        figures = {"mean": 0.75, "p95": 2, "max": 2, "histogram": {"0": 2, "1": 1, "2": 1}}
        sink.write(record("staleness", 1, **figures, dropped=0, trainers=[{"trainer": 0, **figures}]))
        sink.write(train(2, loss=None, samples_per_second=None, lr=[0.1, 0.2]))
        sink.write(validation(2, loss=0.25, accuracy=0.75))
        sink.write(record("buffer", 2, trainer=1, population=5, unseen=2, put_wait_s=0.5, get_wait_s=1.5, capacity=9))
        sink.write(record("log", 2, trainer=0, name="mine", value=torch.tensor(7.0)))
        sink.write(record("checkpoint", 2, path="p", seconds=0.5, bytes=10, pause_ms=4.0))
    assert curves(tmp_path) == {
        "train/loss": [(1, 0.5)],
        "samples_per_second": [(1, 64.0)],
        "step_ms": [(1, 2.0), (2, 2.0)],
        "server/staleness": [(1, 0.75)],
        "server/staleness_p95": [(1, 2.0)],
        "server/staleness_max": [(1, 2.0)],
        "server/staleness/trainer-0": [(1, 0.75)],
        "lr": [(1, 0.1)],
        "lr/0": [(2, 0.1)],
        "lr/1": [(2, 0.2)],
        "valid/loss": [(2, 0.25)],
        "valid/accuracy": [(2, 0.75)],
        "buffer/trainer-1/population": [(2, 5)],
        "buffer/trainer-1/unseen": [(2, 2)],
        "buffer/trainer-1/put_wait_s": [(2, 0.5)],
        "buffer/trainer-1/get_wait_s": [(2, 1.5)],
        "mine": [(2, 7.0)],
        "checkpoint/seconds": [(2, 0.5)],
        "checkpoint/pause_ms": [(2, 4.0)],
    }


def test_tensorboard_shows_how_old_the_samples_are_that_were_served(tmp_path):
    with TensorBoard(tmp_path) as sink:
        stream = {"received": 9, "stale": 2, "staleness": {"0": 4, "3": 1}}
        sink.write(record("buffer", 2, trainer=1, stream=stream))
    assert curves(tmp_path) == {"stream/trainer-1/received": [(2, 9)], "stream/trainer-1/stale": [(2, 2)]}
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    [event] = accumulator.Histograms("stream/trainer-1/staleness")
    value = event.histogram_value
    assert (event.step, value.min, value.max, value.num, value.sum) == (2, 0, 3, 5, 3)


def test_a_histogram_has_a_bucket_for_each_value_that_occurs_however_large_it_is(tmp_path):
    histogram = {"2": 4, "3": 1, "5": 2, "1000000": 1}
    with TensorBoard(tmp_path) as sink:
        sink.write(record("buffer", 1, trainer=0, population=1, seen_histogram=histogram))
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    [event] = accumulator.Histograms("buffer/trainer-0/seen")
    value = event.histogram_value
    assert list(value.bucket_limit) == [2.5, 3.5, 4.5, 5.5, 999999.5, 1000000.5]
    assert list(value.bucket) == [4, 1, 0, 2, 0, 1]


def test_tensorboard_is_purged_from_the_step_given(tmp_path, monkeypatch):
    from tensorboard.summary.writer import event_file_writer

    # At the end of the names of two files of one second, which TensorBoard reads in alphabetical order: not 9 and 10.
    numbers = iter(["1", "2"])
    monkeypatch.setattr(event_file_writer._global_uid, "get", lambda: next(numbers))
    with TensorBoard(tmp_path) as sink:
        for step in (10, 20, 30):
            sink.write(train(step))
    with TensorBoard(tmp_path, purge_step=21) as sink:
        sink.write(train(25, loss=0.125))
    assert curves(tmp_path)["train/loss"] == [(10, 0.5), (20, 0.5), (25, 0.125)]


def test_tensorboard_without_records_writes_nothing(tmp_path):
    with TensorBoard(tmp_path / "tensorboard") as sink:
        sink.write(record("phase", None, name="import", seconds=1.0))
    assert not (tmp_path / "tensorboard").exists()


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_progress_in_a_pipe_is_a_line_per_interval_and_per_validation():
    stream, clock = io.StringIO(), Clock()
    shown = Progress(stream, "auto", total_steps=100, clock=clock)
    for step in range(1, 41):
        clock.now_s = step * 0.25
        shown.write(train(step))
        if step == 10:
            shown.write(validation(step, accuracy=0.75))
    shown.write(record("end", 40, status="completed", summary={}))
    out = stream.getvalue().splitlines()
    assert [line.split(":")[0] for line in out] == [f"step {step}/100" for step in (1, 9, 10, 17, 25, 33, 40)]
    assert out[0] == "step 1/100: train loss 0.5, 64 samples/s"
    assert out[2] == "step 10/100: train loss 0.5, 64 samples/s, valid accuracy 0.75, 0:00:22 left"
    assert out[5].endswith("valid accuracy 0.75, 0:00:17 left")  # 67 steps of 0.25 s


def test_progress_towards_a_limit_that_no_run_reaches_shows_no_remaining_time():
    stream, clock = io.StringIO(), Clock()
    shown = Progress(stream, "auto", total_steps=2**63 - 1, clock=clock)
    for step in (1, 2):
        clock.now_s = step * 4.0
        shown.write(train(step))
    assert stream.getvalue().splitlines()[1] == f"step 2/{2**63 - 1}: train loss 0.5, 64 samples/s"


def test_progress_counts_samples_where_they_are_the_limit():
    stream = io.StringIO()
    Progress(stream, "auto", total_samples=80).write(train(3, loss=None))
    assert stream.getvalue() == "samples 24/80: train loss -, 64 samples/s\n"


def test_a_validation_before_the_applied_samples_are_known_is_shown_by_its_step():
    """As in a run that is resumed, whose samples before it were made in another time."""
    stream, clock = io.StringIO(), Clock()
    shown = Progress(stream, "auto", total_samples=1600, clock=clock)
    shown.write(validation(98, loss=0.25))
    for step in (100, 120):
        clock.now_s += 8.0
        shown.write(train(step))
    assert stream.getvalue().splitlines() == [
        "step 98: valid loss 0.25",
        "samples 800/1600: train loss 0.5, 64 samples/s, valid loss 0.25",
        "samples 960/1600: train loss 0.5, 64 samples/s, valid loss 0.25, 0:00:32 left",
    ]
    live = io.StringIO()
    shown = Progress(live, "on", total_samples=1600)
    for each in (validation(98, loss=0.25), train(100), train(200)):
        shown.write(each)
    shown.close()
    by_step, _, by_samples = live.getvalue().rstrip().partition("\n")
    assert "98" in by_step
    assert "1600/1600" in by_samples
    assert "\n" not in by_samples


def shown_on_a_terminal(total_steps, records, rows=24, columns=0):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with os.fdopen(slave, "w") as terminal, os.fdopen(master, "rb", buffering=0) as screen, redirect_stderr(terminal):
        sink = Progress(terminal, "auto", total_steps=total_steps)
        for each in records:
            sink.write(each)
        sink.close()
        terminal.flush()
        shown = b""
        while select.select([screen], [], [], 0.5)[0]:  # the kernel delivers the output in pieces
            shown += screen.read(65536)
        return shown.decode()


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (24, 0), (24, 140)])
def test_progress_on_a_terminal_is_one_live_line(rows, columns):
    steps = [train(2), train(6), validation(6, loss=0.25), train(10, loss=0.125)]
    out = shown_on_a_terminal(10, steps, rows, columns)
    assert out.count("\r") >= 3
    assert out.rstrip("\r\n").count("\n") == 0
    assert "10/10" in out
    assert "train loss 0.125, 64 samples/s, valid loss 0.25" in out
    assert "step/s" not in out  # the rate of the record is the only one


def test_a_note_is_printed_on_a_line_of_its_own():
    stream = io.StringIO()
    sink = console.Console(Config(training=TrainingConfig(max_steps=10), logging=LoggingConfig(progress="on")), stream)
    start = {"name": "run", "mode": "rpc", "world_size": 3, "run_dir": "runs/run", "total_samples": None}
    sink.write(record("start", 0, total_steps=10, **start))
    sink.write(train(2))
    sink.write(record("note", 2, text="trainer 1 is lost"))
    sink.write(train(10))
    sink.close()
    before, _, after = stream.getvalue().partition("trainer 1 is lost\n")
    *_, shown, blank, column = before.split("\r")
    assert "2/10" in shown
    assert blank.isspace()
    assert column == ""
    assert "10/10" in after


@pytest.mark.parametrize(
    ("limits", "reason", "raises"),
    [
        ({"max_steps": 10}, "training.max_steps (10) reached", True),
        ({"max_samples": 320}, "training.max_samples (320) reached", True),
        ({"max_seconds": 5}, "training.max_seconds (5) reached", True),
        ({"max_epochs": 2}, "2 epochs done", True),
        ({"max_steps": 20, "max_seconds": 9}, "all data was served", False),
        ({}, "the accuracy is reached", False),
    ],
)
def test_a_resume_without_a_step_names_limits_only_where_one_is_reached(limits, reason, raises):
    stream = io.StringIO()
    sink = console.Console(Config(training=TrainingConfig(**limits), logging=LoggingConfig(progress="off")), stream)
    start = {"name": "run", "mode": "rpc", "world_size": 3, "run_dir": "runs/run", "total_samples": None}
    sink.write(record("start", 10, total_steps=None, **start))
    summary = {"status": "completed", "reason": reason, "samples": 320, "seconds": 5.0}
    sink.write(record("end", 10, status="completed", summary=summary))
    sink.close()
    *_, last = stream.getvalue().splitlines()
    assert last.startswith(f"completed at step 10, no step was made: {reason}")
    assert ("raise the limit" in last) == raises


def test_progress_without_tqdm_is_lines_on_a_terminal_too(monkeypatch):
    monkeypatch.setattr(console, "_tqdm", lambda: None)
    assert shown_on_a_terminal(10, [train(2)]) == "step 2/10: train loss 0.5, 64 samples/s\r\n"


def test_progress_on_is_live_anywhere_and_off_is_nothing():
    on, off = io.StringIO(), io.StringIO()
    for stream, style in ((on, "on"), (off, "off")):
        sink = Progress(stream, style, total_steps=4)
        sink.write(train(4))
        sink.close()
    assert "\r" in on.getvalue()
    assert "4/4" in on.getvalue()
    assert off.getvalue() == ""


@pytest.mark.parametrize("style", ["auto", "on", "off"])
@pytest.mark.parametrize("close_first", [True, False])
def test_progress_never_raises_for_a_closed_stream(style, close_first):
    stream = io.StringIO()
    if close_first:
        stream.close()
    sink = Progress(stream, style, total_steps=4)
    sink.write(train(1))
    stream.close()
    sink.write(train(2))
    sink.write(validation(2, loss=1.0))
    sink.write(record("end", 2))
    sink.close()


def test_progress_survives_a_broken_pipe():
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = os.fdopen(write_end, "w")
    sink = Progress(stream, "auto")
    sink.write(train(1))
    sink.write(train(2))
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_progress_leaves_no_thread():
    before = threading.active_count()
    sink = Progress(io.StringIO(), "on", total_steps=2)
    sink.write(train(1))
    assert threading.active_count() == before
    sink.close()


def scrape(address, path="/metrics"):
    with urllib.request.urlopen(address.removesuffix("/metrics") + path, timeout=10) as reply:
        return reply.read().decode()


def test_prometheus_serves_the_newest_value_of_each_curve():
    with Prometheus(bind_listener("127.0.0.1", 0), 'a "b"') as sink:
        assert scrape(sink.address) == ""
        sink.write(train(3, loss=0.5, samples_per_second=None))
        sink.write(train(4, loss=float("nan"), samples_per_second=None))
        sink.write(validation(4, **{"top-5 accuracy": float("inf")}))
        sink.write(record("buffer", 4, trainer=1, population=7))
        sink.write(record("note", None, text="no curve"))
        lines = scrape(sink.address).splitlines()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            scrape(sink.address, "/other")
    run = r'run="a \"b\""'
    assert lines[0] == "# TYPE paramserver_step gauge"
    assert [line for line in lines if line[0] != "#"] == [
        f"paramserver_step{{{run}}} 4.0",
        f"paramserver_samples{{{run}}} 32.0",
        f"paramserver_train_loss{{{run}}} nan",
        f"paramserver_step_ms{{{run}}} 2.0",
        f"paramserver_lr{{{run}}} 0.1",
        f"paramserver_valid_top_5_accuracy{{{run}}} inf",
        f'paramserver_buffer_population{{{run},trainer="1"}} 7.0',
    ]


def test_a_client_that_sends_no_request_does_not_keep_prometheus_from_closing():
    sink = Prometheus(bind_listener("127.0.0.1", 0), "run")
    port = int(sink.address.split(":")[2].split("/")[0])
    with socket.create_connection(("127.0.0.1", port), timeout=10):
        sink.close()
        sink.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "prometheus"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


class Gone(io.StringIO):
    """A terminal that was closed, or a full disk."""

    def write(self, text):
        raise OSError(errno.EIO, "Input/output error")


class OnlyWrites:
    """What some programs put in the place of a stream."""

    def write(self, text):
        self.text = getattr(self, "text", "") + text

    def flush(self):
        pass


def closed_stream():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [closed_stream, Gone, OnlyWrites, lambda: None])
def test_a_console_that_cannot_be_written_ends_no_run(make):
    stream = make()
    sink = console.Console(Config(logging=LoggingConfig(progress="auto")), stream)
    sink.write(make_record("note", 1, text="noted"))
    sink.write(make_record("end", 1, summary={"status": "completed", "reason": "done"}))
    sink.close()
    assert make is not OnlyWrites or stream.text.startswith("noted\n")

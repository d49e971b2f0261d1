"""The command ``paramserver benchmark``: what it writes, how it ends, and whether other clocks agree with it."""

import contextlib
import io
import json
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import psutil
import pytest
import yaml
from forked_groups import ForkedGroup
from launching import TASKS, environment, write_config

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the scripts that measure are modules of the checkout, which is not always importable

from paramserver.errors import Interrupted, TaskError, TrainingError  # noqa: E402
from paramserver.metrics.records import PHASES  # noqa: E402
from paramserver.tools.bench import command as benchmark  # noqa: E402
from paramserver.tools.bench.cases import RequestedCases, make_cases  # noqa: E402
from paramserver.tools.bench.command import BenchmarkProgress, duration_text, remaining_s  # noqa: E402
from paramserver.tools.bench.link_probe import GLOO, RPC, measure_links  # noqa: E402
from paramserver.tools.bench.measure import folder_name, measure, run_config  # noqa: E402
from paramserver.tools.bench.slowdown import SlowdownSpec  # noqa: E402
from paramserver.tools.report.results import CaseResult, append_result, read_results  # noqa: E402
from tests.measure import outside_clock  # noqa: E402


def command(file, out, *flags):
    return [sys.executable, "-m", "paramserver.benchmark", "--config", str(file), "--out", str(out), *map(str, flags)]


def processes_left(out):
    return [p for p in psutil.process_iter(["cmdline"]) if str(out) in " ".join(p.info["cmdline"] or [])]


# Whole benchmarks.


@pytest.fixture(scope="module", autouse=True)
def _runs_are_forked():
    """Those of benchmarks in this process; test_an_interrupt_keeps_what_is_finished starts interpreters."""
    with (
        mock.patch("paramserver.tools.bench.measure.ProcessGroup", ForkedGroup),
        mock.patch("paramserver.tools.bench.link_probe.ProcessGroup", ForkedGroup),
    ):
        yield


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    """Two cases, to the end."""
    folder = tmp_path_factory.mktemp("benchmark")
    flags = ("--modes", "rpc", "--trainers", "1", "--repeats", "1", "--seconds", "0.5", "--warm-up", "0.2")
    printed, noted = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(noted),
    ):
        patch.setenv("OMP_NUM_THREADS", "1")
        code = benchmark.main(["--config", str(write_config(folder)), "--out", str(folder / "out"), *flags])
    assert code == 0, printed.getvalue() + noted.getvalue()
    return folder / "out", printed.getvalue(), noted.getvalue()


@pytest.mark.processes
def test_a_benchmark_writes_a_record_for_each_case_and_both_pages(benched):
    out, printed, noted = benched
    results = read_results(out).results
    assert [(one.case, one.repeat) for one in results] == [("local", 0), ("rpc 1 trainer", 0)]
    assert all(one.is_completed for one in results)
    assert {path.name for path in out.iterdir()} >= {"results.jsonl", "report.html", "report.md"}
    assert not (out / "runs").exists()
    page = (out / "report.md").read_text()
    assert all(name in page for name in ("local", "rpc 1 trainer", str(results[0].environment["host"])))
    assert "1/2 local, repeat 1:" in noted
    assert "left" in noted
    assert str(out / "report.html") in printed


@pytest.mark.processes
def test_a_record_is_complete(benched):
    for one in read_results(benched[0]).results:
        assert one.samples == pytest.approx(one.samples_per_second * one.seconds, abs=1)
        assert one.per_trainer == pytest.approx((one.samples_per_second,))
        assert one.per_process == pytest.approx(one.samples_per_second / (one.trainers + one.servers))
        assert one.steps == pytest.approx(one.samples / 8, abs=2)
        assert 0.3 < one.seconds < one.wall_s
        assert sum(one.step_bins.values()) == one.steps
        assert sum(one.phases_ms[name] for name in PHASES) == pytest.approx(one.step_ms["mean"], rel=0.05)
        assert one.cpu_s["trainers"] > 0
        assert one.peak_rss_mb["trainer"] > 50
        assert one.loss[-1][0] > one.loss[0][0]
        assert (one.target, one.time_to_target_s) == (None, None)
        about = one.environment
        assert {"versions", "host", "cores", "commit", "config", "command", "threads"} <= set(about)
        assert "--seconds 0.5" in about["command"]
        assert yaml.safe_load(about["config"])["task"] == f"{TASKS}:ReferenceTask"


@pytest.mark.processes
def test_a_server_has_figures_of_its_own(benched):
    served = [one for one in read_results(benched[0]).results if one.servers]
    alone = [one for one in read_results(benched[0]).results if not one.servers]
    for one in served:
        assert one.cpu_s["servers"] > 0
        assert one.peak_rss_mb["server"] > 50
        assert one.staleness["max"] == 0
        assert one.predicted["communication_ms"] > 0
        assert one.predicted["bandwidth_bytes_s"] > 1e6
        assert one.wire_bytes_per_step > 0
        assert one.wire_bytes_source is None  # counted by the trainers
    for one in alone:
        assert (one.cpu_s["servers"], one.peak_rss_mb["server"], one.staleness, one.predicted) == (None,) * 4


@pytest.mark.processes
def test_a_case_that_fails_is_reported_and_the_others_go_on(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "out"
    flags = ("--modes", "local", "--trainers", "1", "--repeats", "1", "--seconds", "0.3", "--warm-up", "0.1")
    code, printed, err = bench(*flags, "--sweep", "task_args.optimizer=none_such,sgd", measure=measure)
    assert code == 1, printed + err
    failed, fine = read_results(out).results
    assert (failed.case, failed.status, failed.samples_per_second) == ("local, optimizer=none_such", "failed", None)
    assert "none_such" in failed.error
    assert fine.is_completed, fine.error
    assert "none_such" in (out / "report.md").read_text()
    assert [path.name for path in (out / "runs").iterdir()] == ["local-optimizer=none_such-0"]


class OutputReader:
    """Reads the output of a process while it runs."""

    def __init__(self, stream):
        self.stream = stream

    def wait_for(self, text, timeout_s):
        output = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.stream, selectors.EVENT_READ)
            while text.encode() not in output:
                assert selector.select(timeout_s), output
                piece = os.read(self.stream.fileno(), 4096)
                assert piece, output
                output += piece


@pytest.mark.processes
def test_an_interrupt_keeps_what_is_finished(tmp_path):
    out = tmp_path / "out"
    flags = ("--modes", "rpc", "--repeats", "1", "--seconds", "0.3", "--warm-up", "0.1", "--trainers", "1")
    started = command(write_config(tmp_path), out, *flags)
    with subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        OutputReader(process.stderr).wait_for("1/2 local", 90)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=150)
    assert process.returncode == 3
    assert [one.case for one in read_results(out).results] == ["local"]
    assert "1 of 2 runs" in (out / "report.md").read_text()
    assert str(out / "report.html") in output.decode()
    assert processes_left(out) == []
    assert not (out / "runs").exists()


@pytest.mark.processes
def test_an_interrupt_before_anything_is_finished_leaves_nothing(tmp_path):
    out = tmp_path / "out"
    started = command(write_config(tmp_path), out, "--modes", "local", "--seconds", "30")
    with subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        OutputReader(process.stderr).wait_for("runs of", 60)
        process.send_signal(signal.SIGTERM)
        _, output = process.communicate(timeout=150)
    assert process.returncode == 3
    assert b"there is nothing to report" in output
    assert not out.exists()
    assert processes_left(out) == []


# One case at a time.


def cases_of(folder, *, slow=None, task="ReferenceTask", modes="rpc", overrides=(), **config):
    file = write_config(folder, task=task, **config)
    requested = RequestedCases(file, modes=modes, slow=slow, overrides=overrides)
    return {case.name: case for case in make_cases(requested)}


@pytest.mark.processes
def test_samples_reported_by_the_task_and_an_outside_clock_agree_with_the_record(tmp_path):
    pipe, file = tmp_path / "pipe", tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(outside_clock.config_of(pipe, "small", 2)))
    case = make_cases(RequestedCases(file, modes="rpc"))[-1]
    method = outside_clock.method_of(tmp_path / "out", 1.5, 0.5)
    listener, record = outside_clock.heard_and_recorded(case, 0, method, pipe)
    # However the speed varies, the measured time is one of the windows of its length; a batch of each trainer may lie
    # on either edge, and a process may wait for a core between counting and reading its clock: for 0.1 s where others
    # are busy.
    least, most = listener.samples_within(record.seconds)
    edges = 2 * 2 * outside_clock.BATCH_SIZE + 0.1 * record.samples_per_second
    assert least - edges <= record.samples <= most + edges
    assert record.samples_per_second == pytest.approx(record.samples / record.seconds, rel=1e-3)
    assert outside_clock.phase_share(record) == pytest.approx(1, rel=1e-3)


@pytest.mark.nightly
def test_trainers_without_communication_train_at_once_and_a_slow_one_is_slow(tmp_path):
    case = cases_of(tmp_path, slow=SlowdownSpec(1, 20.0))["no communication 2 trainers, trainer 1 slowed 20 times"]
    record = measure(case, 0, outside_clock.method_of(tmp_path / "out", 2.0, 0.2))
    assert record.error is None
    fast, slow = record.per_trainer
    assert fast > 3 * slow > 0
    assert record.seconds > 0.3
    assert record.baseline == "no communication"
    assert record.scenario == {"slow": {"trainer": 1, "factor": 20.0, "probability": 1.0}}


@pytest.mark.processes
def test_the_time_to_a_target_is_that_of_the_first_validation_that_meets_it(tmp_path):
    case = cases_of(tmp_path, modes="local", training={"validate_every": 5})["local"]
    method = outside_clock.method_of(tmp_path / "out", 0.5, 0.1)
    target = benchmark.target_for("accuracy=0.01", case.config)
    record = measure(case, 0, benchmark.replace(method, target=target))
    assert record.error is None
    assert len(record.validation) > 2
    assert record.samples_to_target == record.validation[0][0] == pytest.approx(40)
    assert record.time_to_target_s == record.validation[0][1] > 0
    assert record.target == {"accuracy": 0.01}


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_rounds_are_measured_also_where_few_fit_into_the_time(tmp_path, mode):
    overrides = ["training.local_steps=20", "server.transport=rpc", "server.compression=int8"]
    case = cases_of(tmp_path, modes=mode, overrides=overrides)[f"{mode} 2 trainers"]
    record = measure(case, 0, outside_clock.method_of(tmp_path / "out", 1.5, 0.1))
    assert record.error is None
    assert record.steps >= 2
    assert record.samples_per_second == pytest.approx(record.samples / record.seconds, rel=0.01)
    curves = record.quantities
    assert {steps for _, _, steps in curves["local_steps"]} == {20.0}
    assert all(drift > 0 for _, _, drift in curves["drift"])
    # A round has 20 batches of each of two trainers.
    assert record.loss[0][0] == curves["drift"][0][0] == 20 * case.config.training.batch_size * 2
    share = {"rpc": (1 + 1 / 4) / 2, "ddp": 1.0}[mode]  # pushes are compressed, and the vectors of blocks are small
    plain = 2 * record.model_bytes / 20 / case.config.training.batch_size
    assert record.wire_bytes_per_sample == pytest.approx(share * plain, rel=0.1)


@pytest.mark.processes
def test_data_that_ends_before_the_warm_up_is_a_failure_that_names_the_cure(tmp_path):
    case = cases_of(tmp_path, task="UnevenLengths", modes="local", training={"max_steps": None})["local"]
    record = measure(case, 0, outside_clock.method_of(tmp_path / "out", 5.0, 1.0))
    assert "raise --seconds, or give data that lasts longer" in record.error
    assert record.status == "failed"


# Without processes.


def test_a_measured_run_is_the_users_but_for_limits_and_saving(tmp_path):
    case = cases_of(tmp_path, overrides=["buffer.kind=firo", "training.clip_grad_norm=2"])["rpc 2 trainers"]
    method = outside_clock.method_of(tmp_path / "out", 4.0, 1.0)
    made = run_config(case, 3, method, tmp_path / "here", 0)
    assert (made.training.max_steps, made.training.max_seconds) == (None, 5.0)
    assert (made.training.validate_every, made.checkpoint.every, made.checkpoint.best) == (0, 0, None)
    assert (made.buffer, made.server, made.cluster, made.mode) == (
        case.config.buffer,
        case.config.server,
        case.config.cluster,
        case.config.mode,
    )
    assert made.training.clip_grad_norm == 2
    assert made.task_args["task"] == f"{TASKS}:ReferenceTask"
    assert made.task_args["observer"]["seed"] == 3


def test_curves_of_rounds_have_as_many_samples_between_points(tmp_path):
    overrides = ["training.local_steps=4", "training.validate_every=6", "logging.log_every=3"]
    case = cases_of(tmp_path, overrides=overrides)["rpc 2 trainers"]
    method = outside_clock.method_of(tmp_path / "out", 4.0, 1.0)
    target = benchmark.target_for("accuracy=0.5", case.config)
    made = run_config(case, 0, benchmark.replace(method, target=target), tmp_path / "here", 0)
    assert (made.training.validate_every, made.logging.log_every) == (2, 1)
    assert made.task_args["observer"]["stop_after_s"] == 5.0  # and no run takes for ever
    assert made.training.max_seconds == 20.0


def test_a_task_file_is_checked_before_anything_starts(tmp_path):
    case = cases_of(tmp_path, task="nowhere.py:Task")["local"]
    record = measure(case, 0, outside_clock.method_of(tmp_path / "out", 1.0, 1.0))
    assert "there is no file nowhere.py" in record.error
    with pytest.raises(TaskError):
        run_config(case, 0, outside_clock.method_of(tmp_path, 1.0, 1.0), tmp_path, 0)


def test_folders_of_runs_have_plain_names(tmp_path):
    cases = cases_of(tmp_path, modes="ddp")
    assert [folder_name(case, 1) for case in cases.values()] == [
        "local-1",
        "no-communication-2-trainers-1",
        "ddp-2-trainers-1",
    ]


def test_a_case_is_measured_although_one_of_the_same_folder_failed(tmp_path):
    case = cases_of(tmp_path, task="nowhere.py:Task")["local"]
    method = outside_clock.method_of(tmp_path / "out", 1.0, 1.0)
    (tmp_path / "out" / "runs" / "local-0" / "0").mkdir(parents=True)
    assert "there is no file nowhere.py" in measure(case, 0, method).error


def made(case, repeat, rate=100.0, **fields):
    known = {"samples_per_second": rate, "wall_s": 2.0, "seconds": 1.0} if rate else {"error": "it broke"}
    about = {"trainers": case.trainers, "servers": case.servers, "baseline": case.baseline}
    status = "completed" if rate else "failed"
    return CaseResult(case=case.name, repeat=repeat, mode=case.mode.name, status=status, **about, **known, **fields)


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """The command in this process, with ``measure`` in place of the real one."""

    def call(*flags, measure=lambda case, repeat, method: made(case, repeat), links=lambda *_: {}):
        monkeypatch.setattr(benchmark, "measure", measure)
        monkeypatch.setattr(benchmark, "measure_links", links)
        code = benchmark.main(["--config", str(write_config(tmp_path)), "--out", str(tmp_path / "out"), *flags])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_a_failed_case_makes_the_exit_code_1(bench, tmp_path):
    code, _, err = bench(measure=lambda case, repeat, method: made(case, repeat, 0 if case.servers else 50.0))
    assert code == 1
    assert "rpc 2 trainers, repeat 1: failed: it broke" in err
    results = [(one.case, one.repeat) for one in read_results(tmp_path / "out").results]
    assert len(results) == 12
    # Every other repeat is in reverse, so that a machine that slows down harms no case alone.
    cases = [[case for case, repeat in results if repeat == number] for number in range(3)]
    assert cases[0] == cases[1][::-1] == cases[2]
    assert [repeat for _, repeat in results] == [0] * 4 + [1] * 4 + [2] * 4


def test_an_interrupt_between_runs_is_exit_code_3_with_a_report(bench, tmp_path):
    def interrupts(case, repeat, method):
        if repeat:
            raise Interrupted("a signal")
        return made(case, repeat)

    code, _, err = bench(measure=interrupts)
    assert code == 3
    assert "4 of 12 runs were finished" in err
    assert "4 of 12 runs were finished" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.processes
def test_links_are_measured_in_a_relative_folder(tmp_path, monkeypatch):
    """As ``--out`` is by default."""
    monkeypatch.chdir(tmp_path)
    assert measure_links(Path("links"), environment()).keys() == {GLOO, RPC}


def test_a_link_that_cannot_be_measured_costs_the_prediction_alone(bench):
    def fails(*_):
        raise TrainingError("no way")

    code, _, err = bench(links=fails)
    assert code == 0
    assert "nothing is predicted: no way" in err


def test_without_matplotlib_all_but_the_plots_is_there(bench, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = bench()
    assert code == 0
    assert "matplotlib is not installed" in err
    assert "rpc 2 trainers" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--modes", "mpi"], "--modes mpi: mpi must be one of rpc, ddp, local"),
        (["--sweep", "server.consistancy=sync,async"], "did you mean server.consistency?"),
        (["--repeats", "0"], "--repeats 0: 0 must be a whole number from 1 on"),
        (["--repeats", "many"], "--repeats many: many must be a whole number"),
        (["--seconds", "-1"], "--seconds (-1) must be a number above 0"),
        (["--warm-up", "nan"], "--warm_up (nan) must be a number above 0"),
        (["--slow", "trainer=1"], "--slow trainer=1: factor is missing"),
        (["--target", "accuracy=0.9"], "training.validate_every (0) must be above 0"),
        (["--set", "training.batch_size=none"], "training.batch_size (none) must be"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_made(bench, tmp_path, flags, message):
    code, out, err = bench(*flags)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_files_is_not_written_into(bench, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.jsonl").touch()
    code, _, err = bench()
    assert code == 2
    assert "must be a new or an empty folder" in err


def test_the_time_that_is_left_is_that_of_runs_like_those(capsys, tmp_path):
    assert remaining_s(["a", "b"], {}, 7.0) == 14
    assert remaining_s(["a", "a", "b"], {"a": [2.0, 4.0]}, 7.0) == 9
    assert remaining_s([], {"a": [2.0]}, 7.0) == 0
    assert duration_text(125.4) == "0:02:05"
    case = cases_of(tmp_path)["local"]
    progress = BenchmarkProgress(sys.stderr, [case, case], 1.0)
    progress.start()
    progress.run_finished(made(case, 0))
    progress.run_finished(made(case, 1, 0))
    assert capsys.readouterr().err.splitlines() == [
        "2 runs of 1 cases, about 0:00:14",
        "1/2 local, repeat 1: 100 samples/s; about 0:00:02 left",
        "2/2 local, repeat 2: failed: it broke",
    ]


@pytest.fixture
def two(tmp_path):
    """Results in which B has 0.9 times the throughput of A."""
    case = cases_of(tmp_path)["rpc 2 trainers"]
    for name, rate in (("a", 1000.0), ("b", 900.0)):
        (tmp_path / name).mkdir()
        for repeat in range(3):
            append_result(tmp_path / name / "results.jsonl", made(case, repeat, rate + repeat))
    return str(tmp_path / "a"), str(tmp_path / "b")


@pytest.mark.parametrize(
    ("flags", "code"),
    [([], 0), (["--fail_below", "0.95"], 1), (["--fail-below", "0.85"], 0), (["--fail_below", "x"], 2)],
)
def test_a_comparison_fails_below_its_limit(two, capsys, flags, code):
    assert benchmark.main(["compare", *two, *flags]) == code
    out, err = capsys.readouterr()
    assert bool(err) == (code > 0)
    assert ("rpc 2 trainers" in out) == (code != 2)


def test_what_is_no_result_is_refused(two, tmp_path, capsys):
    assert benchmark.main(["compare", two[0], str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
    record = {**json.loads((Path(two[0]) / "results.jsonl").read_text().splitlines()[0]), "format": 99}
    (tmp_path / "newer.jsonl").write_text(json.dumps(record) + "\n")
    assert benchmark.main(["compare", two[0], str(tmp_path / "newer.jsonl")]) == 2
    assert "format (99) must be 1" in capsys.readouterr().err

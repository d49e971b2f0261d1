"""Finished runs become cases and repeats; other folders are refused in one sentence."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from fake_results import failed, repeats, result
from launching import environment, launch, run_in_process, train

from paramserver import reporting
from paramserver.config.io import flatten_mapping
from paramserver.tools.report import from_runs
from paramserver.tools.report.cases import cases_of
from paramserver.tools.report.from_runs import Run, results_at
from paramserver.tools.report.results import append_result, first_reached, parse_target, with_target

CONFIG = {"training": {"max_steps": 12, "batch_size": 8, "validate_every": 4}, "logging": {"tensorboard": False}}

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return train(tmp_path_factory.mktemp("local"), "local", 1, **CONFIG)


@pytest.fixture(scope="module")
def rpc(tmp_path_factory):
    cluster = {"num_trainers": 2, "timeout_s": 30}
    found = launch(
        tmp_path_factory.mktemp("rpc"), mode="rpc", cluster=cluster, server={"consistency": "async"}, **CONFIG
    )
    assert found.code == 0, found.output
    return found


def copied(run, folder, **changes):
    """A copy of a run whose files are changed: {file stem: function of its content}."""
    shutil.copytree(run.run_dir, folder)
    for stem, change in changes.items():
        file = next(folder.glob(f"{stem}.*"))
        if file.suffix == ".json":
            file.write_text(json.dumps(change(json.loads(file.read_text()))))
        else:
            file.write_text(change(file.read_text()))
    return folder


def report(capsys, *arguments):
    code = reporting.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_run_is_a_record_of_its_own_figures(rpc):
    (one,) = results_at([rpc.run_dir]).results
    summary = rpc.summary
    assert (one.case, one.mode, one.trainers, one.servers) == ("rpc async, 2 trainers", "rpc", 2, 1)
    for name in ("steps", "samples", "seconds", "samples_per_second", "step_ms", "phases_ms", "staleness"):
        assert getattr(one, name) == summary[name]
    assert one.per_trainer == tuple(t["samples_per_second"] for t in summary["trainers"])
    assert one.per_process == pytest.approx(summary["samples_per_second"] / 3)
    assert one.peak_rss_mb == summary["peak_rss_mb"]
    assert one.loss == tuple((r["samples"], r["seconds"], r["loss"]) for r in rpc.of_kind("train"))
    assert [p[2] for p in one.validation] == [r["values"] for r in rpc.of_kind("validation")]
    assert [p[0] for p in one.validation] == [8 * r["step"] for r in rpc.of_kind("validation")]
    assert one.wall_s > 0
    stored = json.loads((rpc.run_dir / "environment.json").read_text())
    assert one.environment["host"] == stored["host"]
    assert one.environment["cores"] == stored["cpu_count"]
    assert one.environment["command"] == stored["command"]
    assert "batch_size: 8" in one.environment["config"]


def test_a_validation_before_the_first_record_of_training_has_its_samples(local, tmp_path):
    def sparse(text):
        """As with ``logging.log_every: 6``."""
        lines = [(json.loads(line), line) for line in text.splitlines()]
        return "".join(f"{line}\n" for one, line in lines if one["kind"] != "train" or one["step"] % 6 == 0)

    for name, change in (("ended", {}), ("killed", {"summary": lambda _: {}})):
        (one,) = results_at([copied(local, tmp_path / name, metrics=sparse, **change)]).results
        assert [point[0] for point in one.loss] == [48, 96]
        assert [point[0] for point in one.validation] == [32, 64, 96]


def test_a_run_with_rounds_has_their_figures(rpc, tmp_path):
    def with_rounds(text):
        lines = [json.loads(line) for line in text.splitlines()]
        trained = ({**one, "local_steps": 4.0, "drift": 0.5} if one["kind"] == "train" else one for one in lines)
        return "".join(f"{json.dumps(one)}\n" for one in trained)

    def dropped(summary):
        return {**summary, "samples_served": 2 * summary["samples"], "wire_bytes_per_sample": 10.0}

    (one,) = results_at([copied(rpc, tmp_path / "rounds", metrics=with_rounds, summary=dropped)]).results
    for name, value in (("local_steps", 4.0), ("drift", 0.5)):
        assert one.quantities[name] == tuple((samples, seconds, value) for samples, seconds, _ in one.loss)
    assert one.wire_bytes_per_sample == 20.0
    (without,) = results_at([copied(rpc, tmp_path / "none", summary=lambda _: {})]).results
    assert (set(without.quantities.values()), without.wire_bytes_per_sample) == ({()}, None)


def test_pages_of_two_runs(rpc, local, tmp_path, capsys):
    def stale(summary):
        """As if both trainers had computed at once, which none of the two need do in a run this short."""
        return {**summary, "staleness": {**summary["staleness"], "histogram": {"0": 6, "1": 6}}}

    run_dir = copied(rpc, tmp_path / "stale", summary=stale)
    code, out, err = report(capsys, run_dir, local.run_dir, "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    assert "`rpc async, 2 trainers` applied" in out
    assert "their first, slower steps are in the figures" in out
    assert out.strip().endswith(f"{tmp_path}/out/report.md")
    text = (tmp_path / "out" / "report.md").read_text()
    for wanted in ("local", str(run_dir), "plots/loss-seconds.svg", "plots/staleness.svg", "consistency: async"):
        assert wanted in text
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"report.html", "report.md", "plots"}


def test_a_single_process_is_the_baseline_of_the_others(rpc, local):
    cases = {case.name: case for case in cases_of(results_at([local.run_dir, rpc.run_dir]).results)}
    assert cases["local"].baseline == "local"
    assert cases["rpc async, 2 trainers"].baseline is None
    assert results_at([local.run_dir]).results[0].baseline is None


def test_runs_that_differ_in_seed_and_name_are_repeats(local, tmp_path, monkeypatch):
    later = copied(
        local,
        tmp_path / "later",
        config=lambda text: text.replace("seed: 0", "seed: 7").replace("name: ", "name: x"),
        environment=lambda found: {**found, "started": "2099-01-01T00:00:00+00:00"},
    )
    found = results_at([later, local.run_dir]).results
    assert [(one.case, one.repeat) for one in found] == [("local", 0), ("local", 1)]
    assert found[1].environment["folder"] == str(later)
    assert len(results_at([later, later]).results) == 1


def test_runs_that_differ_in_a_key_are_cases_named_by_it(local, tmp_path):
    larger = copied(local, tmp_path / "larger", config=lambda text: text.replace("batch_size: 8", "batch_size: 16", 1))
    found = results_at([local.run_dir, larger]).results
    assert {one.case for one in found} == {"local, training.batch_size=8", "local, training.batch_size=16"}
    assert found[1].overrides == {"training.batch_size": 16}
    # A key that only servers use makes no other case of a run without servers.
    other = copied(
        local, tmp_path / "other", config=lambda text: text.replace("staleness_bound: 4", "staleness_bound: 9")
    )
    assert {one.case for one in results_at([local.run_dir, other]).results} == {"local"}


def test_the_configs_of_many_runs_are_compared_once(monkeypatch):
    runs = [
        Run(Path(f"run-{i}"), {"mode": "local", "task_args": {"lr": i}}, "", {"steps": 1}, {}, (), 0) for i in range(30)
    ]
    read = []
    monkeypatch.setattr(from_runs, "flatten_mapping", lambda mapping: read.append(mapping) or flatten_mapping(mapping))
    compared = Mock(wraps=from_runs._varying_keys)
    monkeypatch.setattr(from_runs, "_varying_keys", compared)
    names = from_runs._case_names(runs)
    assert names == [f"local, task_args.lr={i}" for i in range(30)]
    assert (len(read), compared.call_count) == (30, 1)


@pytest.mark.parametrize("section", ["task_args", "simulations.sampler_args"])
def test_an_argument_that_one_run_leaves_at_its_default_makes_two_cases(local, tmp_path, section):
    def given(text):
        config = yaml.safe_load(text)
        first, _, second = section.partition(".")
        own = config.get(first) or {}
        config[first] = {**own, "lr2": 0.2} if not second else {**own, second: {"lr2": 0.2}}
        return yaml.safe_dump(config)

    other = copied(local, tmp_path / "other", config=given)
    for runs in ([local.run_dir, other], [other, local.run_dir]):
        found = results_at(runs).results
        assert {one.case for one in found} == {"local", f"local, {section}.lr2=0.2"}
        assert [dict(one.overrides) for one in found if one.case != "local"] == [{f"{section}.lr2": 0.2}]


def test_a_validation_has_the_samples_of_its_step_where_steps_have_different_numbers(local, tmp_path):
    """As after a resume with another batch size."""

    def larger_after_six(text):
        records = [json.loads(line) for line in text.splitlines()]
        for one in records:
            if one["kind"] == "train":
                one["samples"] = 100 * min(one["step"], 6) + 8 * max(one["step"] - 6, 0)
        return "".join(json.dumps(one) + "\n" for one in records)

    def summary(found):
        return {**found, "samples": 648}

    (one,) = results_at([copied(local, tmp_path / "x", metrics=larger_after_six, summary=summary)]).results
    assert [point[0] for point in one.validation] == [400, 616, 648]


@pytest.mark.parametrize("left", ["metrics.jsonl", "summary.json", "config.yaml"])
def test_a_run_of_which_one_file_is_left_is_reported_beside_others(local, tmp_path, capsys, left):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    shutil.copy(local.run_dir / left, damaged)
    code, out, err = report(capsys, local.run_dir, damaged, "--out", tmp_path / "out")
    assert code in (0, 1), out + err
    assert (tmp_path / "out" / "report.md").exists()


def test_runs_of_other_tasks_are_doubted(local, tmp_path):
    other = copied(local, tmp_path / "other", config=lambda text: text.replace("py:ReferenceTask", "py:Other"))
    assert any("different tasks" in note for note in results_at([local.run_dir, other]).notes)


def test_a_run_that_failed_was_killed_or_was_interrupted(local, tmp_path, capsys):
    broken = copied(local, tmp_path / "b", summary=lambda s: {**s, "status": "failed", "error": "PeerLost: gone\nmore"})
    going = copied(local, tmp_path / "g")
    (going / "summary.json").unlink()
    stopped = copied(local, tmp_path / "s", summary=lambda s: {**s, "status": "interrupted", "steps": 5})
    code, out, _ = report(capsys, broken, going, stopped, "--out", tmp_path / "out")
    assert code == 0
    assert "PeerLost: gone" in (tmp_path / "out" / "report.md").read_text()
    assert "has no summary.json: the run has not ended, or was killed" in (tmp_path / "out" / "report.md").read_text()
    assert f"{stopped} was interrupted after 5 steps.\n" in out  # its figures are of fewer, if it was resumed


@pytest.mark.parametrize("mode", ["rpc", "local"])
@pytest.mark.parametrize("left", [{}, {"status": "failed", "mode": "rpc", "error": "killed"}])
def test_a_run_that_was_killed_is_a_repeat_of_its_case(request, tmp_path, mode, left):
    """It has no summary, or one of the supervisor, which lacks what rank 0 knew."""
    run = request.getfixturevalue(mode)
    own = left and {**left, "mode": mode}
    killed = copied(run, tmp_path / "k", summary=lambda _: own, config=lambda text: text.replace("seed: 0", "seed: 7"))
    for folders in ([killed, run.run_dir], [run.run_dir, killed]):
        (case,) = cases_of(results_at(folders).results)
        assert (case.name, len(case.results), len(case.completed)) == (results_at([run.run_dir]).results[0].case, 2, 1)
        assert len({(one.trainers, one.servers) for one in case.results}) == 1


@pytest.mark.parametrize("records", ["all", "none"])
def test_a_run_that_was_interrupted_twice_did_not_end_before_its_first_step(local, tmp_path, records):
    """The summary is that of the supervisor then, which has no figures."""
    summary = {"status": "interrupted", "mode": "local", "checkpoint": None, "error": "interrupted twice"}
    kept = {} if records == "all" else {"metrics": lambda _: ""}
    folder = copied(local, tmp_path / "s", summary=lambda _: summary, **kept)
    when = "after 12 steps or more" if records == "all" else "before the first record of a step"
    assert f"{folder} was interrupted {when}." in results_at([folder]).notes


def test_transports_are_those_of_the_last_session(rpc, tmp_path):
    """As after trainers have left, or a resume with fewer of them or in another mode."""

    def session(*trainers):
        records = [{"kind": "transport", "trainer": trainer, "transport": "tcp"} for trainer in trainers]
        return "".join(f"{json.dumps(one)}\n" for one in [{"kind": "start", "step": 0}, *records])

    shrunk = copied(rpc, tmp_path / "shrunk", metrics=lambda text: session(0, 1, 2) + text)
    resumed = copied(rpc, tmp_path / "resumed", metrics=lambda text: text + session())
    for folder, used in ((shrunk, rpc.summary["transports"]), (resumed, {})):
        (one,) = results_at([folder]).results
        assert one.transports == used


def test_torn_lines_of_a_run_are_left_out_and_reported(local, tmp_path):
    torn = copied(local, tmp_path / "torn", metrics=lambda text: "oops\n" + text[:-20])
    with (torn / "metrics.jsonl").open("ab") as file:
        file.write(b"\n\xff\xfe\x00")  # blocks of a file system after a crash
    (one,) = results_at([torn]).results
    assert one.loss == results_at([local.run_dir]).results[0].loss
    assert any("3 lines of" in note for note in results_at([torn]).notes)


def test_a_run_whose_threads_waited_for_cores_is_named(local, tmp_path):
    def waited(summary):
        (one,) = summary["trainers"]
        assert one["core_wait_share"] is not None
        return {**summary, "trainers": [{**one, "core_wait_share": 0.31, "threads": 2}]}

    folder = copied(local, tmp_path / "waited", summary=waited)
    assert (
        f"The cores were not free in {folder}: trainer 0 waited 31 % of the time for a core, with 2 threads: set "
        "OMP_NUM_THREADS to the number of free cores."
    ) in results_at([folder]).notes


def test_samples_that_became_too_old_are_named(local, tmp_path):
    def aged(summary):
        (one,) = summary["trainers"]
        return {**summary, "trainers": [{**one, "stream": {"stale": 3}}]}

    folder = copied(local, tmp_path / "aged", summary=aged)
    text = f"3 samples of {folder} became too old and had no use (buffer.max_staleness)."
    assert text in results_at([folder]).notes
    assert not [note for note in results_at([local.run_dir]).notes if "too old" in note]


def test_a_loss_that_is_not_a_number(local, tmp_path):
    def diverged(text):
        records = [json.loads(line) for line in text.splitlines()]
        for one in records:
            if one["kind"] == "train":
                one |= {"loss": None, "loss_text": "nan"}
            if one["kind"] == "validation":
                one["values"] = {"loss": None, "loss_text": "nan"}
        return "".join(json.dumps(one) + "\n" for one in records)

    (one,) = results_at([copied(local, tmp_path / "nan", metrics=diverged)]).results
    assert {point[2] for point in one.loss} == {None}
    assert one.validation[0][2] == {"loss": None}


# Targets.


def test_the_time_to_a_target_is_that_of_the_validation_that_met_it(local, tmp_path, capsys):
    losses = [r["values"]["loss"] for r in local.of_kind("validation")]
    seconds = [r["seconds"] for r in local.of_kind("validation")]
    target = parse_target(f"loss={sorted(losses)[0] + 1e-9}")
    (one,) = results_at([local.run_dir]).results
    met = with_target(one, target)
    assert met.time_to_target_s == seconds[losses.index(min(losses))]
    code, out, _ = report(capsys, local.run_dir, "--target", "loss=1e9", "--out", tmp_path)
    assert code == 0
    assert "The target loss 1e+09 was reached first by `local`" in out
    code, out, _ = report(capsys, local.run_dir, "--target", "loss=-1", "--out", tmp_path)
    assert "No case reached the target loss -1" in out


def test_accuracy_rises_and_loss_falls_to_a_target():
    points = [(10.0, 1.0, {"accuracy": 0.5, "loss": 2.0}), (20.0, 2.0, {"accuracy": 0.9, "loss": None}),
              (30.0, 3.0, {"accuracy": 0.8, "loss": 1.0})]  # fmt: skip
    assert first_reached(points, parse_target("accuracy = 0.85")) == (20.0, 2.0)
    assert first_reached(points, parse_target("loss=1.5")) == (30.0, 3.0)
    assert first_reached(points, parse_target("accuracy=0.95")) is None
    assert first_reached(points, parse_target("other=1")) is None


# Benchmarks.


def test_results_of_a_benchmark_are_shown_again(tmp_path, capsys):
    for one in [*repeats("rpc", [1000.0, 1010.0]), failed("ddp")]:
        append_result(tmp_path / "results.jsonl", one)
    for place in (tmp_path, tmp_path / "results.jsonl"):
        code, out, err = report(capsys, place, "--out", tmp_path / "out", "--target", "accuracy=0.5")
        assert (code, err) == (0, "")
        assert "`rpc` applied 1005" in out
        assert "reached first by `rpc`, after 4" in out
        assert "failed" in out


# Bad input.


def write(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder


def bad_places(folder):
    append_result(folder / "results.jsonl", result())
    return {
        "missing": ([folder / "nothing"], "does not exist"),
        "empty": ([write(folder / "empty", "x", "").parent / "empty"], "holds none of config.yaml"),
        "runs": ([write(folder / "runs" / "", "x", "").parent / "runs"], "holds 1 run instead; give them:"),
        "two": ([folder, folder / "results.jsonl"], "must be reported alone"),
        "summary": ([write(folder / "damaged", "summary.json", '{"a')], "summary.json is damaged"),
        "list": ([write(folder / "list", "summary.json", "[1]")], "summary.json must hold a mapping"),
        "config": ([write(folder / "yaml", "config.yaml", "a: [")], "config.yaml is damaged"),
        "field": ([write(folder / "field", "summary.json", '{"step_ms": 3}')], "step_ms (3) must be"),
        "format": ([write(folder / "old", "results.jsonl", '{"format": 0}\n')], "format (0) must be 1"),
        "target": ([folder, "--target", "accuracy"], "--target (accuracy) must be"),
        "out": ([folder, "--out", folder / "results.jsonl" / "x"], "choose another --out"),
    }


@pytest.mark.parametrize("which", ["missing", "empty", "runs", "two", "summary", "list", "config", "field", "format",
                                   "target", "out"])  # fmt: skip
def test_what_cannot_be_reported_is_stated_in_one_sentence(tmp_path, capsys, which):
    (tmp_path / "runs").mkdir()
    write(tmp_path / "runs" / "one", "summary.json", "{}")
    arguments, message = bad_places(tmp_path)[which]
    code, out, err = report(capsys, *arguments, *(() if "--out" in arguments else ("--out", tmp_path / "out")))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "out").exists()


def test_the_console_script_knows_it(local, tmp_path):
    program = [sys.executable, "-c", "from paramserver.cli import main; main()", "report"]
    done = subprocess.run(
        [*program, str(local.run_dir)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report" / "report.html").is_file()
    assert "report/report.html" in done.stdout


def test_a_run_whose_task_breaks_is_reported_with_its_error(tmp_path):
    run = run_in_process(
        tmp_path, task="FaultyTask", task_args={"what": "error", "mark": str(tmp_path / "mark")}, **CONFIG
    )
    assert run.code == 1
    (one,) = results_at([run.run_dir]).results
    assert not one.is_completed
    assert "the task raised on purpose" in one.error
    assert len(one.loss) == 5

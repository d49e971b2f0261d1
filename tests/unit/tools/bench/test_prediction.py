"""``paramserver benchmark predict``: calibrated on results, checked on deployments whose costs are known."""

from dataclasses import replace

import pytest
import yaml

from paramserver import benchmark
from paramserver.config import (
    MODES,
    ClusterConfig,
    Config,
    ServerConfig,
    TrainingConfig,
    config_from_mapping,
    dump_yaml,
)
from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.bench import prediction
from paramserver.tools.bench.link_probe import LinkSpeed, communication_s
from paramserver.tools.bench.prediction import TRANSFER_JITTER, all_reduce, break_even_servers, calibrated, usable
from paramserver.tools.bench.simulation import Costs, Deployment, simulate
from paramserver.tools.report.results import CaseResult, Results, append_result, read_results

COSTS = Costs(link_share=1.0, message_s=3e-3, byte_s=4e-9, update_byte_s=1e-9, step_s=6e-3)
LINK = LinkSpeed(12.5e6, 2e-4)
MODEL, COMPUTE_S, BATCH, CORES = 2**20, 0.05, 8, 2


def deployed(trainers, servers, consistency="sync", **changes):
    config = Config(
        task="task.py:Task",
        cluster=ClusterConfig(num_trainers=trainers, num_servers=servers),
        server=ServerConfig(consistency=consistency, transport="rpc"),
        training=TrainingConfig(batch_size=BATCH, max_steps=10),
    )
    values = {"costs": COSTS, "cores": CORES, "one_machine": True, "samples": BATCH, **changes}
    values["transfer_jitter"] = TRANSFER_JITTER
    return Deployment(config, MODEL, COMPUTE_S, LINK, **values)


def measured(trainers, servers, consistency="sync", repeat=0, **changes):
    deployment = deployed(trainers, servers, consistency)
    found = simulate(deployment)
    fields = {
        "case": f"rpc {trainers} trainers, {servers} servers, {consistency}",
        "status": "completed",
        "steps": 30,
        "samples": 480,
        "samples_per_second": found.samples_per_second,
        "step_ms": {"mean": found.step_s * 1e3},
        "phases_ms": {"data": 0.0, "forward": COMPUTE_S * 1e3, "backward": 0.0},
        "wire_bytes_per_step": 2.0 * MODEL,
        "model_bytes": MODEL,
        "predicted": {"bandwidth_bytes_s": LINK.bandwidth, "latency_s": LINK.latency},
        "environment": {"cores": CORES, "config": dump_yaml(deployment.config)},
        **changes,
    }
    return CaseResult(repeat=repeat, mode="rpc", trainers=trainers, servers=servers, **fields)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    file = tmp_path_factory.mktemp("measured") / "results.jsonl"
    for case in (measured(2, 1), measured(2, 2), measured(2, 1, "async")):
        append_result(file, case)
    return file


@pytest.mark.nightly
def test_what_two_trainers_show_predicts_more(results):
    base, notes = calibrated(usable(read_results(results)), "results.jsonl")
    assert base.forward_s == pytest.approx(COMPUTE_S)
    assert "fitted on 3 runs" in notes[0]
    for counts in ((4, 2), (8, 1), (6, 2, "async")):
        truth = deployed(*counts)
        speed = simulate(truth).samples_per_second
        predicted = simulate(replace(base, config=truth.config)).samples_per_second
        assert predicted == pytest.approx(speed, rel=0.1), counts


@pytest.fixture
def _fitted(monkeypatch):
    monkeypatch.setattr(prediction, "fit", lambda measured: COSTS)


@pytest.mark.parametrize(("server", "gradients"), [({}, 3), ({"backup_trainers": 1}, 2), ({"consistency": "async"}, 1)])
def test_the_batch_of_a_data_loader_is_the_measured_one(tmp_path, server, gradients):
    config = deployed(3, 1).config.given_mapping()
    del config["training"]["batch_size"]  # as a benchmark writes it, where a DataLoader has the size
    text = dump_yaml(config_from_mapping({**config, "server": {**config["server"], **server}}))
    assert "\n  batch_size" not in text
    loaded = measured(3, 1, steps=30, samples=30 * gradients * 256, environment={"cores": CORES, "config": text})
    ((deployment, _),) = usable(Results("measured", (loaded,)))
    assert deployment.samples == 256


def test_the_fit_is_of_runs_without_a_slow_trainer():
    slowed = measured(2, 1, scenario={"slow": {"trainer": 1, "factor": 5.0, "probability": 1.0}})
    ((deployment, _),) = usable(Results("measured", (measured(2, 1), slowed)))
    assert deployment.slow is None
    with pytest.raises(UnsupportedConfiguration, match="a completed case of mode rpc without --slow"):
        usable(Results("measured", (slowed,)))


@pytest.mark.usefixtures("_fitted")
def test_the_command_prints_a_row_for_each_case(results, capsys, tmp_path):
    out = tmp_path / "predicted"
    words = [
        "predict",
        str(results),
        "--trainers",
        "2,4",
        "--sweep",
        "cluster.num_servers=1,3",
        "--bandwidth",
        "1gbit",
    ]
    assert benchmark.main([*words, "--cores", "8", "--break_even", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith(("| ddp", "| rpc"))]
    assert [row.split("|")[1].strip() for row in rows] == [
        *("ddp 2 trainers", "ddp 4 trainers"),
        *(f"rpc {t} trainers, num_servers={s}" for t in (2, 4) for s in (1, 3)),
    ]
    assert "Simulated, not measured: each host with 8 cores and 125 MB/s" in printed
    assert "servers with which sync is as fast as ddp, 4 trainers: " in printed
    written = read_results(out).results
    assert len(written) == len(rows)
    speeds = {one.case: one.samples_per_second for one in written}
    assert speeds["rpc 4 trainers, num_servers=3"] > 1.5 * speeds["rpc 4 trainers, num_servers=1"]
    assert "Simulated, not measured" in (out / "report.md").read_text()


@pytest.mark.usefixtures("_fitted")
def test_failures_and_stragglers_are_simulated(results, capsys):
    words = ["predict", str(results), "--modes", "rpc", "--trainers", "4", "--slow", "trainer=1,factor=3"]
    assert benchmark.main([*words, "--failures", "every=10,restart=1"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| rpc")]
    assert len(rows) == 2
    kept = [float(row.split("|")[-2].strip(" %")) / 100 for row in rows]
    assert all(0.7 < share < 1.0 for share in kept)


def test_all_reduce_is_the_formula():
    ring = replace(deployed(4, 1), costs=replace(COSTS, step_s=0.0))
    expected = COMPUTE_S + communication_s(MODES["ddp"], MODEL, 4, 0, LINK.bandwidth, LINK.latency)
    assert all_reduce(MODES["ddp"], ring).step_s == pytest.approx(expected)


def test_the_servers_to_break_even_are_those_of_the_formula():
    """Without costs but bandwidth: n^2 / 2(n - 1), up to the first bucket, which nothing overlaps."""
    free = Costs(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    big = replace(deployed(4, 1), costs=free, message_bytes=8e6, link=LinkSpeed(1e9, 0.0))
    limit_s = all_reduce(MODES["ddp"], big).step_s
    assert break_even_servers(big, limit_s) in (3, 4)
    assert break_even_servers(big, COMPUTE_S / 2) is None


@pytest.mark.parametrize("changes", [{"training": {"local_steps": 2}}, {"server": {"compression": "int8"}}])
def test_rounds_and_compression_have_no_model(tmp_path, results, capsys, changes):
    config = deployed(2, 1).config.given_mapping()
    changed = {**config, **{name: {**config[name], **keys} for name, keys in changes.items()}}
    file = tmp_path / "results.jsonl"
    append_result(file, measured(2, 1, environment={"cores": CORES, "config": dump_yaml(config_from_mapping(changed))}))
    assert benchmark.main(["predict", str(file)]) == 2
    assert "must be without training.local_steps" in capsys.readouterr().err
    ((section, keys),) = changes.items()
    ((key, value),) = keys.items()
    assert benchmark.main(["predict", str(results), "--sweep", f"{section}.{key}={value}", "--modes", "rpc"]) == 2
    assert f"the case rpc 2 trainers, {key}={value} must be without" in capsys.readouterr().err


def rates(results, capsys, *flags):
    assert benchmark.main(["predict", str(results), "--trainers", "4", *flags]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith(("| ddp", "| rpc"))]
    return {row[1].strip(): float(row[4]) for row in rows}


@pytest.mark.usefixtures("_fitted")
@pytest.mark.parametrize("measured_dtype", [None, "bfloat16"])
def test_the_size_of_a_message_is_that_of_the_case(tmp_path, capsys, measured_dtype):
    """In ddp it is that of the parameters, whatever was measured."""
    config = deployed(2, 1).config
    config = replace(config, server=replace(config.server, wire_dtype=measured_dtype))
    file = tmp_path / "results.jsonl"
    append_result(file, measured(2, 1, environment={"cores": CORES, "config": dump_yaml(config)}))
    found = rates(file, capsys, "--sweep", "server.wire_dtype=float32,bfloat16", "--cores", "64", "--jitter", "0")
    assert found["rpc 4 trainers, wire_dtype=bfloat16"] > 1.2 * found["rpc 4 trainers, wire_dtype=float32"]
    exact = replace(deployed(4, 1), cores=64)
    (ddp,) = [rate for case, rate in found.items() if case.startswith("ddp")]
    assert ddp == pytest.approx(all_reduce(MODES["ddp"], exact).samples_per_second, rel=0.01)


@pytest.mark.usefixtures("_fitted")
def test_tensors_have_a_share_of_the_bandwidth_that_is_given(results, capsys):
    """That of a probe is the share already."""
    flags = ["--modes", "ddp", "--jitter", "0"]
    found = [
        *rates(results, capsys, *flags).values(),
        *rates(results, capsys, *flags, "--bandwidth", "100mbit").values(),
    ]
    shares = [replace(COSTS, link_share=share) for share in (1.0, Costs().link_share)]
    expected = [all_reduce(MODES["ddp"], replace(deployed(4, 1), costs=own)).samples_per_second for own in shares]
    assert found == pytest.approx(expected, rel=2e-3)
    assert found[1] < 0.99 * found[0]


@pytest.mark.parametrize(
    "setting",
    ["training.batch_size=64", "training.accumulate_batches=4", "training.precision=bfloat16", "task_args.x=1"],
)
def test_what_is_measured_is_the_same_in_all_results_and_cases(tmp_path, results, capsys, setting):
    key, value = setting.split("=")
    section, name = key.split(".")
    assert benchmark.main(["predict", str(results), "--modes", "rpc", "--sweep", setting]) == 2
    assert f"{name}={value} must have {key.removesuffix('.x')} (" in capsys.readouterr().err
    given = deployed(2, 1).config.given_mapping()
    other = {**given, section: {**given.get(section, {}), name: yaml.safe_load(value)}}
    environment = {"cores": CORES, "config": dump_yaml(config_from_mapping(other))}
    file = tmp_path / "results.jsonl"
    for case in (measured(2, 1), measured(2, 1, repeat=1, environment=environment)):
        append_result(file, case)
    assert benchmark.main(["predict", str(file)]) == 2
    assert "each result must have" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"predicted": None}, "must have the speed of its link"),
        ({"wire_bytes_per_step": 1000.0}, "were in shared memory; benchmark again with --bandwidth"),
        ({"model_bytes": None, "wire_bytes_per_step": 2e6}, "with model_bytes, steps, samples and phases_ms"),
        ({"status": "failed"}, "must hold a completed case of mode rpc"),
        ({"environment": {"cores": 2}}, "must have the config of its run"),
    ],
)
def test_results_that_cannot_be_used_are_refused(tmp_path, capsys, changes, message):
    file = tmp_path / "results.jsonl"
    append_result(file, measured(2, 1, **changes))
    assert benchmark.main(["predict", str(file)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bandwidth", "fast"], "--bandwidth fast: must be a number above 0"),
        (["--latency_us", "-1"], "--latency_us (-1) must be a number from 0 on"),
        (["--cores", "0"], "--cores 0: 0 must be a whole number from 1 on"),
        (["--jitter", "x"], "--jitter (x) must be a number from 0 to 1"),
        (["--jitter", "1000"], "--jitter (1000) must be a number from 0 to 1; correct it"),
        (["--latency_us", "inf"], "--latency_us (inf) must be a number from 0 on"),
        (["--trainers", "2000000"], "world_size (2000000) must be at most 65536"),
        (["--modes", "local"], "--modes (local) must have rpc or ddp"),
        (["--set", "server.compute=server"], "server.compute (server) must be trainer for a prediction"),
        (["--out", "/proc/predicted"], "/proc/predicted must be a folder that this user can write to"),
        (["--failures", "restart=2"], "every is missing"),
        (["--failures", "often"], "must be every=SECONDS or restart=SECONDS"),
        (["--trainers", "0"], "--trainers 0: 0 must be a whole number from 1 on"),
        (["--sweep", "server.consistency=fast"], "server.consistency"),
        (["--slow", "trainer=5,factor=2"], "must be below the number of trainers"),
    ],
)
def test_bad_flags_are_refused(results, capsys, words, message):
    assert benchmark.main(["predict", str(results), *words]) == 2
    assert message in capsys.readouterr().err


def test_the_results_are_not_replaced(results, capsys):
    folder, before = results.parent, results.read_bytes()
    for given, out in ((results, folder), (folder, folder / ".." / folder.name)):
        assert benchmark.main(["predict", str(given), "--out", str(out)]) == 2
        assert "must be another folder than that of the results" in capsys.readouterr().err
    assert results.read_bytes() == before


def test_the_results_must_exist(tmp_path, capsys):
    assert benchmark.main(["predict", str(tmp_path / "none")]) == 2
    assert "must be a file of results that can be read" in capsys.readouterr().err

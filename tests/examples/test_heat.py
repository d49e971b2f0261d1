"""examples/heat: what a simulation sends and stores, the task, the comparison's table and plot, and runs offline."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from example_modules import EXAMPLES, load_example
from launching import FinishedRun

from paramserver import Partition
from paramserver.config import load_config
from paramserver.devices import CPU
from paramserver.errors import TaskError
from paramserver.online.sampler import make_sampler
from paramserver.online.spec import IngestSpec
from paramserver.parameters.model import build_model

HERE = EXAMPLES / "heat"
GIVEN = [150.0, 420.0, 180.0, 350.0, 270.0]


@pytest.fixture(scope="module")
def heat():
    return load_example("heat", "Heat")


class Recorder:
    """In place of a client, of a run that wants this."""

    def __init__(self, n, steps=None):
        self.fields, self.steps = {"temperature": (n, n)}, steps
        self.sent = []

    def send(self, step, fields):
        self.sent.append((step, fields))


def put(heat, folder, count=2, n=4, steps=3):
    """Stored simulations, with numbers 0, 2, 4, ..."""
    for number in range(count):
        given = [*GIVEN[:4], 100.0 + number]
        heat.simulate.simulate_to_disk(given, heat.stored.file_of(folder, 2 * number), n, steps)
    return folder


# Simulations.


def test_what_is_sent_is_what_is_stored(heat, tmp_path):
    client = Recorder(6, 4)
    heat.simulate.simulate(GIVEN, client)
    assert [step for step, _ in client.sent] == [0, 1, 2, 3]
    assert {tuple(fields) for _, fields in client.sent} == {("temperature",)}
    heat.simulate.simulate_to_disk(GIVEN, tmp_path / "a" / "simulation-00007.npz", 6, 4)
    stored = heat.stored.StoredSimulations(tmp_path / "a")
    for step, fields in client.sent:
        assert np.array_equal(stored[step]["temperature"], fields["temperature"])
        assert np.array_equal(stored[step]["parameters"], GIVEN)
        assert (stored[step]["simulation"], stored[step]["step"]) == (7, step)


def test_a_run_that_does_not_say_how_many_gets_the_usual_number(heat):
    client = Recorder(2)
    heat.simulate.simulate(GIVEN, client)
    assert len(client.sent) == heat.simulate.STEPS


def test_a_program_that_starts_a_simulation_needs_no_torch(tmp_path):
    file = tmp_path / "simulation-00000.npz"
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not for simulations')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    arguments = ["--n", 3, "--steps", 2, "--file", file, "--parameters", *GIVEN]
    subprocess.run([sys.executable, HERE / "simulate.py", *map(str, arguments)], env=environ, check=True, timeout=150)
    with np.load(file) as stored:
        assert stored["temperature"].shape == (2, 3, 3)


def test_a_simulation_that_fails_leaves_no_file(heat, tmp_path):
    def fields():
        yield np.zeros((2, 2), np.float32)
        raise FloatingPointError

    with pytest.raises(FloatingPointError):
        heat.stored.write_simulation(tmp_path / "a.npz", GIVEN, fields())
    assert list(tmp_path.iterdir()) == []


def test_the_config_describes_what_the_simulations_are(heat):
    plan = IngestSpec.from_config(load_config(HERE / "config.yaml").simulations)
    assert tuple(name for name, _, _ in plan.parameters) == heat.solver.PARAMETERS
    assert {(low, high) for _, low, high in plan.parameters} == {(heat.task.LOW, heat.task.HIGH)}
    assert plan.fields[0].shape == (heat.simulate.N, heat.simulate.N)
    assert plan.config.steps == heat.simulate.STEPS
    assert plan.expected_for(0, 1) == 10000


# Stored simulations.


def test_stored_samples_are_read_one_by_one(heat, tmp_path):
    stored = heat.stored.StoredSimulations(put(heat, tmp_path))
    assert [(stored[i]["simulation"], stored[i]["step"]) for i in range(len(stored))] == [
        (number, step) for number in (0, 2) for step in range(3)
    ]
    for index, file in ((1, "simulation-00000.npz"), (4, "simulation-00002.npz")):
        with np.load(tmp_path / file) as whole:
            assert np.array_equal(stored[index]["temperature"], whole["temperature"][1])
            assert np.array_equal(stored[index]["parameters"], whole["parameters"])
    assert isinstance(stored.temperatures[0], np.memmap)
    assert not isinstance(stored[0]["temperature"], np.memmap)
    assert stored[0]["temperature"].dtype == np.float32


def damage(heat, folder, kind):
    file = heat.stored.file_of(folder, 0)
    if kind == "compressed":
        np.savez_compressed(file, temperature=np.zeros((3, 4, 4), np.float32), parameters=np.zeros(5))
    elif kind == "another":
        np.savez(file, parameters=np.zeros(5))
    else:
        file.write_bytes(file.read_bytes()[:150] if kind == "cut" else b"")


@pytest.mark.parametrize("kind", ["compressed", "another", "cut", "empty"])
def test_a_damaged_file_is_named(heat, tmp_path, kind):
    damage(heat, put(heat, tmp_path), kind)
    with pytest.raises(ValueError, match=r"simulation-00000\.npz must be a simulation that was stored here .*; remove"):
        heat.stored.StoredSimulations(tmp_path)


def test_a_folder_that_cannot_serve_is_refused(heat, tmp_path):
    with pytest.raises(ValueError, match=r"must hold simulations; make them with"):
        heat.stored.StoredSimulations(tmp_path)
    put(heat, tmp_path)
    heat.simulate.simulate_to_disk(GIVEN, heat.stored.file_of(tmp_path, 1), 5, 3)
    with pytest.raises(ValueError, match=r"00001\.npz must have shape \(3, 4, 4\) as the others, it has \(3, 5, 5\)"):
        heat.stored.StoredSimulations(tmp_path)


def small(*overrides):
    sizes = [
        "simulations.count=3",
        "simulations.at_once=2",
        "simulations.steps=2",
        "simulations.fields.temperature=[4, 4]",
    ]
    return load_config(HERE / "config.yaml", overrides=[*sizes, *overrides])


def test_store_makes_the_simulations_of_the_config_once(heat, tmp_path):
    config = small("seed=5")
    assert heat.store.store(tmp_path, config) > 0
    stored = heat.stored.StoredSimulations(tmp_path)
    assert (stored.numbers, stored.shape) == ([0, 1, 2], (2, 4, 4))
    sampler = make_sampler("uniform", IngestSpec.from_config(config.simulations).parameters, 5, 3)
    for number in range(3):
        assert stored.parameters[number].tolist() == list(sampler.draw(number))
    made = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    heat.stored.file_of(tmp_path, 1).unlink()
    heat.store.store(tmp_path, config)
    again = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert [file.name for file in made if again[file] != made[file]] == ["simulation-00001.npz"]
    with pytest.raises(ValueError, match=r"00000\.npz must hold the parameters that the config gives it; choose"):
        heat.store.store(tmp_path, small("seed=6"))


def test_store_says_what_a_simulation_said_that_failed(heat, tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(RuntimeError, match=r"simulate\.py --file .* ended with 1: (.|\n)*Error"):
        heat.store.store(tmp_path / "taken", small())


# The task.


def task_of(heat, *overrides, **arguments):
    task = heat.task.Heat(**arguments)
    task.config = load_config(HERE / ("offline.yaml" if task.offline else "config.yaml"), overrides=overrides)
    return task


def test_the_network_computes_with_normalised_numbers(heat):
    model = heat.task.Surrogate(4, 10, 8)
    seen = []
    model.layers[0].register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    drawn = torch.rand(5000, 5, dtype=torch.float64) * 400 + 100
    out = model(drawn, torch.arange(5000) % 10)
    assert out.shape == (5000, 4, 4)
    assert out.dtype == torch.float32
    assert seen[0].mean(0).abs().max() < 0.2
    assert (seen[0].std(0) - 1).abs().max() < 0.05
    assert model.layers[-1].bias.shape == (16,)


def test_sizes_are_those_of_the_section_online_and_of_the_arguments_offline(heat):
    sizes = ["simulations.fields.temperature=[8, 8]", "simulations.steps=7"]
    assert task_of(heat, *sizes, n=3).sizes == (8, 7)
    assert task_of(heat, offline=True, n=3, steps=4).sizes == (3, 4)
    with pytest.raises(TaskError, match=r"simulations\.fields must be what simulate\.py sends"):
        task_of(heat, "simulations.fields.temperature=[8, 9]").build_model()


def test_validation_is_the_same_everywhere_and_not_what_is_trained_on(heat):
    one, other = (task_of(heat, f"seed={seed}", "simulations.steps=3", validation_simulations=2) for seed in (0, 1))
    samples = one.validation_source(Partition(0, 2))
    assert one.validation_source(Partition(1, 2)) is samples
    assert [(s["simulation"], s["step"]) for s in samples] == [(i, s) for i in range(2) for s in range(3)]
    client = Recorder(32, 3)
    heat.simulate.simulate(samples[0]["parameters"], client)
    assert [s["temperature"].tolist() for s in samples[:3]] == [f["temperature"].tolist() for _, f in client.sent]
    for mine, theirs in zip(samples, other.validation_source(Partition(0, 2)), strict=True):
        assert np.array_equal(mine["temperature"], theirs["temperature"])
    ranges = IngestSpec.from_config(one.config.simulations).parameters
    sampler = make_sampler("uniform", ranges, heat.task.VALIDATION_SEED, 2)
    assert not np.allclose(sampler.draw(0), samples[0]["parameters"])


def test_the_error_is_told_normalised_and_in_kelvin(heat):
    task = task_of(heat)
    batch = {"parameters": torch.zeros(2, 5), "step": torch.zeros(2), "temperature": torch.zeros(2, 3, 3)}
    away = torch.full((2, 3, 3), 3 * heat.task.SPREAD)
    assert task.training_step(lambda *_: away, batch, 0).tolist() == pytest.approx([9, 9])
    values = task.validation_step(lambda *_: -away, batch, 0, 0)
    assert {name: float(value) for name, value in values.items()} == pytest.approx(
        {"loss": 9, "kelvin": 3 * heat.task.SPREAD}
    )


def test_stored_simulations_that_do_not_fit_are_refused_in_one_sentence(heat, tmp_path):
    put(heat, tmp_path)
    task = task_of(heat, offline=True, folder=str(tmp_path), n=4, steps=3)
    assert len(task.train_source(Partition(0, 1))) == 6
    with pytest.raises(TaskError, match=r"n \(5\) and task_args\.steps \(3\) must be .* have 3 steps of 4 x 4; give"):
        task_of(heat, offline=True, folder=str(tmp_path), n=5, steps=3).train_source(Partition(0, 1))
    with pytest.raises(TaskError, match=r"^task_args\.folder: folder \(.*none\) must hold simulations"):
        task_of(heat, offline=True, folder=str(tmp_path / "none")).train_source(Partition(0, 1))


# Steered.


def test_a_diffusivity_multiplies_the_steps(heat):
    once = list(heat.solver.solve([*GIVEN, 1.0], 4, 3, 0.002))
    np.testing.assert_array_equal(once, list(heat.solver.solve(GIVEN, 4, 3, 0.002)))
    np.testing.assert_array_equal(
        list(heat.solver.solve([*GIVEN, 2.0], 4, 3, 0.002)), list(heat.solver.solve(GIVEN, 4, 3, 0.004))
    )


def test_losses_are_weighted_by_the_ratio_of_densities_where_that_is_asked_for(heat):
    task = task_of(heat, weighted=True)
    logged = []
    task.log_sample_loss = logged.append
    batch = {"parameters": torch.zeros(2, 5), "step": torch.zeros(2), "temperature": torch.zeros(2, 3, 3)}
    batch["density_ratio"] = torch.tensor([2.0, 0.5], dtype=torch.float64)
    away = torch.full((2, 3, 3), 3 * heat.task.SPREAD)
    assert task.training_step(lambda *_: away, batch, 0) == pytest.approx(9 * 1.25)
    assert logged[0].tolist() == pytest.approx([9, 9])


def test_the_learning_rate_falls_to_0_over_a_run_of_known_length(heat, monkeypatch):
    task = task_of(heat, "training.max_steps=4", anneal=True, lr=0.5)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=task.lr)
    scheduler = task.build_scheduler(optimizer)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[0] == 0.5
    assert rates == sorted(rates, reverse=True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0)
    assert task_of(heat).build_scheduler(optimizer) is None
    monkeypatch.setattr(heat.task.Heat, "total_steps", None)
    with pytest.raises(TaskError, match=r"task_args\.anneal \(true\) must have a number of steps"):
        task.build_scheduler(optimizer)


def test_a_model_is_evaluated_on_the_same_simulations_whatever_it_was_trained_on(heat):
    steer = heat.steer
    ranges = [*heat.task.TEMPERATURES, (0.1, 20.0)]
    models = [heat.task.Surrogate(4, 3, 8, ranges) for _ in range(2)]
    first, second = (steer.errors(model, 5) for model in models)
    assert len(first) == 5
    assert first == steer.errors(models[0], 5) != second
    found = [
        {"case": case, "seed": 0, "steps": 9, "seconds": 2.0, "errors": errors}
        for case, errors in (("uniform", [1.0, 3.0]), ("importance", [1.0, 1.0]))
    ]
    assert "| importance | 1 | 9 | 1 (-66 %) | 1 (-50 %) | 1 (-50 %) | 2 (+0 %) |" in steer.table(found)


# The comparison.


def curve(heat, case, seed, losses, stored_s=0.0, different=400):
    points = [
        heat.curves.Point(10 * i, 200 * i, stored_s + 2.0 * i, loss, 10 * loss)
        for i, loss in enumerate(losses, start=1)
    ]
    return heat.curves.Curve(case, seed, stored_s, 2.0 * len(losses), different, tuple(points))


@pytest.fixture
def curves(heat):
    return [
        curve(heat, "fifo", 0, [0.8, 0.5]),
        curve(heat, "offline", 0, [0.4, 0.1], stored_s=4.0),
        curve(heat, "offline", 1, [0.6, 0.3], stored_s=6.0),
        curve(heat, "fifo", 1, [0.6, 0.3]),
    ]


def test_a_run_is_read_from_its_records(heat, tmp_path):
    def validation(step, seconds, loss):
        return {"kind": "validation", "step": step, "seconds": seconds, "values": {"loss": loss, "kelvin": 9 * loss}}

    records = [
        {"kind": "train", "step": 5, "samples": 100},
        {"kind": "train", "step": 10, "samples": 200},
        validation(10, 1.5, 0.4),
        *({"kind": "buffer", "step": step, "rank": 1, "unseen": step} for step in (10, 14)),
        {"kind": "buffer", "step": 14, "rank": 2, "unseen": 3},
        validation(14, 2.0, 0.3),
        validation(14, 2.1, 0.2),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = {"steps": 14, "samples": 270, "seconds": 2.5, "buffer": {"puts": 260}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    read = heat.curves.read_run(tmp_path, "fifo", 3, stored_s=4.0)
    assert [(p.step, p.samples, p.seconds, p.loss) for p in read.points] == [(10, 200, 5.5, 0.4), (14, 270, 6.1, 0.2)]
    assert (read.different, read.seconds, read.last.kelvin) == (260 - 14 - 3, 2.5, pytest.approx(1.8))
    assert read.rate == pytest.approx(270 / 6.5)
    assert heat.curves.read_run(tmp_path, "offline", 3, different=7).different == 7


def test_results_are_kept_as_lines(heat, curves, tmp_path):
    heat.curves.write_lines(tmp_path / "results.jsonl", curves[:1])
    heat.curves.write_lines(tmp_path / "results.jsonl", curves[1:])
    assert heat.curves.read_lines(tmp_path / "results.jsonl") == curves


def test_the_table_holds_means_over_the_seeds(heat, curves):
    _, _, fifo, offline = heat.curves.table(curves).splitlines()
    assert fifo == "| fifo | 20 | 400 | 0.4 (0.3 to 0.5) | 4.00 | +0 % | - | 4.0 | 100 |"
    assert offline == "| offline | 20 | 400 | 0.2 (0.1 to 0.3) | 2.00 | -50 % | 5.0 | 4.0 | 45 |"
    assert heat.curves.table(curves, baseline="none").splitlines()[2].split(" | ")[5] == ""


def test_a_mean_curve_has_the_validations_that_all_seeds_have(heat, curves):
    shorter = curve(heat, "fifo", 1, [0.6])
    ((point, low, high),) = heat.curves.band([curves[0], shorter])
    assert (point.step, point.samples, low, high) == (10, 200, 0.6, 0.8)
    assert point.loss == pytest.approx(0.7)


def test_a_plot_is_drawn(heat, curves, tmp_path):
    heat.curves.plot(curves, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def sized(heat, folder, *words):
    return heat.compare.Comparison(folder, heat.compare.parsed([str(folder), *words]))


def test_every_case_makes_as_many_batches_as_fifo_can(heat, tmp_path, monkeypatch):
    started = []

    def run(task, config, *, overrides):
        started.append(load_config(config, overrides=overrides))
        return SimpleNamespace(run_dir=tmp_path)

    monkeypatch.setattr(heat.compare.paramserver, "run", run)
    monkeypatch.setattr(heat.compare, "read_run", lambda *arguments: arguments)
    monkeypatch.setattr(heat.compare, "store", lambda folder, config: config.simulations.count)
    comparison = sized(heat, tmp_path, "--count", "30", "--n", "16", "--steps", "50")
    told = {case: comparison.run(case, 1)[3:] for case in heat.compare.CASES}
    asked = dict(zip(heat.compare.CASES, started, strict=True))
    assert {(c.training.max_steps, c.training.batch_size, c.cluster.num_trainers, c.seed) for c in started} == {
        (75, 10, 2, 1)
    }
    assert len({config.logging.name for config in started}) == len(started)
    served = {  # by how many simulations, and how often each of their samples
        case: (config.simulations.count, config.buffer.pseudo_epochs, config.buffer.min_new_per_batch)
        for case, config in asked.items()
        if not case.startswith("offline")
    }
    assert served == {
        "fifo": (30, 1, 0),
        "firo": (30, 1, 0),
        "fifo, half": (15, 2, 0),
        "firo, half": (15, 2, 0),
        "reservoir, half": (15, 1, 5),
    }
    assert {case: config.buffer.kind for case, config in asked.items() if case in served} == {
        case: case.partition(",")[0] for case in served
    }
    assert IngestSpec.from_config(asked["fifo"].simulations).expected_for(0, 1) == 1500
    assert {case: (asked[case].task_args["n"], *told[case]) for case in asked if case not in served} == {
        "offline": (16, 30, 1500),
        "offline, half": (16, 15, 750),
        "offline, a tenth": (16, 3, 150),
    }


def test_a_comparison_that_would_not_validate_is_refused(heat, tmp_path):
    with pytest.raises(SystemExit, match=r"--validate_every \(25\) must be at most the 10 batches of a run"):
        sized(heat, tmp_path, "--count", "2")


def test_a_run_that_made_fewer_batches_than_the_others_is_told(heat, tmp_path):
    comparison = sized(heat, tmp_path, "--count", "4", "--validate_every", "10")
    assert comparison.warning(curve(heat, "fifo", 0, [0.8, 0.5])) == ""
    assert "fifo made 10 batches and not 20 as the others" in comparison.warning(curve(heat, "fifo", 0, [0.8]))


def test_cases_take_turns(heat):
    assert list(heat.compare.interleaved(["a", "b"], [4, 5])) == [("a", 4), ("b", 4), ("b", 5), ("a", 5)]


# Runs.


@pytest.fixture
def launched(fork_server, tmp_path):
    """Starts a run in ``tmp_path`` and waits for its end."""

    def start(*words, **values):
        values |= {"logging.run_dir": tmp_path / "runs", "logging.name": "run", "logging.tensorboard": False}
        flags = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        return FinishedRun(*fork_server.run([*words, *flags], tmp_path, timeout_s=90), tmp_path / "runs" / "run")

    return start


def last_loss(finished):
    return finished.of_kind("validation")[-1]["values"]["loss"]


def untrained_loss(task):
    """That of the model with which a run begins; how far the first steps go depends on which samples arrive first."""
    samples = [task.process_sample(sample) for sample in task.validation_source(Partition(0, 1))]
    values = task.validation_step(build_model(task, task.config.seed, CPU), task.collate(samples), 0, 0)
    return values["loss"].item()


PROGRAM = {"simulations.function": "null", "simulations.command": f"{sys.executable} {HERE / 'simulate.py'}"}


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "simulations"), [("rpc", {}), ("ddp", PROGRAM)])
def test_training_while_simulations_run_lowers_the_error(heat, launched, mode, simulations):
    sizes = {"count": 4, "steps": 50, "fields.temperature": "[8, 8]"}
    task = task_of(heat, *(f"simulations.{name}={value}" for name, value in sizes.items()))
    values = {f"simulations.{name}": value for name, value in sizes.items()} | simulations
    values |= {"buffer.watermark": 10, "buffer.min_new_per_batch": 2, "training.batch_size": 4}
    values |= {"training.validate_every": 5, "task_args.lr": 0.003}
    finished = launched("--config", HERE / "config.yaml", "--mode", mode, **values)
    assert finished.code == 0, finished.output
    assert [trainer["stream"]["received"] for trainer in finished.summary["trainers"]] == [100, 100]
    assert finished.summary["simulations"]["complete"] == 4
    assert finished.summary["samples"] >= 200
    assert finished.load("model")["layers.4.bias"].shape == (64,)
    assert last_loss(finished) < 0.7 * untrained_loss(task)


@pytest.mark.processes
def test_training_on_stored_simulations_lowers_the_error(tmp_path, launched):
    store = ["--set", "simulations.count=12", "--set", "simulations.steps=20"]
    made = subprocess.run(
        [sys.executable, HERE / "store.py", "data/heat", *store],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("data/heat: 1 MB, ")
    values = {"task_args.steps": 20, "training.max_epochs": 3, "training.validate_every": 6}
    finished = launched("--config", HERE / "offline.yaml", **values)
    assert finished.code == 0, finished.output
    assert (finished.summary["samples"], finished.summary["steps"]) == (720, 36)
    assert last_loss(finished) < 0.5 * finished.of_kind("validation")[0]["values"]["loss"]


@pytest.mark.nightly
@pytest.mark.processes
def test_the_comparison_leaves_results_a_table_and_a_plot(heat, tmp_path, capsys, own_environ):
    folder = tmp_path / "results"
    words = [str(folder), "--mode", "local", "--quick"]
    heat.compare.main(words)
    printed = capsys.readouterr().out
    assert (folder / "table.md").read_text() in printed
    assert (folder / "plot.png").stat().st_size > 10000
    held = {curve.case: curve for curve in heat.curves.read_lines(folder / "results.jsonl")}
    assert list(held) == list(heat.compare.CASES)
    paced = held.pop("reservoir, half")
    assert paced.last.samples == 10 * paced.last.step  # how many depends on timing
    assert 0 < paced.different <= 80
    assert {(c.last.step, c.last.samples) for c in held.values()} == {(16, 160)}
    assert [curve.different for curve in held.values()] == [160, 160, 160, 80, 80, 80, 40]
    (folder / "table.md").unlink()
    heat.compare.main([*words, "--draw"])
    assert capsys.readouterr().out == printed
    with pytest.raises(FileExistsError):
        heat.compare.main(words)

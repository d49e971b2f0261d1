"""``paramserver.run`` with an instance of a task."""

import math
import sys
import time

import pytest
import torch
import yaml
from launching import differing_tensors

import paramserver
from paramserver import api
from paramserver.api import _assign
from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.evaluate import restore


class Given(paramserver.Task):
    def __init__(self, data, lr=0.1):
        self.data, self.lr = data, lr

    def build_model(self):
        return torch.nn.Linear(1, 1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def train_source(self, partition):
        return self.data

    def training_step(self, model, batch, batch_idx):
        time.sleep(0.02)  # stands for the work of a batch
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


X = torch.linspace(-1, 1, 32).unsqueeze(1)
DATA = torch.utils.data.TensorDataset(X, 2 * X)


def config(folder, name, mode="local", steps=4):
    logging = {"run_dir": str(folder), "name": name, "progress": "off", "tensorboard": False}
    return {"mode": mode, "training": {"max_steps": steps, "batch_size": 8}, "logging": logging}


def test_in_local_an_argument_may_be_any_object_and_a_resume_needs_it_again(tmp_path):
    straight = paramserver.run(Given(DATA, lr=0.2), config(tmp_path, "straight", steps=8))
    first = paramserver.run(Given(DATA, lr=0.2), config(tmp_path, "parts"))
    with pytest.raises(TaskError, match=r"takes other arguments.*data"):
        paramserver.run(resume=first.run_dir, overrides=["training.max_steps=8"])
    second = paramserver.run(Given(DATA, lr=0.2), resume=first.run_dir, overrides=["training.max_steps=8"])
    assert second.summary["trainers"][0]["samples"] == 64
    assert second.summary["trainers"][0]["samples_per_second"] < 8 / 0.02, "of what was served since the resume"
    last = ["checkpoints", "step-00000008", "model.pt"]
    one, other = (torch.load(run.run_dir.joinpath(*last)) for run in (straight, first))
    assert differing_tensors(one, other) == []
    stored = (first.run_dir / "config.yaml").read_text()
    assert "lr: 0.2" in stored
    assert "data:" not in stored


@pytest.mark.parametrize("has_file", [True, False])
def test_a_class_of_the_program_is_stored_so_that_a_command_finds_it(tmp_path, monkeypatch, has_file):
    """In one process too: a command that evaluates or resumes the run is another program."""
    main, program = sys.modules["__main__"], tmp_path / "one_process_program.py"
    program.write_text(
        f"from {__name__} import DATA, Given\n"
        "class Digits(Given):\n    def __init__(self):\n        super().__init__(DATA)\n"
    )
    scope = {"__name__": "__main__"}
    exec(program.read_text(), scope)
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", str(program) if has_file else "<stdin>", raising=False)
    monkeypatch.setattr(main, "Digits", scope["Digits"], raising=False)
    result = paramserver.run(scope["Digits"], config(tmp_path, "run"))
    monkeypatch.delattr(main, "Digits")
    stored = yaml.safe_load((result.run_dir / "config.yaml").read_text())["task"]
    assert stored == (f"{program}:Digits" if has_file else "task.pkl:Digits")
    assert restore(result.run_dir, "latest", ()).task.keyword_arguments() == {}


def test_in_local_a_class_with_much_data_of_the_program_is_not_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(api, "_MOST_PICKLED_IN_LOCAL", 1000)
    scope = {"__name__": "__main__", "Given": Given, "DATA": DATA, "LARGE": bytes(1000)}
    exec("class Typed(Given):\n    def __init__(self):\n        super().__init__(DATA), LARGE\n", scope)
    result = paramserver.run(scope["Typed"], config(tmp_path, "run"))
    assert result.status == "completed"
    assert not (result.run_dir / "task.pkl").exists()


@pytest.mark.parametrize("mode", ["ddp", "rpc"])
def test_other_modes_refuse_what_other_processes_cannot_create(tmp_path, mode):
    with pytest.raises(UnsupportedConfiguration, match=r"data \(TensorDataset\) of Given must be a plain value"):
        paramserver.run(Given(DATA), config(tmp_path, "run", mode=mode))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variables", [{"TORCHELASTIC_RUN_ID": "none"}, {}])
def test_a_program_that_torchrun_starts_several_times_is_refused_where_it_starts_ranks_itself(
    tmp_path, monkeypatch, variables
):
    for name, value in {**variables, "RANK": "1", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    config = {"task": "examples/quickstart/task.py:Sine", "mode": "rpc", "training": {"max_steps": 1}}
    with pytest.raises(UnsupportedConfiguration, match="this process is one of several"):
        paramserver.run(None, config, logging={"run_dir": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []
    result = paramserver.run(None, config, mode="local", logging={"run_dir": str(tmp_path), "tensorboard": False})
    assert result.status == "completed"  # such as one of a search


def test_an_argument_of_an_instance_cannot_be_given_another_value(tmp_path):
    for given in (
        {"task_args": {"lr": 0.3}},
        {"overrides": {"task_args.lr": 0.3}},
        {"overrides": ["task_args.lr=0.3"]},
    ):
        with pytest.raises(UnsupportedConfiguration, match=r"task_args.lr \(0.3\) must be what the instance of Given"):
            paramserver.run(Given(DATA, lr=0.2), config(tmp_path, "run"), **given)
    with pytest.raises(
        UnsupportedConfiguration, match=r"task_args.data \(\[1, 2\]\) must be what the instance of Given"
    ):
        paramserver.run(Given(DATA), config(tmp_path, "run"), task_args={"data": [1, 2]})
    assert list(tmp_path.iterdir()) == []
    paramserver.run(Given(DATA, lr=0.2), config(tmp_path, "run"), task_args={"lr": 0.2})


def test_sections_override_the_config_and_overrides_override_both(tmp_path):
    given = config(tmp_path, "run", mode="rpc", steps=9)
    result = paramserver.run(
        Given(DATA),
        given,
        mode="local",
        training={"max_steps": 5, "validate_every": 0},
        task_args={"lr": 0.2},
        seed=3,
        overrides={"training.max_steps": 4, "checkpoint.best": None},
    )
    stored = yaml.safe_load((result.run_dir / "config.yaml").read_text())
    training = stored["training"]
    assert (stored["mode"], stored["seed"]) == ("local", 3)
    assert (training["max_steps"], training["validate_every"], training["batch_size"]) == (4, 0, 8)
    assert given == config(tmp_path, "run", mode="rpc", steps=9), "the mapping of the caller is as it was"
    again = paramserver.run(Given(DATA), resume=result.run_dir, overrides={"training.max_steps": 6}, seed=3)
    assert again.summary["steps"] == 6


def test_a_section_among_the_overrides_is_one_as_of_set(tmp_path):
    for name, overrides in (("a", {"training": {"batch_size": 16}}), ("b", ["training={batch_size: 16}"])):
        assert paramserver.run(Given(DATA), config(tmp_path, name), overrides=overrides).summary["samples"] == 4 * 16
    values = {"checkpoint": {"best": {"metric": "loss", "mode": "min"}, "every": 5}}
    _assign(values, "checkpoint.best", {"metric": "accuracy"})  # may be null: it is one value
    assert values == {"checkpoint": {"best": {"metric": "accuracy"}, "every": 5}}
    values = {"task_args": {"at": {0: 0.1, 10: {0: 1}}}}
    _assign(values, "task_args.at.0", 0.5)
    _assign(values, "task_args.at.10.0", 2)
    assert values == {"task_args": {"at": {0: 0.5, 10: {0: 2}}}}


def test_a_file_is_checked_with_the_rest_of_the_call(tmp_path):
    file, values = tmp_path / "config.yaml", config(tmp_path, "run")
    file.write_text(yaml.safe_dump({**values, "training": {**values["training"], "patience": 3, "validate_every": 2}}))
    with pytest.raises(UnsupportedConfiguration, match=r"training\.patience \(3\) must have a metric to watch"):
        paramserver.run(Given(DATA), file)
    assert paramserver.run(Given(DATA), file, training={"patience": None}).summary["steps"] == 4
    file.write_text("training:\n  max_step: 3\n")
    with pytest.raises(UnsupportedConfiguration, match=r"config\.yaml:2: training\.max_step is not a key"):
        paramserver.run(Given(DATA), file)


def test_a_name_is_no_task_and_a_text_no_list():
    with pytest.raises(UnsupportedConfiguration, match=r"task \('task\.py:Line'\) must be a class derived from"):
        paramserver.run("task.py:Line")
    with pytest.raises(UnsupportedConfiguration, match=r"overrides \('seed=1'\) must be a list"):
        paramserver.run(Given(DATA), overrides="seed=1")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"trainig": {"max_steps": 3}}, r"trainig.*training"),
        ({"overrides": {"training.max_step": 3}}, r"max_step.*max_steps"),
        ({"training": {"max_steps": "many"}}, r"training\.max_steps"),
        ({"mode": "dpp"}, r"mode \(dpp\)"),
    ],
)
def test_a_wrong_keyword_is_refused_as_in_a_file(tmp_path, keywords, message):
    with pytest.raises(UnsupportedConfiguration, match=message):
        paramserver.run(Given(DATA), {"logging": {"run_dir": str(tmp_path)}}, **keywords)
    assert list(tmp_path.iterdir()) == []


def test_a_result_has_the_model_its_checkpoint_and_the_curves(tmp_path):
    """The task is given objects, which its stored config does not have: the model is built with them again."""
    result = paramserver.run(Given(DATA, lr=0.2), config(tmp_path, "run", steps=8), overrides={"logging.log_every": 2})
    assert result.checkpoint == result.run_dir / "checkpoints" / "step-00000008"
    model = result.model()
    assert not model.training
    assert differing_tensors(model.state_dict(), torch.load(result.checkpoint / "model.pt")) == []
    assert [row["step"] for row in result.metrics("train")] == [2, 4, 6, 8]
    assert result.metrics("train")[-1]["train/loss"] == result.summary["train_loss"]
    assert all(isinstance(row, dict) and len(row) > 3 for row in result.metrics())
    assert result.metrics("validation") == []
    assert differing_tensors(result.model(8).state_dict(), model.state_dict()) == []
    with pytest.raises(paramserver.errors.CheckpointError, match="best"):
        result.model("best")


class ChangesArguments(Given):
    """Its constructor changes what it is given, in place."""

    def __init__(self, options, widths):
        self.lr = options.pop("lr", 0.0)
        widths.append(len(widths))
        self.widths, self.data = widths, DATA

    def training_step(self, model, batch, batch_idx):
        self.log("lr", self.lr)
        self.log("widths", len(self.widths))
        return super().training_step(model, batch, batch_idx)


@pytest.mark.parametrize("way", ["instance", "config"])
def test_a_constructor_that_changes_its_arguments_gets_them_as_they_were_given(tmp_path, way):
    """In each process, in a resumed run, and in what is stored."""
    given = {"options": {"lr": 0.5}, "widths": [7]}
    if way == "instance":
        result = paramserver.run(ChangesArguments(**given), config(tmp_path, "run", steps=2))
        resumed = paramserver.run(ChangesArguments, resume=result.run_dir, overrides={"training.max_steps": 4})
    else:
        result = paramserver.run(ChangesArguments, {**config(tmp_path, "run", steps=2), "task_args": given})
        resumed = paramserver.run(ChangesArguments, resume=result.run_dir, overrides={"training.max_steps": 4})
        assert given == {"options": {"lr": 0.5}, "widths": [7]}
    stored = yaml.safe_load((result.run_dir / "config.yaml").read_text())["task_args"]
    assert stored == {"options": {"lr": 0.5}, "widths": [7]}
    assert {row["log/lr"] for row in resumed.metrics("log") if "log/lr" in row} == {0.5}
    assert {row["widths"] for row in resumed.metrics("log") if "widths" in row} == {2}


class LogsNamesOfRows(Given):
    def on_batch_end(self, batch_idx):
        for name in ("kind", "step", "time", "other"):
            self.log(name, 77.0)


def test_what_a_task_logs_does_not_replace_the_kind_step_and_time_of_a_row(tmp_path):
    rows = paramserver.run(LogsNamesOfRows(DATA), config(tmp_path, "run", steps=2)).metrics("log")
    assert {row["kind"] for row in rows} == {"log"}
    assert {row["step"] for row in rows} == {1, 2}
    logged = {name: value for row in rows for name, value in row.items() if value == 77.0}
    assert logged == dict.fromkeys(("log/kind", "log/step", "log/time", "other"), 77.0)


def test_a_result_without_a_checkpoint_has_none(tmp_path):
    assert paramserver.Result(tmp_path, {"checkpoint": None}).checkpoint is None


class NoNumber(Given):
    def validation_source(self, partition):
        return self.data

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        return {"loss": 1.0, "corr": torch.tensor(float("nan"))}


def test_the_curves_have_what_is_not_finite(tmp_path):
    result = paramserver.run(NoNumber(DATA), config(tmp_path, "run"), overrides={"training.validate_every": 2})
    rows = result.metrics("validation")
    assert len(rows) == 2
    for row in rows:
        assert math.isnan(row["valid/corr"])
        assert row["valid/loss"] == 1.0
        assert "valid/corr_text" not in row


def test_the_waits_for_data_are_those_of_the_last_session(tmp_path):
    """Also in a resumed run, whose buffer counts them from the beginning of the run."""
    first = paramserver.run(Slow(DATA, lr=0.05), config(tmp_path, "run", steps=2))
    assert first.summary["trainers"][0]["data_wait_share"] > 0.5
    again = paramserver.run(
        Slow(DATA, lr=0.0), resume=first.run_dir, overrides=["training.max_steps=4", "task_args.lr=0.0"]
    )
    assert again.summary["buffer"]["gets"] == 16
    assert again.summary["buffer"]["get_wait_s"] < 0.5 < 0.8 <= first.summary["buffer"]["get_wait_s"]


class Slow(Given):
    """Its samples take ``lr`` seconds each."""

    def train_source(self, partition):
        for sample in self.data:
            time.sleep(self.lr)
            yield sample

"""docs/own-trainers.md: each member that it names can be overridden or used, and each test that it names exists."""

import ast
import re
from pathlib import Path

import pytest
from launching import differing_tensors, launch, resume, train
from own_trainers import METHODS

import paramserver
from paramserver import ParameterServer, Task, trainers

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own-trainers.md").read_text()
OWN = Path(__file__).parents[1] / "helpers" / "own_trainers.py"
STEPS, BATCHES = 4, 3


def rows(name):
    """The cells of a table of the page."""
    table = PAGE.partition(f"<!-- table: {name} -->\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def counts(finished):
    """What each trainer logged, by trainer and name."""
    return {(record["trainer"], record["name"]): record["value"] for record in finished.of_kind("log")}


def run_with(folder, mode, trainer, **config):
    """A run of few steps of several batches, by an own trainer."""
    training = {"max_steps": STEPS, "accumulate_batches": BATCHES, "validate_every": 0}
    return train(folder, mode, 2, trainer=f"{OWN}:{trainer}", training=training, **config)


def check_counts(found):
    for trainer in (0, 1):
        seen = {name: found[trainer, name] for name in METHODS}
        assert (seen["init_connection"], seen["on_after_setup_optimizers"]) == (1, 1)
        assert seen["data_available"] >= STEPS
        assert seen["on_before_backward"] == seen["on_after_backward"] == STEPS * BATCHES
        assert seen["on_before_forward"] > STEPS * BATCHES  # in validation too
        assert seen["block_backward_sync"] == STEPS * (BATCHES - 1)
        assert found[trainer, "state_is_standard"] == found[trainer, "unwrapped_is_the_model"] == 1


@pytest.mark.processes
def test_every_member_of_the_plugin_is_called_in_ddp(tmp_path):
    found = counts(run_with(tmp_path, "ddp", "OwnDdp", ddp={"extra": {"broadcast_buffers": False}}))
    check_counts(found)
    for trainer in (0, 1):
        assert (found[trainer, "configure_ddp"], found[trainer, "no_device_ids"]) == (1, 1)
        assert found[trainer, "broadcast_buffers"] == 0  # from ddp.extra
        assert found[trainer, "group_is_the_world"] == 1
        assert found[trainer, "is_single_process_per_device"] >= STEPS * BATCHES


@pytest.mark.processes
@pytest.mark.parametrize("trainer", ["WrapsInstead", "WrapsInside"])
def test_a_model_in_several_wrappers_is_stored_by_its_own_names_and_resumes(tmp_path, trainer):
    config = {"task_args": {"batch_norm": False}, "training": {"max_steps": 4}}
    plain = train(tmp_path / "plain", "ddp", 2, **config)
    wrapped = train(tmp_path / "wrapped", "ddp", 2, trainer=f"{OWN}:{trainer}", **config)
    assert differing_tensors(plain.load("model"), wrapped.load("model")) == []
    assert resume(wrapped, "--set", "training.max_steps=6").code == 0


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["ddp", "rpc"])
def test_a_stop_that_data_available_requests_once_is_kept(tmp_path, mode):
    training = {"max_steps": 12, "validate_every": 3, "batch_size": 8}
    finished = train(tmp_path, mode, 2, trainer=f"{OWN}:Stops{mode.capitalize()}", training=training)
    assert (finished.summary["reason"], finished.summary["steps"] < 8) == ("it is enough", True)


@pytest.mark.processes
def test_the_members_that_are_for_every_mode_are_called_in_rpc(tmp_path):
    found = counts(run_with(tmp_path, "rpc", "OwnRpc"))
    check_counts(found)
    assert found[0, "group_is_the_world"] == 0


@pytest.mark.processes
def test_a_padded_partition_serves_as_many_samples_as_a_distributed_sampler(tmp_path):
    config = {"task_args": {"samples": 51}, "training": {"max_epochs": 1, "batch_size": 13}}
    padded = train(tmp_path / "padded", "ddp", 2, trainer=f"{OWN}:PaddedDdp", **config)
    assert (padded.summary["samples"], padded.summary["samples_left"]) == (52, 0)


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "trainer"), [("ddp", "OwnRpc"), ("rpc", "OwnDdp"), ("local", "OwnDdp")])
@pytest.mark.parametrize("flags", [[], ["--dry_run"]])
def test_a_trainer_of_another_mode_is_refused_at_once(tmp_path, mode, trainer, flags):
    done = launch(tmp_path, *flags, mode=mode, trainer=f"{OWN}:{trainer}", timeout_s=40)
    assert done.code == 2
    assert f"is for mode {trainer[3:].lower()}, and the config has {mode}; derive it" in done.output
    assert "Traceback" not in done.output


@pytest.mark.processes
@pytest.mark.claim("users-trainers")
@pytest.mark.parametrize(
    ("mode", "compute"), [("rpc", "trainer"), ("rpc", "server"), ("ddp", "trainer"), ("local", "trainer")]
)
def test_a_folder_of_the_user_named_trainers_is_the_one_that_the_task_imports(tmp_path, mode, compute):
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "net.py").write_text("WIDTH = 3\n")
    task = "from tasks import ReferenceTask\nfrom trainers.net import WIDTH\nassert WIDTH == 3\n"
    (tmp_path / "task.py").write_text(f"{task}class Own(ReferenceTask): pass\n")
    server = {"compute": compute} if mode == "rpc" else {}
    done = launch(tmp_path, mode=mode, task="task.py:Own", server=server, training={"max_steps": 2})
    assert (done.code, done.summary["steps"]) == (0, 2), done.output
    assert "paramserver.trainers" not in done.output


@pytest.mark.processes
@pytest.mark.claim("old-trainers-import")
@pytest.mark.parametrize("mode", ["rpc", "ddp", "local"])
def test_a_trainer_that_is_derived_by_the_former_name_trains_and_one_line_names_the_new_one(tmp_path, mode):
    own = (
        f"from trainers import RpcTrainer\nfrom trainers.{mode} import RpcTrainer as Same\nassert Same is RpcTrainer\n"
    )
    (tmp_path / "own.py").write_text(f"{own}class Own(RpcTrainer): pass\n".replace("Rpc", mode.capitalize()))
    done = launch(tmp_path, mode=mode, trainer="own.py:Own", training={"max_steps": 2})
    assert (done.code, done.summary["steps"]) == (0, 2), done.output
    assert done.output.count("trainers is now paramserver.trainers") == 1
    assert done.log(1 if mode == "rpc" else 0).count("trainers is now paramserver.trainers") == 1


@pytest.mark.sampled(1)
@pytest.mark.processes
@pytest.mark.parametrize(("mode", "trainers"), [("local", 1), ("ddp", 2), ("rpc", 2)])
def test_what_a_trainer_adds_to_its_part_of_a_checkpoint_is_given_back_at_a_resume(tmp_path, mode, trainers):
    trainer = f"{OWN}:StoresMore{mode.capitalize()}"
    begun = train(tmp_path, mode, trainers, trainer=trainer, training={"max_steps": 2})
    assert {value for (_, name), value in counts(begun).items() if name == "restored"} == {0}
    more = resume(begun, "--set", "training.max_steps=4")
    assert more.code == 0, more.output
    found = {trainer: value for (trainer, name), value in counts(more).items() if name == "restored"}
    assert found == {index: 7 + index for index in range(trainers)}


@pytest.mark.processes
@pytest.mark.parametrize(("trainer", "compute"), [("WrapsRpc", "trainer"), ("WrapsServed", "server")])
def test_an_optimizer_that_a_trainer_puts_in_place_of_its_own_is_stepped(tmp_path, trainer, compute):
    options = {"trainer": f"{OWN}:{trainer}", "server": {"compute": compute}, "training": {"max_steps": STEPS}}
    found = counts(train(tmp_path, "rpc", 2, **options))
    assert [found[index, "stepped"] for index in (0, 1)] == [STEPS, STEPS]


@pytest.mark.parametrize("table", ["plugin", "tutorial"])
def test_the_names_and_tests_of_a_table_exist(table):
    found = rows(table)
    assert len(found) >= 13
    for there, here, test in found:
        for owner, member in re.findall(r"`(\w*Trainer|Task|ParameterServer)\.(\w+)`", here):
            classes = [cls for cls in (getattr(trainers, owner, None), Task, ParameterServer) if cls is not None]
            assert any(cls.__name__ == owner and hasattr(cls, member) for cls in classes), here
        for name in re.findall(r"`paramserver\.(\w+)`", here):
            assert name in paramserver.__all__
        file, name = re.fullmatch(r'\[test\]\(\.\./(\S+) "(\w+)"\)', test).groups()
        defined = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}
        assert name in defined, f"{there}: {file}::{name}"


def test_the_members_that_may_be_overridden_are_those_that_are_tested():
    contract = (ROOT / "docs" / "interface.md").read_text()
    named = contract.partition("These may be overridden:")[2].partition("These are there to be used:")[0]
    members = re.findall(r"`(\w+)(?:\([\w, ]*\))?`", named)
    assert sorted(members) == sorted([*METHODS, "configure_ddp", "sampler_kwargs", "is_single_process_per_device"])
    assert [name for name in members if not hasattr(trainers.DdpTrainer, name)] == []


@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_hooks_of_the_optimizer_change_what_checkpoints_store(tmp_path, mode):
    options = {"task": "MarksState", "mode": mode, "training": {"max_steps": 4}}
    done = launch(tmp_path, **options)
    assert done.code == 0, done.output
    assert done.load("optimizer")["param_groups"][0]["saved_by"] == "hook"
    resumed = launch(tmp_path, "--resume", done.run_dir, "--set", "training.max_steps=6", **options)
    assert resumed.code == 0, resumed.output

"""Every key against its own rule, with cases made from the schema: a new key is tested without a new test."""

import dataclasses
import re
import types
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from paramserver.config import KEYS, SECTIONS, Config, config_from_mapping, load_config
from paramserver.config.layers import _NAMED_ELSEWHERE, Key, unknown_key_message
from paramserver.config.parsing import check_value
from paramserver.config.schema import BUFFERS, CONSISTENCIES, OUTER_OPTIMIZERS, Rule, format_value
from paramserver.errors import UnsupportedConfiguration

# Every key with its default.
CONTRACT = """
task: null
task_args: {}
trainer: null
mode: rpc
seed: 0
init_from: null
cluster: {num_servers: null, num_trainers: 2, colocate: false, master_addr: 127.0.0.1, master_port: 0,
          interface: null, backend: auto, timeout_s: 60, stop_within_s: 15, max_restarts: 3, spares: 0, elastic: false,
          token_file: null}
device: {kind: auto, server: auto, num_gpus: null, share_gpus: false}
training: {max_epochs: null, max_steps: null, max_samples: null, max_seconds: null, patience: null, min_delta: 0.0,
           batch_size: 32, validation_batch_size: null, accumulate_batches: 1, local_steps: 1, outer: null,
           clip_grad_norm: null, clip_grad_value: null, nonfinite: fail, ema_decay: null, precision: float32,
           validate_every: 100, uneven_inputs: stop, loader_workers: 0}
server: {consistency: sync, staleness_bound: 4, backup_trainers: 0, arrivals: 1, dynamic_local_steps: false,
         stale_scaling: none, compute: trainer, transport: auto, wire_dtype: null, compression: none,
         compression_block: 256, bucket_mb: null, lost_after_s: 5.0, on_loss: continue}
ddp: {shared_memory: auto, comm_hook: none, extra: {}}
buffer: {kind: fifo, capacity: 4096, watermark: 0, pseudo_epochs: 1, max_bytes: null, min_new_per_batch: 0,
         max_staleness: null}
simulations: null
publish: null
checkpoint: {every: null, keep: 3, best: null, background: true, memory_every: null, memory_folder: /dev/shm}
logging: {run_dir: runs, name: null, log_every: 10, tensorboard: true, sinks: [], prometheus_port: null,
          progress: auto}
profile: null
"""

# Values of other types than each kind, which no conversion accepts.
FOREIGN = {
    "int": [True, "32", "many", 1.5, [1], {"a": 1}, "1e-3", float("inf"), float("nan")],
    "float": [True, "0.5", "much", [0.5], float("inf"), float("nan"), 10**400],
    "bool": [0, 1, "true", "yes", [True]],
    "str": [3, True, 0.5, ["a"], {"a": 1}, "", "  "],
    "list": [3, "csv", True, [1], {"csv": 1}],
    "mapping": [3, "text", [1], {1: 2}],
}


def of_each_section(condition=lambda rule: True):
    """Parametrize a test with the keys of each section whose rule meets the condition."""
    found: dict[str, list[Key]] = {}
    for key in KEYS.values():
        if condition(key.rule):
            found.setdefault(key.name.rpartition(".")[0] or "top", []).append(key)
    return pytest.mark.parametrize("keys", found.values(), ids=list(found))


def refusal(key: Key, value) -> str:
    """The message for ``value``; its shape is asserted: place, name, value, rule and cure, in one line."""
    with pytest.raises(UnsupportedConfiguration) as caught:
        check_value(key.name, key.rule, value, "digits.yaml:7")
    message = str(caught.value)
    assert re.fullmatch(rf"digits\.yaml:7: {re.escape(key.name)} \(.*\) must .+; .+", message), message
    return message


def test_every_key_of_the_contract_exists_with_its_default():
    assert Config().to_mapping() == yaml.safe_load(CONTRACT)


def test_keys_and_sections_have_distinct_names_in_the_order_of_the_dataclasses():
    assert not set(KEYS) & set(SECTIONS)
    assert next(iter(KEYS)) == "task"
    assert {name.rpartition(".")[0] for name in KEYS} == {"", *SECTIONS}


@of_each_section()
def test_a_default_keeps_the_rule_of_its_key(keys):
    for key in keys:
        if not key.required:
            converted = check_value(key.name, key.rule, key.default)
            assert (converted, type(converted)) == (key.default, type(key.default))


@of_each_section()
def test_the_rule_has_the_type_of_the_annotation(keys):
    for key in keys:
        owner = Config
        for part in key.name.split(".")[:-1]:
            owner = next(f for f in dataclasses.fields(owner) if f.name == part).metadata["section"]
        annotation = typing.get_type_hints(owner)[key.name.rpartition(".")[2]]
        members = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
        named = {typing.get_origin(member) or member for member in members}
        expected = {"int": int, "float": float, "bool": bool, "str": str, "list": tuple, "mapping": dict}[key.rule.kind]
        assert named == ({expected, type(None)} if key.rule.nullable else {expected})


@of_each_section()
def test_another_type_is_refused(keys):
    for key in keys:
        accepted = {True} if "on" in key.rule.choices else set()
        for value in FOREIGN[key.rule.kind]:
            if not (isinstance(value, bool) and value in accepted):
                refusal(key, value)


@of_each_section()
def test_null_is_accepted_where_the_rule_is_nullable(keys):
    for key in keys:
        if key.rule.nullable:
            assert check_value(key.name, key.rule, None) is None
        elif key.rule.kind in ("mapping", "list"):
            assert not check_value(key.name, key.rule, None)
        else:
            assert "(null)" in refusal(key, None)


@of_each_section(lambda rule: rule.minimum is not None)
def test_a_minimum_is_accepted_and_one_less_is_not(keys):
    for key in keys:
        assert check_value(key.name, key.rule, key.rule.minimum) == key.rule.minimum
        assert f"must be at least {key.rule.minimum};" in refusal(key, key.rule.minimum - 1)


@of_each_section(lambda rule: rule.maximum is not None)
def test_a_maximum_is_accepted_and_one_more_is_not(keys):
    for key in keys:
        assert check_value(key.name, key.rule, key.rule.maximum) == key.rule.maximum
        assert f"must be at most {key.rule.maximum};" in refusal(key, key.rule.maximum + 1)


@of_each_section(lambda rule: rule.above is not None)
def test_an_excluded_bound_is_refused_and_a_little_more_is_not(keys):
    for key in keys:
        assert check_value(key.name, key.rule, key.rule.above + 1e-6) == key.rule.above + 1e-6
        assert f"must be above {key.rule.above};" in refusal(key, key.rule.above)


@of_each_section(lambda rule: rule.choices)
def test_each_choice_is_accepted_and_suggested_for_a_similar_word(keys):
    for key in keys:
        for word in key.rule.choices:
            assert check_value(key.name, key.rule, word) == word
        longest = max(key.rule.choices, key=len)
        assert refusal(key, longest + "x").endswith(f"did you mean {longest}?")
        assert refusal(key, "§").endswith(f"must be {key.rule.describe()}; choose one of them")


@of_each_section(lambda rule: rule.pattern)
def test_the_example_of_a_form_keeps_it(keys):
    for key in keys:
        example = yaml.safe_load(key.rule.example) if key.rule.kind == "list" else key.rule.example
        assert check_value(key.name, key.rule, example) == (tuple(example) if key.rule.kind == "list" else example)
        assert refusal(key, "no / \n :").endswith(f"must be {key.rule.form}; write it like {key.rule.example}")


@of_each_section(lambda rule: rule.kind == "float" and rule.maximum is None)
def test_a_float_key_takes_whole_numbers_and_exponents(keys):
    for key in keys:
        for given, expected in [(3, 3.0), ("1e-3", 0.001), ("2.5E+2", 250.0), (".5e1", 5.0)]:
            converted = check_value(key.name, key.rule, given)
            assert type(converted) is float
            assert converted == expected


@of_each_section(lambda rule: rule.kind == "int")
def test_an_int_key_takes_integral_exponents(keys):
    for key in keys:
        for given in (1e3, "1e3", "0.1E4"):
            converted = check_value(key.name, key.rule, given)
            assert type(converted) is int
            assert converted == 1000


def test_a_key_describes_its_default_rule_and_purpose():
    batch_size, server, metric = (KEYS[n] for n in ("training.batch_size", "device.server", "checkpoint.best.metric"))
    assert (batch_size.default, batch_size.rule.describe()) == (32, "a positive whole number")
    assert (server.default, server.rule.describe()) == ("auto", "one of auto, cpu, cuda")
    assert (metric.required, metric.rule.describe()) == (True, "text")
    assert metric.help == "the name of a value that validation_step returns"


def test_on_and_off_are_strings_where_yaml_reads_booleans():
    for given, word in [(True, "on"), (False, "off"), ("on", "on"), ("auto", "auto")]:
        assert config_from_mapping({"task": "a:B", "logging": {"progress": given}}).logging.progress == word


@pytest.mark.parametrize(
    "task", ["digits:Digits", "examples/digits.py:Digits", "/a b/digits.py:Outer.Inner", "__main__:T"]
)
def test_a_task_names_a_class(task):
    assert config_from_mapping({"task": task}).task == task


@pytest.mark.parametrize("name", [".", "..", "a/b", "/a", "../a", "a\0b"])
def test_a_run_cannot_be_named_out_of_its_folder(name):
    with pytest.raises(UnsupportedConfiguration, match=r"logging\.name .* must be the plain name of a folder"):
        config_from_mapping({"task": "a:B", "logging": {"name": name}})


def test_a_path_from_python_is_text():
    assert config_from_mapping({"task": "a:B", "logging": {"run_dir": Path("a/b")}}).logging.run_dir == "a/b"


def test_scalars_of_numpy_are_numbers():
    config = config_from_mapping({"task": "a:B", "seed": np.int64(3), "cluster": {"timeout_s": np.float32(0.5)}})
    assert (config.seed, type(config.seed)) == (3, int)
    assert (config.cluster.timeout_s, type(config.cluster.timeout_s)) == (0.5, float)
    with pytest.raises(UnsupportedConfiguration, match=r"task_args .* not float64; use text, numbers"):
        config_from_mapping({"task": "a:B", "task_args": {"lr": np.float64(0.5)}})


def test_free_dictionaries_are_copied_and_their_tuples_become_lists():
    given = {"sizes": (1, 2), "inner": {"a": [1]}}
    config = config_from_mapping({"task": "a:B", "task_args": given})
    given["inner"]["a"].append(2)
    assert config.task_args == {"sizes": [1, 2], "inner": {"a": [1]}}
    config.to_mapping()["task_args"]["inner"]["a"].append(3)
    assert config.task_args["inner"] == {"a": [1]}


def test_free_dictionaries_hold_what_yaml_can_store():
    endless: dict = {}
    endless["again"] = endless
    rule = Rule("mapping")
    for value, message in [
        ({"a": {1, 2}}, "not set"),
        ({"a": [object()]}, "not object"),
        (endless, "not contain itself"),
    ]:
        with pytest.raises(UnsupportedConfiguration, match=f"task_args .* must .*{message}"):
            check_value("task_args", rule, value)


def test_the_dictionaries_of_two_configs_are_not_shared():
    assert Config().task_args is not Config().task_args


def test_a_config_is_frozen_and_hashable():
    config = Config(task="a:B")
    assert hash(config) == hash(Config(task="a:B"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.training.batch_size = 3


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (None, "null"),
        (True, "true"),
        ("", "''"),
        ("a\nb", r"'a\nb'"),
        ({"a": [1, None], "b": {}}, "{a: [1, null], b: {}}"),
        ([[[[[1]]]]], "[[[[...]]]]"),
    ],
)
def test_values_are_shown_as_yaml_on_one_line(value, line):
    assert format_value(value) == line


def test_long_values_are_cut_in_messages():
    assert format_value("x" * 100, 10) == "xxxxxxx..."
    assert len(refusal(KEYS["mode"], "x" * 10_000)) < 200


PRECISIONS = {
    "bfloat16": ["bf16", "bf16-mixed", "bf16-true", "BF16", "torch.bfloat16", torch.bfloat16, "mixed_bfloat16", "amp"],
    "float16": ["fp16", "f16", "16", 16, "16-mixed", "16-true", "half", "mixed_float16", torch.float16],
    "float32": ["fp32", "32", 32, "32-true", "single", "float", "no", False, torch.float32],
    "tf32": ["tf32", "high"],
    "float64": ["float64", "64", 64, "64-true", "double", torch.float64],
}
PRECISION_CURES = {
    "bfloat16": "write bfloat16, which computes the forward in autocast",
    "float16": "write float16, which computes the forward in autocast and scales the loss",
    "float32": "write float32",
    "tf32": "write float32, and call torch.set_float32_matmul_precision",
    "float64": "write float32, which leaves the forward as it is, and return model.double() from build_model",
}


@pytest.mark.claim("precision-names")
@pytest.mark.parametrize(
    ("meant", "value"), [(meant, value) for meant, values in PRECISIONS.items() for value in values]
)
def test_the_names_of_precisions_in_other_frameworks_are_known(meant, value):
    with pytest.raises(UnsupportedConfiguration) as caught:
        config_from_mapping({"task": "a:B", "training": {"precision": value}})
    assert f"must be one of float32, bfloat16, float16; {PRECISION_CURES[meant]}" in str(caught.value)


@pytest.mark.parametrize(
    ("section", "family"), [("server", CONSISTENCIES), ("training.outer", OUTER_OPTIMIZERS), ("buffer", BUFFERS)]
)
def test_what_some_kinds_have_are_keys_of_their_section(section, family):
    assert {f"{section}.{option}" for options in family.values() for option in options} <= set(KEYS)


@pytest.mark.claim("learning-rate-key")
@pytest.mark.parametrize("place", ["{}", "training.{}", "server.{}", "optimizer.{}"])
@pytest.mark.parametrize("name", ["lr", "learning_rate", "learning-rate", "base_lr"])
def test_a_learning_rate_is_an_argument_of_the_task(place, name):
    key = place.format(name)
    with pytest.raises(UnsupportedConfiguration) as caught:
        load_config(None, overrides=["task=a:B", f"{key}=0.1"])
    assert f"{key} is not a key: the task builds its model, optimizer and data; write task_args.lr," in str(
        caught.value
    )


@pytest.mark.claim("learning-rate-key")
def test_names_of_other_frameworks_point_to_the_key_or_argument_that_exists_here():
    assert "write training.max_epochs" in unknown_key_message("training.num_epochs")
    assert "write training.accumulate_batches" in unknown_key_message("gradient_accumulation_steps")
    assert "write training.clip_grad_norm" in unknown_key_message("trainer.gradient_clip_val")
    assert "write task_args.weight_decay" in unknown_key_message("optimizer.weight_decay")
    for key, others in _NAMED_ELSEWHERE.items():
        assert key in KEYS
        assert all(unknown_key_message(other).endswith(f"write {key}") for other in others), key

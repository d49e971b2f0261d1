"""Loading a config: precedence, --set, refusals, and the round trip through text."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, seed, settings, strategies as st

import paramserver.config
from paramserver.api import run
from paramserver.config import (
    KEYS,
    Config,
    PublishConfig,
    config_from_mapping,
    differences,
    dump_yaml,
    load_config,
    read_dumped,
)
from paramserver.config.checks import value_of
from paramserver.config.schema import BestConfig
from paramserver.errors import UnsupportedConfiguration
from paramserver.task import Task


def nested(name: str, value) -> dict:
    """{"training": {"batch_size": 3}} for ``training.batch_size``."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def refused(mapping: dict, **arguments) -> str:
    mapping = {"task": "a:B", **mapping}
    with pytest.raises(UnsupportedConfiguration) as caught:
        load_config(None, base=mapping, **arguments) if arguments else config_from_mapping(mapping)
    return str(caught.value)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "digits.yaml"
    path.write_text(
        "task: a:B\ntraining: {batch_size: 2, max_steps: 5}\ncheckpoint: {best: {metric: loss, mode: min}}\n"
    )
    return path


def test_flag_over_set_over_file_over_default(file):
    def batch_size(**arguments) -> int:
        return load_config(**arguments).training.batch_size

    override, flag = {"overrides": ["training.batch_size=3"]}, {"flags": {"training.batch_size": 4}}
    assert batch_size(file=None, overrides=["task=a:B"]) == 32
    assert batch_size(file=file) == 2
    assert batch_size(file=file, **override) == 3
    assert batch_size(file=file, **override, **flag) == 4
    assert batch_size(file=file, overrides=["training.batch_size=8", "training.batch_size=9"]) == 9


def test_a_flag_that_was_not_given_changes_nothing(file):
    assert load_config(file, flags={"mode": None, "training.max_steps": None}) == load_config(file)


def test_a_stored_config_replaces_the_file(file):
    stored = load_config(file)
    resumed = load_config(None, base=stored.to_mapping(), overrides=["training.max_steps=9"], flags={"mode": "ddp"})
    assert differences(stored, resumed) == ["mode: rpc -> ddp", "training.max_steps: 5 -> 9"]
    with pytest.raises(ValueError, match="must not be given together"):
        load_config(file, base=stored.to_mapping())
    assert refused({"seed": -1}, overrides=["mode=ddp"]).startswith("the stored config: seed (-1) must be at least 0; ")


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("mode=ddp", "mode", "ddp"),
        ("training.clip_grad_norm=1e-3", "training.clip_grad_norm", 0.001),
        ("training.max_samples=1e6", "training.max_samples", 1_000_000),
        ("training={max_steps: 7}", "training.max_steps", 7),
        ("training={max_steps: 7}", "training.batch_size", 2),
        ("training.max_steps=null", "training.max_steps", None),
        ("training.max_steps=", "training.max_steps", None),
        ("logging.progress=on", "logging.progress", "on"),
        ("logging.name=a=b", "logging.name", "a=b"),
        ("logging.name=0042", "logging.name", "0042"),
        ("logging.name=yes", "logging.name", "yes"),
        ("logging.name=null", "logging.name", None),
        ("task=examples/digits.py:Digits", "task", "examples/digits.py:Digits"),
        ("task_args.width=3", "task_args", {"width": 3}),
        ("task_args.model.width=1e-3", "task_args", {"model": {"width": 0.001}}),
        ("task_args={a: [1, 2]}", "task_args", {"a": [1, 2]}),
        ("ddp.extra.x=1", "ddp.extra", {"x": 1}),
        ("checkpoint.best.metric=accuracy", "checkpoint.best", BestConfig(metric="accuracy", mode="min")),
        ("checkpoint.best={metric: accuracy}", "checkpoint.best", BestConfig(metric="accuracy", mode="max")),
        ("checkpoint.best=null", "checkpoint.best", None),
    ],
)
def test_overrides(file, override, name, value):
    assert value_of(load_config(file, overrides=[override]), name) == value


def test_overrides_build_a_section_that_was_null_and_a_free_dictionary_step_by_step():
    overrides = [
        "task=a:B",
        "checkpoint.best.metric=loss",
        "checkpoint.best.mode=min",
        "task_args.a.b=1",
        "task_args.a.c=2",
    ]
    config = load_config(None, overrides=overrides)
    assert config.checkpoint.best == BestConfig(metric="loss", mode="min")
    assert config.task_args == {"a": {"b": 1, "c": 2}}
    assert load_config(None, overrides=[*overrides, "task_args={}"]).task_args == {}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.batch_sise=3", "training.batch_sise is not a key; did you mean training.batch_size?"),
        ("trainning.batch_size=3", "trainning.batch_size is not a key: batch_size belongs to training; "
         "write training.batch_size"),
        ("trainng.mode=3", "trainng.mode is not a key: mode belongs to checkpoint.best; write checkpoint.best.mode"),
        ("devise.kind=cpu", "devise.kind is not a key; did you mean device.kind?"),
        ("bufer.kind=fifo", "bufer.kind is not a key; did you mean buffer.kind?"),
        ("xyzzy.zzz=3", "xyzzy.zzz is not a key; the keys of a config are task, task_args, trainer, mode, seed, "
         "init_from, cluster, device, training, server, ddp, buffer, simulations, publish, checkpoint, logging, "
         "profile"),
        ("training.batch_size=0", "training.batch_size (0) must be at least 1; give a positive whole number"),
        ("training.batch_size.x=0", "training.batch_size.x is not a key: training.batch_size is a single value; "
         "write training.batch_size: <value>"),
        ("training.batch_size=[", "not valid YAML: while parsing a flow node, expected the node content, but found "
         "'<stream end>'; correct the value, or put it in quotes"),
        ("training={seed: 1, seed: 2}", "seed is given twice, first in line 1; remove one of the two"),
        ("task_args.a.b=3", "task_args.a (1) must be a mapping to hold b; set it as a whole"),
        ("training", "must be key=value; write for example --set training.batch_size=64"),
        ("training..x=3", "must be key=value; write for example --set training.batch_size=64"),
        ("=3", "must be key=value; write for example --set training.batch_size=64"),
    ],
)  # fmt: skip
def test_an_override_is_refused_by_its_own_text(override, message):
    assert refused({"task_args": {"a": 1}}, overrides=[override]) == f"--set {override}: {message}"


def test_a_flag_is_refused_by_its_name():
    message = refused({}, flags={"cluster.master_port": 70000})
    assert message.startswith("--master_port: cluster.master_port (70000) must be at most 65535; ")


@pytest.mark.claim("wire-dtype")
def test_a_type_of_the_wire_that_is_stored_counts_as_null_and_one_that_is_asked_for_does_not(tmp_path):
    file = tmp_path / "config.yaml"

    def read(text, **arguments):
        file.write_text(f"task: a:B\n{text}")
        return load_config(file, **arguments).server.wire_dtype

    assert read("") is None
    for asked in ("float32", "bfloat16", "float16"):
        assert read(f"server: {{wire_dtype: {asked}}}") == asked
    assert read("server: {wire_dtype: float32, bucket_mb: 1.0}", stored=True) is None
    assert read("server: {wire_dtype: bfloat16}", stored=True) == "bfloat16"
    assert read("server: {wire_dtype: null}", stored=True) is None
    assert read("server: {wire_dtype: float32}", stored=True, overrides=["server.wire_dtype=float32"]) == "float32"
    with pytest.raises(UnsupportedConfiguration, match=r"config\.yaml:2: server \(3\) must be a section"):
        read("server: 3", stored=True)


def test_an_empty_section_is_there_with_its_defaults_unless_it_needs_a_key():
    assert load_config(None, base={"task": "a:B"}).publish is None
    assert load_config(None, base={"task": "a:B", "publish": {}}).publish == PublishConfig()
    assert load_config(None, base={"task": "a:B"}, overrides=["publish={}"]).publish == PublishConfig()
    config = load_config(None, base={"task": "a:B", "publish": {"port": 5000}}, overrides=["publish={}"])
    assert config.publish == PublishConfig()
    assert load_config(None, base={"task": "a:B", "publish": {}}, overrides=["publish=null"]).publish is None
    assert "checkpoint.best ({}) must be a section of keys" in refused({"checkpoint": {"best": {}}})


def test_a_stored_config_is_not_changed_by_an_override():
    stored = {"task": "a:B", "task_args": {"model": {"width": 1}}}
    config = load_config(None, base=stored, overrides=["task_args.model.width=2"])
    assert config.task_args == {"model": {"width": 2}}
    assert stored["task_args"] == {"model": {"width": 1}}


def test_a_part_of_a_dotted_name_is_the_name_that_is_written_so():
    stored = {"task": "a:B", "task_args": {"at": {0: 0.1, 10: {True: 1}, "3": 2}}}
    overrides = ["task_args.at.0=0.5", "task_args.at.10.true=4", "task_args.at.3=5", "task_args.at.7=6"]
    config = load_config(None, base=stored, overrides=overrides)
    assert config.task_args == {"at": {0: 0.5, 10: {True: 4}, "3": 5, "7": 6}}


def test_from_python_a_message_has_no_origin():
    message = "seed (-1) must be at least 0; give a whole number from 0 to 9223372036854775807"
    assert refused({"seed": -1}) == message


def test_a_value_out_of_range_is_refused():
    assert "must be at least 0" in refused({"server": {"staleness_bound": -1}})
    assert UnsupportedConfiguration.exit_code == 2


ONLINE = {"function": "a:b", "count": 1, "fields": {"u": {"shape": [1]}}}


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"task": None}, "task is missing; give module:Class or path/to/file.py:Class"),
        ({"cluster": {"elastic": True}, "simulations": ONLINE}, "cluster.elastic (True) must be false with "
         "simulations, which send to a fixed number of trainers; set it to false"),
        ({"cluster": {"spares": 2, "max_restarts": 0}}, "cluster.spares (2) must be 0 with cluster.max_restarts (0), "
         "as no rank starts again; set it to 0 or raise cluster.max_restarts"),
        ({"profile": {"start_step": 20}, "training": {"max_steps": 20}}, "profile.start_step (20) must be less than "
         "training.max_steps (20), after which there is no step to trace; lower it"),
        ({"training": {"patience": 3}}, "training.patience (3) must have a metric to watch; set checkpoint.best, for "
         "example to {metric: accuracy, mode: max}"),
        ({"training": {"batch_size": 64}, "buffer": {"capacity": 32}}, "a batch of 64 can never be gathered "
         "from a buffer of 32; raise buffer.capacity or lower training.batch_size"),
        ({"training": {"batch_size": 8, "accumulate_batches": 5}, "buffer": {"capacity": 32}}, "5 batches of 8 for a "
         "step can never be held in a buffer of 32; raise buffer.capacity or lower training.accumulate_batches"),
        ({"buffer": {"capacity": 32, "watermark": 33}}, "a watermark of 33 can never be reached in a buffer of "
         "32; raise buffer.capacity or lower buffer.watermark"),
        ({"buffer": {"min_new_per_batch": 1}}, "buffer.min_new_per_batch (1) must be 0 with buffer.kind fifo; "
         "set it to 0 or choose the reservoir"),
        ({"training": {"batch_size": 32}, "buffer": {"min_new_per_batch": 33, "kind": "reservoir"}},
         "buffer.min_new_per_batch (33) must be at most training.batch_size (32); lower the former"),
        ({"buffer": {"pseudo_epochs": 2, "kind": "reservoir"}}, "buffer.pseudo_epochs (2) must be 1 with the "
         "reservoir, which repeats samples until they are evicted; set it to 1 or choose fifo or firo"),
        ({"buffer": {"max_staleness": 0}, "publish": {"every": 2}}, "buffer.max_staleness (0) must be null without the "
         "section simulations, as no sample has a version of the model then; add the section, or leave it out"),
        ({"buffer": {"max_staleness": 4}, "publish": {"every": 6}, "simulations": {"fields": {"u": [2]}}},
         "buffer.max_staleness (4) must be at least 5 with publish.every (6), or samples of the newest version are too "
         "old before there is another; raise it, or lower publish.every"),
    ],
)  # fmt: skip
def test_relations(mapping, message):
    assert refused(mapping) == message


@pytest.mark.parametrize(
    "mapping",
    [
        {"training": {"patience": 3}, "checkpoint": {"best": {"metric": "accuracy", "mode": "max"}}},
        {"training": {"batch_size": 32}, "buffer": {"capacity": 32, "watermark": 32}},
        {"buffer": {"kind": "reservoir", "min_new_per_batch": 32}},
        {"cluster": {"spares": 2, "max_restarts": 1}},
        {"buffer": {"kind": "firo", "pseudo_epochs": 2}},
        {"buffer": {"max_staleness": 1}, "publish": {"every": 2}, "simulations": {"fields": {"u": [2]}}},
    ],
)
def test_relations_at_their_limits(mapping):
    config_from_mapping({"task": "a:B", **mapping})


@pytest.mark.parametrize(
    ("section", "name", "default", "other", "cure"),
    [
        ("ddp", "find_unused_parameters", False, True, "write it into ddp.extra"),
        ("ddp", "static_graph", False, True, "write it into ddp.extra"),
        ("ddp", "gradient_as_bucket_view", True, False, "write it into ddp.extra"),
        ("ddp", "bucket_cap_mb", None, 25, "write it into ddp.extra, as in ddp.extra: {bucket_cap_mb: ...}"),
        ("server", "heartbeat_s", 1.0, 0.3, "leave it out: it follows from server.lost_after_s"),
    ],
)
def test_a_removed_key_may_be_at_its_default(section, name, default, other, cure):
    """A stored config contains every key that its version had."""
    assert config_from_mapping({"task": "a:B", section: {name: default}}) == Config(task="a:B")
    message = refused({section: {name: other}})
    assert message.startswith(
        f"{section}.{name} ({str(other).lower()}) must not be given: it is no key any more; {cure}"
    )


def test_a_broken_relation_names_the_key_that_was_given_last(file):
    with pytest.raises(UnsupportedConfiguration, match=r"^--set buffer\.capacity=1: a batch of 2 can never"):
        load_config(file, overrides=["buffer.capacity=1"])
    with pytest.raises(UnsupportedConfiguration, match=r"^--set training\.batch_size=10: a batch of 10 can never"):
        load_config(file, overrides=["buffer.capacity=9", "training.batch_size=10"])
    file.write_text("task: a:B\nbuffer: {capacity: 40}\ntraining:\n  batch_size: 9000\n")
    with pytest.raises(UnsupportedConfiguration, match=r"digits\.yaml:4: a batch of 9000 can never"):
        load_config(file, overrides=["training.max_steps=1"])


def test_differences_name_each_value_inside_dictionaries_and_distinguish_types():
    before = Config(task="a:B", task_args={"x": 1, "gone": 2, "same": float("nan"), "deep": {"a": [1]}})
    after = Config(task="a:B", task_args={"x": True, "same": float("nan"), "deep": {"a": [1, 2]}, "new": {}})
    assert differences(before, after) == [
        "task_args.x: 1 -> true",
        "task_args.gone: 2 -> (not given)",
        "task_args.deep.a: [1] -> [1, 2]",
        "task_args.new: (not given) -> {}",
    ]
    best = config_from_mapping({"task": "a:B", "checkpoint": {"best": {"metric": "loss", "mode": "min"}}})
    assert differences(Config(task="a:B"), best) == [
        "checkpoint.best.metric: (not given) -> loss",
        "checkpoint.best.mode: (not given) -> min",
    ]
    assert differences(best, best) == []


# Values that satisfy the relations, for keys that are part of one.
RELATED = {
    "task": st.just("a:B"),
    "profile.start_step": st.just(0),
    "cluster.elastic": st.just(False),
    "cluster.spares": st.just(0),
    "cluster.max_restarts": st.integers(0, 9),
    "training.patience": st.none(),
    "training.clip_grad_value": st.none(),
    "training.nonfinite": st.just("fail"),
    "training.precision": st.sampled_from(["float32", "bfloat16"]),
    "training.outer.delay": st.none(),
    "training.outer.beta2": st.floats(0.0, 0.99),
    "training.outer.momentum": st.none() | st.floats(0.0, 0.99),
    "server.arrivals": st.just(1),
    "server.dynamic_local_steps": st.just(False),
    "server.compression": st.just("none"),
    "ddp.comm_hook": st.just("none"),
    "training.min_delta": st.just(0.0),
    "training.batch_size": st.integers(10, 100),
    "training.accumulate_batches": st.integers(1, 10),
    "buffer.capacity": st.integers(1000, 9000),
    "buffer.watermark": st.integers(0, 1000),
    "buffer.kind": st.sampled_from(["fifo", "firo"]),
    "buffer.min_new_per_batch": st.just(0),
    "buffer.max_staleness": st.none(),
    "server.backup_trainers": st.just(0),
    "server.compute": st.just("trainer"),
    "server.transport": st.sampled_from(["auto", "rpc", "tcp"]),
    "device.server": st.sampled_from(["auto", "cpu"]),
    "simulations.count": st.integers(1, 9),
    "simulations.function": st.none(),
}
WORDS = st.text(max_size=12)
LISTS = st.sampled_from([(), ("csv",), ("csv", "own/sinks.py:Wandb")])
ARGUMENTS = st.dictionaries(WORDS, st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS | st.lists(WORDS))


def values_of(name: str) -> st.SearchStrategy:
    rule = KEYS[name].rule
    if name in RELATED:
        return RELATED[name]
    if rule.choices:
        strategy = st.sampled_from(rule.choices)
    elif rule.kind == "int":
        strategy = st.integers(int(rule.minimum), 2**63 - 1 if rule.maximum is None else int(rule.maximum))
    elif rule.kind == "float":
        above = rule.above is not None
        least = rule.above if above else rule.minimum
        strategy = st.floats(least, rule.maximum, exclude_min=above, allow_infinity=False)
    elif rule.kind == "str":
        strategy = st.just(rule.example) if rule.pattern else WORDS.filter(str.strip)
    else:
        strategy = {"bool": st.booleans(), "mapping": ARGUMENTS, "list": LISTS}[rule.kind]
    return st.none() | strategy if rule.nullable else strategy


@seed(7)
@settings(max_examples=15, deadline=None, database=None)
@given(st.fixed_dictionaries({name: values_of(name) for name in KEYS}), st.booleans())
def test_a_dumped_config_is_read_back_equal(tmp_path_factory, values, best):
    mapping: dict = {}
    for name, value in values.items():
        if best or not name.startswith("checkpoint.best."):
            *sections, leaf = name.split(".")
            inner = mapping
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[leaf] = value
    config = config_from_mapping(mapping)
    file = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    file.write_text(dump_yaml(config), encoding="utf-8")
    assert load_config(file) == config
    assert config_from_mapping(read_dumped(dump_yaml(config))) == config
    assert config_from_mapping(config.to_mapping()) == config
    assert differences(load_config(file), config) == []


def test_every_public_name_is_there_and_no_other():
    for name in paramserver.config.__all__:
        assert getattr(paramserver.config, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = paramserver.config.nothing


def test_config_and_cluster_need_no_torch():
    code = (
        "import sys, paramserver.config as c, paramserver.cluster as k\n"
        "for m in (c, k):\n    for n in m.__all__: getattr(m, n)\n"
        "assert 'paramserver.config.io' in sys.modules and 'paramserver.cluster.resolve' in sys.modules\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3], timeout=60)


@pytest.mark.claim("given-config")
@pytest.mark.parametrize(
    ("merged", "given", "named"),
    [
        ({"seed": -1}, None, "the stored config: seed (-1)"),
        ({"training": {"batch_size": 0}}, {"training": {"batch_size": 0}}, "the given config: training.batch_size (0)"),
        ({"seed": 1, "training": {"batch_size": 0}}, {"seed": 1}, "the stored config: training.batch_size (0)"),
        (
            {"mode": "ddp", "ddp": {"static": True}},
            {"ddp": {"static": True}},
            "the given config: ddp.static is not a key",
        ),
    ],
)
def test_a_message_names_the_given_config_and_the_stored_one_apart(merged, given, named):
    with pytest.raises(UnsupportedConfiguration) as caught:
        load_config(None, base={"task": "a:B", **merged}, given=given)
    assert str(caught.value).startswith(named)


@pytest.mark.claim("given-config")
def test_what_is_given_to_run_is_called_given(tmp_path):
    class Unused(Task):
        def build_model(self): ...
        def build_optimizer(self, model): ...
        def train_source(self, partition): ...
        def training_step(self, model, batch, batch_idx): ...

    for config, message in [
        ({"seed": -1}, r"^the given config: seed \(-1\)"),
        ({"training": {"patience": 3}}, r"^the given config: training\.patience"),
    ]:
        with pytest.raises(UnsupportedConfiguration, match=message):
            run(Unused, {"mode": "local", "logging": {"run_dir": str(tmp_path / "runs")}, **config})

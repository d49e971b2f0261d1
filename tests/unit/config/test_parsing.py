"""YAML files: line numbers, and one sentence for each kind of error."""

import contextlib
import time

import pytest
import yaml
from hypothesis import given, seed, settings, strategies as st

from paramserver.config import config_from_mapping, load_config, parsing
from paramserver.config.parsing import dump, read_dumped, read_text
from paramserver.errors import UnsupportedConfiguration


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """The message for the text of digits.yaml, which is given by a relative name."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "digits.yaml"

    def message(text: str | bytes) -> str:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(UnsupportedConfiguration) as caught:
            load_config(file.relative_to(tmp_path))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return message


LINES = """\
task: digits:Digits

# a comment
training:
  max_steps: 10

  batch_size: 32
task_args:
  width: 3
checkpoint:
  best:
    metric: accuracy
    mode: max
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("batch_size: 32", "batch_size: 0", "7: training.batch_size (0) must be at least 1; give a "
         "positive whole number"),
        ("batch_size: 32", "batch_sise: 3", "7: training.batch_sise is not a key; did you mean training.batch_size?"),
        ("mode: max", "mode: biggest", "13: checkpoint.best.mode (biggest) must be one of min, max; "
         "choose one of them"),
        ("    metric: accuracy\n", "", "12: checkpoint.best.metric is missing; give the name of a value that "
         "validation_step returns"),
        ("training:", "trainning:", "4: trainning is not a key; did you mean training?"),
        ("  best:\n    metric: accuracy\n    mode: max", "  best: 3", "11: checkpoint.best (3) must be a "
         "section of keys; write checkpoint.best.metric and the like"),
        ("  best:\n    metric: accuracy\n    mode: max", "  best: {}", "11: checkpoint.best ({}) must be a section of "
         "keys; write checkpoint.best.metric and the like"),
        ("  width: 3", "  2: 3", "8: task_args ({2: 3}) must have names that are text, not 2; put the name in quotes"),
        ("  max_steps: 10", "  patience: 10\ncheckpoint:\nbuffer:", None),
    ],
)  # fmt: skip
def test_messages_name_file_and_line(refused, old, new, message):
    assert old in LINES
    text = LINES.replace(old, new)
    if message is None:  # two sections of one name
        assert refused(text) == "digits.yaml:12: checkpoint is given twice, first in line 6; remove one of the two"
    else:
        assert refused(text) == f"digits.yaml:{message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size: 3", "batch_size is not a key: batch_size belongs to training; write training.batch_size"),
        ("buffer: {batch_size: 3}", "buffer.batch_size is not a key: batch_size belongs to training; "
         "write training.batch_size"),
        ("capasity: 3", "capasity is not a key; did you mean buffer.capacity?"),
        ("server: {capasity: 3}", "server.capasity is not a key; did you mean buffer.capacity?"),
        ("moed: rpc", "moed is not a key; did you mean mode?"),
        ("device: {xyzzy: 1}", "device.xyzzy is not a key; the keys of device are kind, server, num_gpus, "
         "share_gpus"),
        ("training.batch_size: 3", "training.batch_size must be written as a section: training on a line of its own, "
         "batch_size below it"),
        ("training: 4", "training (4) must be a section of keys; write training.max_epochs and the like"),
        ("logging: {name: no}", "logging.name (false) must be text; put it in quotes"),
        ("training: {patience: 1e-3}", "training.patience (0.001) must be a whole number; "
         "give a positive whole number, or null"),
    ],
)  # fmt: skip
def test_a_wrong_key_is_explained_with_its_line(refused, text, message):
    assert refused(f"task: a:B\n{text}\n") == f"digits.yaml:2: {message}"


def test_a_function_in_place_of_its_name_is_refused_with_how_to_name_it():
    with pytest.raises(UnsupportedConfiguration, match=r"function .* must be text; write path/to/file.py:dump$"):
        config_from_mapping({"simulations": {"function": dump}})


def test_a_key_similar_to_none_lists_all(refused):
    assert refused("xyzzy: 3").startswith(
        "digits.yaml:1: xyzzy is not a key; the keys of a config are task, task_args, "
    )
    assert refused("1: 3").startswith("digits.yaml:1: 1 is not a key; ")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("task: a:B\nmode: [\n", 3, "not valid YAML: while parsing a flow node, expected the node content"),
        ("task: a:B\nmode: rpc: ddp\n", 2, "not valid YAML: mapping values are not allowed here; correct this line"),
        ("task: a:B\ntraining:\n\tmax_steps: 3\n", 3, r"not valid YAML: while scanning for the next token"),
        ("task: *unknown\n", 1, "not valid YAML: found undefined alias 'unknown'"),
        ("task: a:B\n--- \ntask: b:C\n", 2, "not valid YAML: expected a single document in the stream"),
        (
            "task: a:B\nmode: \x07\n",
            2,
            "not valid YAML: special characters are not allowed (at character 16); remove it",
        ),
        ("task: a:B\nseed: !!int many\n", 2, "many cannot be read as int; correct it, or put it in quotes"),
        ("task: a:B\nseed: !!bool many\n", 2, "many cannot be read as bool; "),
        ("task: a:B\nseed: !!float ''\n", 2, "'' cannot be read as float; "),
        (
            "task: a:B\ntask_args: &me {again: *me}\n",
            2,
            "a value contains itself through an alias (*name); write it out",
        ),
        ("task: a:B\n[1, 2]: 3\n", 2, "a key ([1, 2]) must be text; write lines like mode: rpc"),
        ("task: a:B\n<<: 3\n", 2, "<< must name a mapping; "),
        ("task: a:B\ntask_args:\n  a: 1\n  b: {c: 1, c: 2}\n", 4, "c is given twice, first in line 4; "),
    ],
)
def test_malformed_yaml(refused, text, line, message):
    assert refused(text).startswith(f"digits.yaml:{line}: {message}")


@pytest.mark.parametrize("tag", ["!!python/object:os.system", "!!python/name:os.system", "!mine", "!!set", "!!binary"])
def test_tags_are_refused_unconstructed(refused, tag):
    message = refused(f"task: a:B\ntask_args:\n  x: {tag} {{}}\n")
    assert message.startswith(f"digits.yaml:3: the tag {tag} is not for a config; use plain text, ")


def test_files_that_cannot_be_read(refused, tmp_path):
    assert refused("") == "digits.yaml is empty; give at least task: module:Class"
    assert refused("# nothing\n") == "digits.yaml is empty; give at least task: module:Class"
    assert refused("- a\n") == "digits.yaml ([a]) must be a mapping of keys to values; write lines like mode: rpc"
    assert refused(b"task: \xff") == "digits.yaml is not UTF-8 text (byte 6); save it as UTF-8"
    assert refused("{}").startswith("digits.yaml: task is missing; ")
    assert refused("task_args: " + "[" * 3000) == "digits.yaml: nested too deeply; a config has three levels"
    for file, message in [
        (tmp_path, "is a folder"),
        (tmp_path / "no.yaml", "does not exist"),
        (tmp_path / "a\0b", "cannot"),
    ]:
        with pytest.raises(UnsupportedConfiguration, match=message):
            load_config(file)


def bomb(name: str, levels: int, repeated: str) -> str:
    """Lines in which each value holds the one before it nine times: 9**levels values in all."""
    lines = [f"{name}:", f"  v0: &v0 {repeated}"]
    for level in range(1, levels):
        lines.append(f"  v{level}: &v{level} [{', '.join([f'*v{level - 1}'] * 9)}]")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        bomb("task_args", 8, "[x, x]"),
        bomb("training", 8, "[x, x]"),
        "task_args:\n  x: &x {a: 1, b: 2}\n"
        + "\n".join(
            f"  x{i}: &x{i} {{p: *x{i - 1 or ''}, q: *x{i - 1 or ''}, <<: *x{i - 1 or ''}}}" for i in range(1, 40)
        ),
        f"task_args:\n  x: &x {'long' * 5000}\n  y: [{', '.join(['*x'] * 6)}]",
    ],
)
def test_aliases_that_add_too_much(refused, text):
    """Each refused before the values exist: the first would be 43 million of them."""
    before_s = time.process_time()
    message = refused(f"task: a:B\n{text}\n")
    assert time.process_time() - before_s < 5
    assert message.partition(": ")[2] == (
        "aliases (*name) must add at most 100,000 values and characters; use fewer of them"
    )


def test_aliases_in_use_are_allowed(tmp_path, monkeypatch):
    file = tmp_path / "digits.yaml"
    file.write_text("task: a:B\ntask_args:\n  layers: &l [64, 64]\n  others: {a: *l, b: *l}\n  more: {<<: {c: *l}}\n")
    assert load_config(file).task_args == {
        "layers": [64, 64], "others": {"a": [64, 64], "b": [64, 64]}, "more": {"c": [64, 64]}
    }  # fmt: skip
    monkeypatch.setattr(parsing, "_MAX_REPEATED", 1000)
    file.write_text(f"task: a:B\ntask_args:\n  written: {list(range(1100))}\n")
    assert len(load_config(file).task_args["written"]) == 1100


HUGE_INT = "0x" + "9" * 5000


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", HUGE_INT, "seed (0x999"),
        ("seed", "9" * 5000, "9999"),
        ("seed", "1:" * 5000 + "1", "seed (1:1:"),
        ("seed", "1" * 200 + "e999999", "seed (inf) must be a whole number"),
        ("seed", "'" + "9" * 5000 + "'", "seed (999"),
        ("training.max_steps", HUGE_INT, "training.max_steps (0x999"),
        ("training", HUGE_INT, "training (0x999"),
        ("cluster.timeout_s", HUGE_INT, "cluster.timeout_s (0x999"),
        ("cluster.timeout_s", "1:" * 300 + "1.5", "cluster.timeout_s (1:1:1"),
        ("task_args.x", HUGE_INT, "task_args ({x: 0x999"),
        ("task_args.x", f"{{? {HUGE_INT} : 1}}", "task_args ({x: {0x999"),
        ("task_args.x", "[" * 60 + "]" * 60, "nested more than 50 levels deep"),
        ("task_args.x", "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("task_args" + ".a" * 30_000, "1", "nested more than 50 levels deep"),
        ("foo" + ".a" * 30_000, "1", "nested more than 50 levels deep"),
        ("task_args", "{a: &a [" + "x," * 999 + "], b: &b [" + "*a," * 999 + "]}", "aliases (*name) must add at most"),
    ],
)
def test_set_of_a_value_that_no_file_could_hold(key, value, message):
    with pytest.raises(UnsupportedConfiguration) as caught:
        load_config(None, overrides=["task=a:B", f"{key}={value}"])
    text = str(caught.value)
    assert text.partition("...: ")[2].startswith(message)
    assert text.startswith(f"--set {key}={value}"[:117])
    assert "\n" not in text
    assert len(text) < 400


def test_values_from_python_that_no_file_could_hold():
    deep: list = []
    for _ in range(60):
        deep = [deep]
    for value, message in ((deep, "must be nested at most 50 levels deep"), (10**5000, "must have at most 600 digits")):
        with pytest.raises(UnsupportedConfiguration, match=message):
            config_from_mapping({"task": "a:B", "task_args": {"x": value}})
    accepted = config_from_mapping({"task": "a:B", "task_args": {"x": 10**600}})
    assert read_text(dump(accepted.to_mapping()), "dump").value["task_args"]["x"] == 10**600


def test_a_whole_number_has_at_most_64_bits():
    assert config_from_mapping({"task": "a:B", "training": {"max_steps": 2**63 - 1}}).training.max_steps == 2**63 - 1
    with pytest.raises(UnsupportedConfiguration, match=r"training.max_steps \(9.*808\) must be at most 9.*807; give"):
        config_from_mapping({"task": "a:B", "training": {"max_steps": 2**63}})


def test_a_byte_order_mark_and_empty_sections_are_harmless(tmp_path):
    file = tmp_path / "digits.yaml"
    file.write_bytes(b"\xef\xbb\xbftask: a:B\ntraining:\ntask_args:\n")
    assert load_config(file) == config_from_mapping({"task": "a:B"})


def test_merged_mappings(tmp_path):
    file = tmp_path / "digits.yaml"
    file.write_text("task: a:B\ntask_args: &t {a: 1, b: 2}\nddp:\n  extra:\n    b: 3\n    <<: [*t, {a: 4, c: 5}]\n")
    assert load_config(file).ddp.extra == {"a": 1, "b": 3, "c": 5}


def test_the_lines_of_merged_keys_are_those_of_the_mapping_that_merges_them():
    document = read_text("a: &a\n  x: 1\n  y: 1\nb:\n  x: 2\n  <<: *a\n", "digits.yaml")
    assert (document.lines[("b", "x")], document.lines[("b", "y")]) == (5, 3)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-2E6", -2e6),
        ("1.5e6", 1.5e6),
        ("'1e-3'", "1e-3"),
        ("2024-01-01", "2024-01-01"),
        ("=", "="),
        ("1_000", 1000),
        ("yes", True),
        ("e3", "e3"),
        ("", None),
    ],
)
def test_scalars(text, value):
    document = read_text(text, "x")
    assert (document.value, type(document.value)) == (value, type(value))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@seed(5)
@settings(max_examples=150, deadline=None, database=None)
@given(PLAIN)
def test_dumped_values_are_read_back_by_every_yaml_reader(value):
    text = dump(value)
    assert read_text(text, "x").value == value
    assert yaml.safe_load(text) == value
    assert read_dumped(text) == value


@pytest.mark.parametrize(
    "text", ["1e-3", "on", "2024-01-01", "a\x85b", "\u2028", "=", "<<", "null", "1:30", " a ", "~", "!x"]
)
def test_text_that_looks_like_something_else_stays_text(text):
    assert read_text(dump({"x": text}), "x").value == read_dumped(dump({"x": text})) == {"x": text}


@seed(6)
@settings(max_examples=300, deadline=None, database=None)
@given(st.text(alphabet="ab:{}[]&*!<>|?-'\"#%@\n\t ,0.1e\x00é~", max_size=24))
def test_no_text_raises_another_error(text):
    with contextlib.suppress(UnsupportedConfiguration):
        read_text(text, "digits.yaml")


@pytest.mark.parametrize("value", ["010", "064", "+07", "1:30", "0_1", "01.5", "1:30.5"])
def test_octal_and_base_60_are_text(value):
    assert read_text(value, "here").value == value
    config = load_config(None, base={"task": "a:B"}, overrides=[f"logging.name={value.replace(':', '-')}"])
    assert config.logging.name == value.replace(":", "-")
    with pytest.raises(UnsupportedConfiguration, match=r"batch_size .*must be a whole number"):
        load_config(None, base={"task": "a:B"}, overrides=[f"training.batch_size={value}"])


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0), ("-5", -5), ("1_000", 1000), ("0x1F", 31), ("0b11", 3), ("0.5", 0.5)]
)
def test_other_numbers_are_numbers(text, value):
    assert read_text(text, "here").value == value


def test_a_value_after_set_that_is_a_comment_is_refused():
    with pytest.raises(UnsupportedConfiguration, match=r"begins with # is a comment.*--set \"logging.name='#7'\""):
        load_config(None, base={"task": "a:B"}, overrides=["logging.name=#7"])
    assert load_config(None, base={"task": "a:B"}, overrides=["logging.name='#7'"]).logging.name == "#7"


def test_a_text_in_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    config = load_config(None, base={"task": "~/x.py:B", "logging": {"run_dir": "~/runs", "name": "~"}})
    assert (config.task, config.logging.run_dir) == ("/home/someone/x.py:B", "/home/someone/runs")
    assert config.logging.name == "~"


def test_a_home_folder_that_is_unknown_is_refused_where_it_is_used(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 2)  # of no user
    refused = r"logging.run_dir \(~/runs\) must not begin with ~: this user has no home folder; set HOME"
    with pytest.raises(UnsupportedConfiguration, match=refused):
        load_config(None, base={"logging": {"run_dir": "~/runs"}})

"""The documents match the code: commands run, flags and keys exist, links have targets.

``python tests/laws/test_documents.py`` regenerates the table of keys in docs/interface.md.
"""

import configparser
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from paramserver import benchmark, chaos, cli, elastic, evaluate, reporting
from paramserver.config import KEYS, SECTIONS, config_from_mapping, describe_keys, load_config
from paramserver.doctor.command import make_parser as make_doctor_parser
from paramserver.launch import make_parser
from paramserver.online.spec import IngestSpec

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
INTERFACE = ROOT / "docs" / "interface.md"
DOCUMENTS = [
    README,
    INTERFACE,
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "clients" / "README.md",
]
DOCUMENTS += [
    ROOT / "docs" / f"{name}.md"
    for name in ("callbacks", "doctor", "lightning", "protocol", "release", "sinks", "torch-notes")
]
DOCUMENTS += sorted((ROOT / "docs" / "coming-from").glob("*.md"))
QUICKSTART = ("examples/quickstart/task.py", "examples/quickstart/config.yaml")
KEYS_BEGIN, KEYS_END = "<!-- keys: begin -->\n", "<!-- keys: end -->\n"


def blocks(text, language):
    """The contents of all fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def marked(marker):
    """The block of the README that follows ``<!-- marker -->``."""
    _, found, rest = README.read_text().partition(f"<!-- {marker} -->\n")
    assert found, f"README.md has no marker {marker}"
    block = re.match(r"```\w+\n(.*?)^```$", rest, flags=re.MULTILINE | re.DOTALL)
    assert block, f"no block follows the marker {marker}"
    return block[1]


def commands(document):
    """The command lines of a document, as words, without comments; ``a && b`` counts as two."""
    lines = [line for block in blocks(document.read_text(), "bash") for line in block.splitlines()]
    parts = [part for line in lines for part in line.split(" && ")]
    return [words for part in parts if (words := shlex.split(part, comments=True))]


def launches(document):
    """What follows ``paramserver.launch`` in each command that has it."""
    found = [words for words in commands(document) if "paramserver.launch" in words]
    return [words[words.index("paramserver.launch") + 1 :] for words in found]


# The task in 20 lines.


@pytest.mark.parametrize("file", QUICKSTART)
def test_the_quickstart_is_the_example(file):
    assert marked(f"file: {file}") == (ROOT / file).read_text()


def test_the_task_has_20_lines():
    assert len(marked(f"file: {QUICKSTART[0]}").splitlines()) <= 20


def run_python(arguments, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which the README's task was trained, in one process, under the name that the README gives."""
    folder = tmp_path_factory.mktemp("quickstart")
    for file in QUICKSTART:
        (folder / Path(file).name).write_text(marked(f"file: {file}"))
    launch = ["-m", "paramserver.launch", "--config", "config.yaml", "--mode", "local"]
    run_python([*launch, "--set", "logging.name=sine", "--set", "logging.tensorboard=false"], folder)
    return folder


@pytest.mark.processes
def test_the_quickstart_learns(trained):
    summary = yaml.safe_load((trained / "runs" / "sine" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["steps"] == 30 * 1024 // 32
    assert summary["train_loss"] < 0.1  # the variance of a sine is 0.5


@pytest.mark.processes
def test_a_checkpoint_loads_into_plain_pytorch(trained):
    lines = marked("run: checkpoint")
    assert "paramserver" not in lines
    assert len([line for line in lines.splitlines() if line and "import" not in line]) == 5
    probe = "x = torch.linspace(-3, 3, 1024).unsqueeze(1)\nprint(((model(x) - torch.sin(2 * x)) ** 2).mean().item())\n"
    counts = "print(*{int(state['step']) for state in optimizer.state.values()})\n"
    loss, steps = run_python(["-W", "error", "-c", lines + probe + counts], trained).stdout.split()
    assert float(loss) < 0.1
    assert int(steps) == 960


def test_python_blocks_are_python():
    found = blocks(README.read_text(), "python")
    assert len(found) >= 4
    for block in found:
        compile(block, "README.md", "exec")


# Commands.


def all_help():
    parsers = [
        make_parser,
        evaluate.make_parser,
        evaluate.make_predict_parser,
        cli.make_keys_parser,
        cli.make_ping_parser,
    ]
    parsers += [make_doctor_parser, elastic.make_join_parser, elastic.make_leave_parser]
    parsers += [reporting.make_parser, chaos.make_parser, benchmark.make_parser, benchmark.make_compare_parser]
    return "".join(make().format_help() for make in parsers)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_flags_exist(document):
    flags = {word for words in launches(document) for word in words if word.startswith("--")}
    flags |= set(re.findall(r"`(--\w+)", document.read_text()))
    helped = all_help()
    assert flags <= set(re.findall(r"--\w+", helped))
    assert document != README or {"--config", "--rank", "--world_size", "--mode", "--set", "--resume"} <= flags


def test_every_flag_is_in_the_contract():
    helped = all_help()
    assert set(re.findall(r"--\w+", helped)) - {"--help"} <= set(re.findall(r"--\w+", INTERFACE.read_text()))


def test_launch_commands_parse_and_their_configs_load():
    found = launches(README)
    assert len(found) >= 6
    for words in found:
        arguments = make_parser().parse_args(words)
        file = ROOT / (arguments.config or QUICKSTART[1])  # --resume alone resumes the run of the quickstart
        load_config(file, overrides=arguments.overrides, flags={"mode": arguments.mode})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_scripts_that_are_called_exist(document):
    called = {word for words in commands(document) for word in words if word.endswith(".py")}
    called |= set(re.findall(r"`python (\S+\.py)", document.read_text()))
    assert [script for script in sorted(called) if not (ROOT / script).is_file()] == []


def test_ci_takes_the_test_command_from_the_readme():
    lines = marked("ci: test").splitlines()
    assert len(lines) == 1
    install, test = lines[0].split(" && ")
    assert install == 'python -m pip install -c constraints.txt -e ".[test]"'
    assert test == "python -m pytest"
    script = ROOT / ".ci" / "run"
    assert "<!-- ci: test -->" in script.read_text()
    assert "pytest" not in script.read_text()
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)


# Keys.


def key_rows():
    """The table of all keys, from the code."""
    rows = ["| key | default | accepts | what it is for |", "| --- | --- | --- | --- |"]
    for line in describe_keys():
        name, _, rest = line.partition(" = ")
        default, _, rest = rest.partition("  # ")
        accepts, _, purpose = rest.partition(": ")
        rows.append(f"| `{name}` | `{default}` | {accepts} | {purpose} |")
    return "\n".join(rows) + "\n"


def test_the_table_of_keys_is_current():
    text = INTERFACE.read_text()
    table = text[text.index(KEYS_BEGIN) + len(KEYS_BEGIN) : text.index(KEYS_END)]
    assert table == key_rows(), "run: python tests/laws/test_documents.py"
    assert len(table.splitlines()) == len(KEYS) + 2


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_keys_that_are_named_exist(document):
    sections = "|".join(name for name in SECTIONS if "." not in name)
    named = set(re.findall(rf"`((?:{sections})\.[a-z_]+)(?=[`:])", document.read_text()))
    files = {f"{path.stem}{path.suffix}" for path in (ROOT / "paramserver").glob("*.py")} | {"summary.json"}
    assert sorted(named - set(KEYS) - set(SECTIONS) - files) == []


def test_yaml_in_the_contract_is_a_config():
    whole, online = map(yaml.safe_load, blocks(INTERFACE.read_text(), "yaml"))
    assert config_from_mapping(whole).training.max_epochs == 20
    assert IngestSpec.from_config(config_from_mapping({**whole, **online}).simulations).expected_samples == 10_000


# Links and pins.


def anchor(heading):
    """The anchor that a heading gets: lower case, spaces as dashes, other signs left out."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_have_targets(document):
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+://", link):
            continue
        path, _, fragment = link.partition("#")
        target = document if not path else document.parent / path
        assert target.exists(), f"{document.name}: {link}"
        if fragment:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), flags=re.MULTILINE)
            assert fragment in {anchor(heading) for heading in headings}, f"{document.name}: {link}"


def pins(python):
    """Package -> pinned version for a version of Python, from constraints.txt."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    found = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is pinned twice for Python {python}"
            (found[name],) = requirement.specifier
    return found


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_every_requirement_of_an_extra_is_pinned_once(python):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lists = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    requirements = [Requirement(line) for text in lists for line in text.split("\n") if line.strip()]
    pinned = pins(python)
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        if name == "paramserver":
            continue
        assert name in pinned, f"constraints.txt has no {name} for Python {python}"
        assert pinned[name].operator == "=="
        assert pinned[name].version in requirement.specifier


def test_pins_differ_between_versions_of_python_only_where_packages_do():
    old, new = set(pins("3.10")), set(pins("3.11"))
    assert old - new == {
        "async-timeout",
        "exceptiongroup",
        "six",
        "tomli",
    }  # in Python 3.11, or dropped by newer releases
    assert new - old == {"narwhals"}
    assert set(pins("3.12")) == new


def rewrite_table_of_keys():
    text = INTERFACE.read_text()
    before, after = text[: text.index(KEYS_BEGIN) + len(KEYS_BEGIN)], text[text.index(KEYS_END) :]
    INTERFACE.write_text(before + key_rows() + after)


if __name__ == "__main__":
    rewrite_table_of_keys()

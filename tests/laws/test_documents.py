"""The documents match the code: commands run, flags and keys exist, links have targets.

``python tests/laws/test_documents.py`` writes the tables of docs/configuration.md and docs/examples.md.
"""

import argparse
import ast
import configparser
import csv
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import record_tables
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from paramserver._commands import COMMANDS
from paramserver.config import KEYS, SECTIONS, config_from_mapping, load_config
from paramserver.config.schema import format_value
from paramserver.launch import CommandParser
from paramserver.online.spec import IngestSpec
from paramserver.tools.bench import command as benchmark, prediction

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
INTERFACE = DOCS / "interface.md"
CONFIGURATION = DOCS / "configuration.md"
DOCUMENTS = [README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("examples/*/README.md"))]
DOCUMENTS += sorted(DOCS.rglob("*.md"))
QUICKSTART = ("examples/quickstart/task.py", "examples/quickstart/config.yaml")
GALLERY = DOCS / "examples.md"


def blocks(text, language):
    """The contents of all fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def name_of(document):
    """A document as a test is named after it; several are called README.md."""
    return str(document.relative_to(ROOT))


def marked(marker, document=README):
    """The block of a document that follows ``<!-- marker -->``."""
    _, found, rest = document.read_text().partition(f"<!-- {marker} -->\n")
    assert found, f"{document.name} has no marker {marker}"
    block = re.match(r"```\w+\n(.*?)^```$", rest, flags=re.MULTILINE | re.DOTALL)
    assert block, f"no block follows the marker {marker}"
    return block[1]


def commands(document):
    """The command lines of a document, as words, without comments; ``a && b`` counts as two, as srun's ``a : b``."""
    text = document.read_text().replace("\\\n", " ")
    lines = [line for block in blocks(text, "bash") for line in block.splitlines()]
    lines += [line[2:] for block in blocks(text, "console") for line in block.splitlines() if line.startswith("$ ")]
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`((?:python|paramserver) [^`]*--[^`]*)`", outside)
    lines += [line for line in inline if "PATH" not in line]
    parts = [part for line in lines for part in re.split(r" && | & | : |; (?=wait$)", line)]
    return [words for part in parts if (words := shlex.split(part, comments=True))]


def launches(document):
    """What follows ``paramserver.launch`` in each command that has it."""
    found = [words for words in commands(document) if "paramserver.launch" in words]
    return [words[words.index("paramserver.launch") + 1 :] for words in found]


# The task in 20 lines.


def test_the_quickstart_is_the_example():
    for file in QUICKSTART:
        assert marked(f"file: {file}") == (ROOT / file).read_text()
    assert marked(f"file: {QUICKSTART[0]}", DOCS / "index.md") == (ROOT / QUICKSTART[0]).read_text()


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


def launch(fork_server, folder, *words):
    code, output = fork_server.run(words, folder, 120, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert code == 0, output


@pytest.fixture(scope="module")
def trained(tmp_path_factory, fork_server):
    """A folder in which the README's task was trained, in one process, under the name that the README gives."""
    folder = tmp_path_factory.mktemp("quickstart")
    for file in QUICKSTART:
        (folder / Path(file).name).write_text(marked(f"file: {file}"))
    words = ["--config", "config.yaml", "--mode", "local", "--set", "logging.name=sine"]
    launch(fork_server, folder, *words, "--set", "logging.tensorboard=false")
    return folder


@pytest.mark.processes
def test_the_quickstart_learns(trained):
    summary = yaml.safe_load((trained / "runs" / "sine" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["steps"] == 30 * 1024 // 32
    assert summary["train_loss"] < 0.1  # the variance of a sine is 0.5


@pytest.mark.processes
def test_a_checkpoint_loads_into_plain_pytorch(trained):
    lines = marked("run: checkpoint", DOCS / "checkpoints.md")
    assert "paramserver" not in lines
    assert len([line for line in lines.splitlines() if line and "import" not in line]) == 5
    probe = "x = torch.linspace(-3, 3, 1024).unsqueeze(1)\nprint(((model(x) - torch.sin(2 * x)) ** 2).mean().item())\n"
    counts = "print(*{int(state['step']) for state in optimizer.state.values()})\n"
    loss, steps = run_python(["-W", "error", "-c", lines + probe + counts], trained).stdout.split()
    assert float(loss) < 0.1
    assert int(steps) == 960


@pytest.mark.processes
def test_the_readme_continues_that_run(trained, fork_server, tmp_path):
    (resume,) = [words for words in launches(README) if "--resume" in words]
    shutil.copytree(trained, tmp_path / "copy")
    launch(fork_server, tmp_path / "copy", *resume)
    summary = yaml.safe_load((tmp_path / "copy" / "runs" / "sine" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 60 * 1024 // 32)


@pytest.mark.processes
def test_a_run_starts_from_python(trained):
    lines = marked("run: api", DOCS / "start.md").replace('mode="rpc"', 'mode="local"')
    (trained / "api.py").write_text(lines)
    run_dir, loss = run_python(["api.py"], trained).stdout.splitlines()[-1].split()
    assert (trained / run_dir / "summary.json").is_file()
    assert float(loss) < 0.1


def test_a_buffer_works_without_a_run(capsys):
    exec(marked("run: buffers", DOCS / "buffers.md"), {})
    assert capsys.readouterr().out == "2\n"


def test_python_blocks_are_python():
    for document in DOCUMENTS:
        for block in blocks(document.read_text(), "python"):
            compile(block, name_of(document), "exec")


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) < 200


# Commands.

# Flags of pytest, torchrun, SLURM and of programs under examples/ that a text names outside of a command.
OTHER_FLAGS = {"--all_cases", "--kill", "--max_restarts", "--official", "--quick"}


def all_help():
    parsers = [command.make_parser for command in COMMANDS.values()]
    parsers += [prediction.make_parser, benchmark.make_compare_parser]
    return "".join(make().format_help() for make in parsers)


def flags_of_component():
    """The flags of ``torchx run paramserver.components.train``, which needs TorchX to be imported."""
    tree = ast.parse((ROOT / "paramserver" / "components.py").read_text())
    (train,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {f"--{argument.arg}" for argument in train.args.kwonlyargs}


def flags_in(document):
    flags = {word for words in launches(document) for word in words if word.startswith("--")}
    flags |= set(re.findall(r"`(--[\w-]+)", document.read_text()))
    return {f"--{flag[2:].replace('-', '_')}" for flag in flags}


def test_flags_exist():
    exist = set(re.findall(r"--\w+", all_help())) | OTHER_FLAGS | flags_of_component()
    assert {name_of(d): unknown for d in DOCUMENTS if (unknown := flags_in(d) - exist)} == {}
    assert {"--config", "--mode", "--set", "--resume"} <= flags_in(README)
    assert {"--config", "--rank", "--world_size"} <= flags_in(DOCS / "clusters.md")


def test_every_flag_is_in_the_contract():
    helped = set(re.findall(r"--\w+", all_help())) | flags_of_component()
    assert helped - {"--help"} <= set(re.findall(r"--\w+", INTERFACE.read_text()))


class Parsed(BaseException):
    """Raised in place of a return from ``parse_args``, so that a command ends there; no command catches it."""


def parsed(command, words, monkeypatch):
    """What a command of ``paramserver`` reads from its arguments; its own parser refuses them otherwise."""
    for parser in (argparse.ArgumentParser, CommandParser):
        parse_args = parser.parse_args

        def stop(self, args=None, namespace=None, parse_args=parse_args):
            raise Parsed(parse_args(self, args, namespace))

        monkeypatch.setattr(parser, "parse_args", stop)
    with pytest.raises(Parsed) as raised:
        COMMANDS[command].main(words)
    return raised.value.args[0]


def check_config(document, command, arguments):
    """Load the config that a command names; --resume alone resumes the run of the quickstart."""
    file = ROOT / (getattr(arguments, "config", None) or QUICKSTART[1])
    overrides = [text for text in getattr(arguments, "overrides", None) or () if not text.endswith("...")]
    if file.name in ("config.yaml", "task.yaml", "FILE") and not file.is_file():
        return  # the reader's, or one that the page shows
    # `evaluate` and `predict` change the stored config of a run, of which only the command's own keys are known here.
    if command in ("launch", "benchmark", "chaos"):
        load_config(file, overrides=overrides, flags={"mode": getattr(arguments, "mode", None)})


# A word in a command that stands for a value of the reader's.
PLACEHOLDER = re.compile(r"[A-Z_]{1,12}|.*\$.*")
# Programs of others that a document may call; files that they are given must exist.
PROGRAMS = {
    "apt-get",
    "docker",
    "kubectl",
    "make",
    "mypy",
    "podman",
    "ruff",
    "sbatch",
    "srun",
    "torchrun",
    "torchx",
    "wait",
}


def test_every_command_can_be_run(monkeypatch):
    """Its program exists, takes these arguments, and finds the files and the config that it is given."""
    for document, words in ((page, words) for page in DOCUMENTS for words in commands(page)):
        match words:
            case ["python", "-m", "pip", "install", *rest]:
                extras = re.findall(r"\.\[(.*)\]", rest[-1])
                assert set(extras[0].split(",") if extras else ()) <= set(setup_cfg()["options.extras_require"]), words
            case ["python", "-m", "pytest" | "sphinx", *_]:
                pass
            case ["python", "-m", "tests.simulation" | "tests.mutations" | "tests.nightly" as module, *_]:
                path = ROOT / module.replace(".", "/")
                assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
            case ["python", "-m", module, *rest] if module.startswith("tests.measure."):
                source = sources_of(module)
                numbers = {
                    name for call in re.findall(r"parser_of\((.*)\)", source) for name in re.findall(r"(\w+)=", call)
                }
                known = {f"--{name}" for name in numbers} | {"--help"}
                assert [w for w in rest if w.startswith("--") and w not in known and f'"{w}"' not in source] == [], (
                    words
                )
            case ["python", script, *_] if script.endswith(".py"):
                assert (ROOT / script).is_file() or f"# {script}\n" in document.read_text(), words
            case ["bash", script, *_]:
                assert (ROOT / script).is_file(), words
            case ["python3", "-m", "venv", _] | [".", ".venv/bin/activate"]:
                pass
            case _ if {"paramserver", "paramserver.launch"} & {*words} and any(map(PLACEHOLDER.fullmatch, words)):
                pass  # what it stands for is the reader's; flags are checked above
            case _ if "paramserver.launch" in words:
                with monkeypatch.context() as patch:
                    arguments = parsed("launch", words[words.index("paramserver.launch") + 1 :], patch)
                check_config(document, "launch", arguments)
            case ["paramserver", command, *rest] | ["python", "-m", command, *rest] if "=" not in command:
                command = {"reporting": "report"}.get(command.split(".")[-1], command.split(".")[-1])
                with monkeypatch.context() as patch:
                    arguments = parsed(command, rest, patch)
                check_config(document, command, arguments)
            case [program, *rest]:
                assert program in PROGRAMS or program == "(umask", f"{name_of(document)}: {words}"
                files = [word for word in rest if re.fullmatch(r"(?:docs|examples|deploy)/\S+\.\w+", word)]
                assert [file for file in files if not (ROOT / file).is_file()] == []


def sources_of(module):
    """The source of a measuring script, and of those that it takes its parser from."""
    folder = ROOT / "tests" / "measure"
    source = (folder / f"{module.rpartition('.')[2]}.py").read_text()
    others = re.findall(r"from tests\.measure\.(\w+) import", source) + re.findall(
        r"from tests\.measure import (\w+)", source
    )
    return source + "".join((folder / f"{name}.py").read_text() for name in others)


def test_launch_commands_are_among_the_documents():
    assert len(launches(README)) >= 4
    assert sum(len(launches(document)) for document in DOCUMENTS) >= 20


def test_scripts_that_are_called_exist():
    missing = {}
    for document in DOCUMENTS:
        called = {word for words in commands(document) for word in words if word.endswith(".py")}
        called |= set(re.findall(r"`python (\S+\.py)", document.read_text()))
        shown = set(re.findall(r"^# (\S+\.py)$", document.read_text(), flags=re.MULTILINE))  # on the page itself
        missing[name_of(document)] = [script for script in sorted(called - shown) if not (ROOT / script).is_file()]
    assert {name: scripts for name, scripts in missing.items() if scripts} == {}


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


def key_tables():
    """A table of the keys of each section, from the code."""
    tables = {"top level": ["Keys outside of any section.\n"]}
    tables |= {name: [f"{section.help[:1].upper()}{section.help[1:]}.\n"] for name, section in SECTIONS.items()}
    for lines in tables.values():
        lines += ["| key and default | what it is for | accepts |", "| --- | --- | --- |"]
    for key in KEYS.values():
        default = "(required)" if key.required else format_value(key.default)
        section = key.name.rpartition(".")[0] or "top level"
        tables[section].append(f"| `{key.name}`<br>`{default}` | {key.help} | {key.rule.describe()} |")
    return "\n".join("\n".join([f"## {name}\n", *lines, ""]) for name, lines in tables.items())


def between(document, name, text=None):
    """The part of a document that a script writes, between two markers; with ``text``, the document with that part."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, _, rest = document.read_text().partition(begin)
    part, _, after = rest.partition(end)
    return part if text is None else f"{before}{begin}{text}{end}{after}"


def test_the_tables_of_keys_are_current():
    tables = between(CONFIGURATION, "keys")
    assert tables == key_tables(), "run: python tests/laws/test_documents.py"
    rows = re.findall(r"^\| `.*", tables, flags=re.MULTILINE)
    assert len(rows) == len(KEYS)
    assert [row for row in rows if row.count("|") != 4 or "<" in row.replace("<br>", "", 1)] == []
    assert "<!-- keys: begin -->" not in INTERFACE.read_text(), "the keys are listed once, in docs/configuration.md"


def test_keys_that_are_named_exist():
    sections = "|".join(name for name in SECTIONS if "." not in name)
    files = {f"{path.stem}{path.suffix}" for path in (ROOT / "paramserver").glob("*.py")} | {"summary.json"}
    unknown = {}
    for document in DOCUMENTS:
        named = set(re.findall(rf"`((?:{sections})\.[a-z_]+)(?=[`:])", document.read_text()))
        unknown[name_of(document)] = sorted(named - set(KEYS) - set(SECTIONS) - files)
    assert {name: keys for name, keys in unknown.items() if keys} == {}


def test_the_table_of_records_has_each_kind_that_the_package_writes():
    code = "".join(path.read_text() for folder in ("paramserver", "trainers") for path in (ROOT / folder).rglob("*.py"))
    written = set(re.findall(r'(?:make_record|\.record)\(\s*"(\w+)"', code))
    assert written == record_tables.tables().keys() - {"stream"}


def test_yaml_in_the_contract_is_a_config():
    whole, online = map(yaml.safe_load, blocks(INTERFACE.read_text(), "yaml"))
    assert config_from_mapping(whole).training.max_epochs == 20
    assert IngestSpec.from_config(config_from_mapping({**whole, **online}).simulations).expected_for(0, 1) == 10_000


# Examples.


def example_table():
    """What each example shows and how long it takes, from the first lines of its README."""
    rows = ["| example | shows | takes |", "| --- | --- | --- |"]
    folders = [folder for folder in (ROOT / "examples").iterdir() if (folder / "README.md").is_file()]
    for folder in sorted(folders, key=lambda folder: (folder.name != "quickstart", folder.name)):
        title, facts = facts_of(folder)
        shows, takes = facts["Shows"].rstrip("."), facts["Takes"].rstrip(".")
        rows.append(f"| [{title}](../examples/{folder.name}/README.md) | {shows} | {takes} |")
    return "\n".join(rows) + "\n"


def facts_of(folder):
    """The title of an example's README, and its lines Shows, Prints and Takes."""
    title, _, text = (folder / "README.md").read_text().partition("\n\n")
    head = text.partition("\n\n")[0].replace("\n  ", " ")
    facts = dict(re.findall(r"^- \*\*(\w+)\*\*: (\S.*\.)$", head, flags=re.MULTILINE))
    assert list(facts) == ["Shows", "Prints", "Takes"], f"{folder.name}/README.md must begin with these three lines"
    return title.removeprefix("# "), facts


def test_the_gallery_has_every_example():
    assert between(GALLERY, "examples") == example_table(), "run: python tests/laws/test_documents.py"
    folders = [path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert [name for name in sorted(folders) if f"../examples/{name}/README.md" not in GALLERY.read_text()] == []


def test_the_config_of_an_example_is_for_all_modes():
    # A file without a task is read by another program.
    files = [f for f in sorted(ROOT.glob("examples/*/*.yaml")) if "task" in yaml.safe_load(f.read_text())]
    assert len(files) >= 5
    for file in files:
        for mode in ("rpc", "ddp", "local"):
            assert load_config(file, flags={"mode": mode}).mode == mode, name_of(file)


# Figures.


def test_the_figures_are_those_that_the_script_draws(monkeypatch):
    spec = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "figures", script)  # as dataclasses look it up
    spec.loader.exec_module(script)
    drawn = script.figures()
    assert {file.name: file.read_text() for file in script.FOLDER.iterdir()} == drawn, "run: python docs/figures.py"
    shown = "".join(document.read_text() for document in DOCUMENTS)
    assert [name for name in drawn if f"figures/{name})" not in shown] == []


# Results.


def test_the_results_of_the_faults_are_those_that_the_documents_state():
    lines = [line for line in (DOCS / "faults.csv").read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    cells = [cell for row in rows for name, cell in row.items() if name not in ("role", "phase", "fault")]
    assert [cell for cell in cells if "FAILED" in cell or not cell] == []
    ran = sum(cell != "n/a" for cell in cells)
    assert f"| all of {ran} ended as they must |" in README.read_text()
    assert f"| all of {ran}; [" in (DOCS / "measured.md").read_text()


# Links and pins.


def anchor(heading):
    """The anchor that a heading gets: lower case, spaces as dashes, other signs left out."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def links(document):
    """The links of a document that lead to a file or a heading."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+://", link)]


def test_links_have_targets():
    for document, link in ((page, link) for page in DOCUMENTS for link in links(page)):
        path, _, fragment = link.partition("#")
        target = document if not path else document.parent / path
        assert target.exists(), f"{name_of(document)}: {link}"
        if fragment:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), flags=re.MULTILINE)
            assert fragment in {anchor(heading) for heading in headings}, f"{name_of(document)}: {link}"


def setup_cfg():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


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


def test_every_requirement_of_an_extra_is_pinned_once():
    setup = setup_cfg()
    lists = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    requirements = [Requirement(line) for text in lists for line in text.split("\n") if line.strip()]
    pinned_for = {python: pins(python) for python in ("3.10", "3.11", "3.12", "3.13")}
    for (python, pinned), requirement in itertools.product(pinned_for.items(), requirements):
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
    assert new - old == {"narwhals", "roman-numerals"}
    assert set(pins("3.12")) == new


if __name__ == "__main__":
    CONFIGURATION.write_text(between(CONFIGURATION, "keys", key_tables()))
    GALLERY.write_text(between(GALLERY, "examples", example_table()))

"""docs/coming-from: the programs of each page run as they stand there, and train what the page states."""

import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from launching import FinishedRun, differing_tensors, environment, free_port

from paramserver.config import KEYS

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "coming-from"
WITH_PROGRAMS = [page for page in sorted(PAGES.glob("*.md")) if "# before.py" in page.read_text()]
_FILE = re.compile(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ (.*)$", re.MULTILINE)


def run_page(name, folder):
    """Write the files of a page and run its commands; the weights before, and the run after."""
    text = (PAGES / f"{name}.md").read_text().replace("29777", str(free_port()))
    for file, content in _FILE.findall(text):
        (folder / file).write_text(content)
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in _COMMAND.findall(text):
        for _ in range(3):
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=folder,
                env=environment(PATH=tools),
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            # The plain torch program was seen to abort once, in C++ and with this message; the cause is not known.
            if "paramserver" in command or "terminate called without an active exception" not in done.stderr:
                break
        assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(folder / "before.pt"), FinishedRun(0, "", folder / "runs" / "after")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page", ["ddp", "rpc-tutorial"])
def test_the_programs_of_a_page_end_with_equal_parameters(tmp_path, page):
    before, after = run_page(page, tmp_path)
    assert before.keys() == after.load("model").keys() or page == "rpc-tutorial"
    model = {name.removeprefix("model."): tensor for name, tensor in before.items()}
    assert differing_tensors(model, after.load("model")) == []
    assert after.summary["status"] == "completed"


@pytest.mark.nightly
def test_the_program_of_the_page_on_a_script_learns(tmp_path):
    before, after = run_page("script", tmp_path)
    assert before.keys() == after.load("model").keys()
    assert after.summary["steps"] == 47  # 750 images of each trainer, four times
    assert after.summary["validation"]["accuracy"] > 0.75


def code_lines(text):
    """The lines of a program without indentation, blank lines and comments, with how often each occurs."""
    lines = map(str.strip, text.splitlines())
    return Counter(line for line in lines if line and not line.startswith("#"))


def changed_lines(name, before, after, config):
    """The sentence of a page on how much of a program is kept."""
    kept = before & after
    words = f"Of the {before.total()} lines of `{name}`, {kept.total()} stay, {(before - kept).total()} go, and "
    words += f"{(after - kept + config).total()} are new, {config.total()} of them in `config.yaml`"
    return f"{words} (without indentation, blank lines and comments)."


@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=lambda path: path.stem)
def test_a_page_states_how_many_lines_change(page):
    files = {name: code_lines(text) for name, text in _FILE.findall(page.read_text())}
    stated = changed_lines("before.py", files["before.py"], files["task.py"], files["config.yaml"])
    assert stated in " ".join(page.read_text().split())


def test_the_page_on_lightning_states_how_many_lines_change():
    files = [code_lines((ROOT / "examples" / "lightning" / name).read_text()) for name in ("digits.py", "task.py")]
    config = code_lines((ROOT / "examples" / "lightning" / "config.yaml").read_text())
    stated = changed_lines("digits.py", files[0], files[0] + files[1], config)
    assert stated in " ".join((ROOT / "docs" / "lightning.md").read_text().split())


@pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("accelerate")), reason="transformers and accelerate are not installed"
)
def test_the_programs_of_the_page_on_the_hugging_face_trainer_both_learn(tmp_path):
    before, after = run_page("huggingface", tmp_path)
    assert before.keys() == after.load("model").keys()
    losses = [record["loss"] for record in after.of_kind("train")]
    assert after.summary["steps"] == 128
    assert sum(losses[-16:]) < 0.5 * sum(losses[:16])


@pytest.mark.parametrize("page", sorted(path.stem for path in PAGES.glob("*.md")))
def test_the_keys_that_a_page_names_exist(page):
    sections = {key.partition(".")[0] for key in KEYS}
    named = re.findall(r"`([a-z_]+\.[a-z_.]+)(?::[^`]*)?`", (PAGES / f"{page}.md").read_text())
    keys = [key for key in named if key.partition(".")[0] in sections]
    assert [key for key in keys if not any(f"{known}.".startswith(f"{key}.") for known in KEYS)] == []

"""The documents build as a site without a warning. It has every page and public name, and needs no other host."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock

import paramserver
import paramserver.buffers
import paramserver.errors
import paramserver.optim
import paramserver.trainers

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        not all(map(find_spec, ("sphinx", "myst_parser", "furo"))),
        reason="the extra docs is not installed",
    ),
]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The site, which the first process of the session that needs it builds for all."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "site"
    with FileLock(f"{folder}.lock", timeout=170):
        if not folder.is_dir():
            command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-c", "docs", ".", str(folder)]
            built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
            assert (built.returncode, built.stdout + built.stderr) == (0, "")
    return folder


def test_every_document_is_a_page_that_the_side_bar_lists(site):
    assert 'url=docs/index.html"' in (site / "index.html").read_text()
    front = (site / "docs" / "index.html").read_text()
    files = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("examples/*/README.md")), ROOT / "README.md"]
    pages = [os.path.relpath(file.with_suffix(".html"), DOCS) for file in files if file != DOCS / "index.md"]
    assert len(pages) > 30
    assert [page for page in pages if not (site / "docs" / page).is_file()] == []
    assert [page for page in pages if f'href="{page}"' not in front] == []


def test_nothing_is_loaded_from_another_host(site):
    loads = r"""<(?:script|link|img|iframe|source|object|embed)\b[^>]*\b(?:src|srcset|href|data)=["'](?:https?:)?//"""
    loads += r"""|url\(["']?(?:https?:)?//|@import|\b(?:import|from|fetch)\b[\s(]*["'`](?:https?:)?//"""
    files = [file for file in site.rglob("*") if file.suffix in (".html", ".css", ".js", ".svg")]
    assert len(files) > 80
    assert [(file.name, found[0]) for file in files if (found := re.search(loads, file.read_text()))] == []


def test_no_text_is_smaller_than_12_pixels_and_figures_fit_a_telephone(site):
    styles = (DOCS / "site.css").read_text()
    sizes = re.findall(r"font-size[\w-]*: (?:max\()?([\d.]+)(px|rem)", styles)
    assert len(sizes) == len(re.findall(r"font-size[\w-]*:", styles)), "sizes are in px or rem"
    assert [size for size, unit in sizes if float(size) * {"px": 1, "rem": 16}[unit] < 12] == []
    for file in (DOCS / "figures").glob("*.svg"):
        drawn = file.read_text()
        assert min(map(int, re.findall(r'font-size="(\d+)"', drawn))) >= 12, file.name
        assert int(re.search(r'width="(\d+)"', drawn)[1]) <= 368, f"{file.name} is scaled down on 400 pixels"


def test_the_figures_of_mermaid_are_drawn(site):
    blocks = {file: file.read_text().count("```mermaid") for file in DOCS.rglob("*.md")}
    pages = {file: (site / file.relative_to(ROOT).with_suffix(".html")).read_text() for file in blocks}
    assert {file: page.count('<div class="mermaid">') for file, page in pages.items()} == blocks
    assert sum(blocks.values()) >= 7


def test_what_is_generated_is_on_its_pages(site):
    assert "must be 0 with cluster.max_restarts (0)" in (site / "docs" / "refused.html").read_text()
    losses = (site / "docs" / "losses.html").read_text()
    rows = (DOCS / "faults.csv").read_text().count(",SIGKILL,")
    assert rows == losses.count("<td><p>SIGKILL</p></td>")
    assert [role for role in ("trainer", "server", "shard-server", "supervisor") if f'id="{role}"' not in losses] == []


def test_the_figures_are_on_their_pages(site):
    shown = {
        name for page in site.rglob("*.html") for name in re.findall(r'src="[^"]*_images/(\w+)\.svg"', page.read_text())
    }
    assert shown == {file.stem for file in (DOCS / "figures").glob("*.svg")}


def test_every_public_name_has_a_page(site):
    pages = site / "docs" / "api"
    folders = (paramserver, paramserver.buffers, paramserver.optim, paramserver.trainers)
    names = {f"{folder.__name__}.{name}" for folder in folders for name in folder.__all__}
    names -= {f"paramserver.{name}" for name in ("__version__", "TrainingError", "UnsupportedConfiguration")}
    assert [name for name in sorted(names) if f'id="{name}"' not in (pages / f"{name}.html").read_text()] == []
    errors = (pages / "paramserver.errors.html").read_text()
    classes = [name for name, member in vars(paramserver.errors).items() if isinstance(member, type)]
    assert [name for name in classes if f'id="paramserver.errors.{name}"' not in errors] == []
    summary = (site / "docs" / "api.html").read_text()
    assert [page.name for page in pages.glob("*.html") if f'href="api/{page.name}#' not in summary] == []

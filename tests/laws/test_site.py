"""The documents build as a site without a warning, and it has every page and every public name."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import paramserver
import paramserver.trainers

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        not all(map(find_spec, ("sphinx", "myst_parser", "furo", "sphinxcontrib.mermaid"))),
        reason="the extra docs is not installed",
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-c", "docs", ".", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    return folder


def test_every_document_is_a_page_that_the_side_bar_lists(site):
    front = (site / "index.html").read_text()
    pages = [file.relative_to(ROOT).with_suffix(".html") for file in sorted(DOCS.rglob("*.md"))]
    pages += [file.relative_to(ROOT).with_suffix(".html") for file in sorted(ROOT.glob("examples/*/README.md"))]
    assert len(pages) > 30
    assert [page for page in pages if not (site / page).is_file()] == []
    assert [page for page in pages if f'href="{page}"' not in front] == []


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


def test_every_public_name_is_in_the_api(site):
    page = (site / "docs" / "api.html").read_text()
    errors = {"TrainingError", "UnsupportedConfiguration"}  # on the page as names of paramserver.errors
    names = [f"paramserver.{name}" for name in paramserver.__all__ if name != "__version__" and name not in errors]
    names += [f"paramserver.errors.{name}" for name in errors] + [
        f"paramserver.trainers.{name}" for name in paramserver.trainers.__all__
    ]
    assert [name for name in names if f'id="{name}"' not in page] == []

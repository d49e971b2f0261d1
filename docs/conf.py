"""Sphinx builds the documents as a site: ``python -m sphinx -c docs . site`` in the top folder of the project.

The sources are the Markdown files as they stand in the repository, so links between them, and to code, lead to the same
places there and here. The front page is README.md; a page that is added to docs/ appears without a change here. What
docs/generated.py makes is on the site only.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from paramserver import __version__

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

from generated import PARTS  # noqa: E402

project = "paramserver"
author = "the paramserver authors"
project_copyright = "the paramserver authors"
release = version = __version__
smartquotes = False  # they make a dash of the -- of a flag

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**", "examples/*/README.md"]
exclude_patterns = [".*", "build", "data", "docs/figures", "paramserver", "runs", "site", "tests", "trainers"]

myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
# With -n every reference must have a target. These have none on this site: names of other packages, names without their
# module in the text of a docstring, and annotations by classes that are no part of the API.
nitpick_ignore_regex = [
    (r"py:.*", r"(argparse|collections|contextlib|numpy|os|pathlib|torch|typing)\..*"),
    (r"py:.*", r"[^.]*"),
    (r"py:.*", r"paramserver\.trainers\.local_steps\..*"),
    (r"py:.*", r"paramserver\.(buffers|config|consistency|context|metrics|optim|server|sources|transport)\..*"),
]

html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_title = "paramserver"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False

# The pages in the order of the side bar. Those of docs/ that no group names are in the last one.
GROUPS = {
    "First steps": ["start", "task", "modes", "buffers", "online", "checkpoints", "examples"],
    "On a cluster": ["clusters", "doctor", "devices", "losses", "benchmark"],
    "Your code": [
        "callbacks",
        "sinks",
        "several-optimizers",
        "tables",
        "rounds",
        "own-trainers",
        "lightning",
        "coming-from/*",
    ],
    "Reference": ["configuration", "api", "interface", "glossary", "refused", "protocol", "measured", "scale"],
    "The project": ["architecture", "torch-notes", "release", "../CONTRIBUTING", "../CHANGELOG"],
}
HIDDEN = "```{{toctree}}\n:hidden:\n:caption: {}\n\n{}\n```\n"


def pages() -> dict[str, list[str]]:
    """Return the names of the pages that exist, by group, from the top folder."""
    groups: dict[str, list[str]] = {}
    for caption, names in GROUPS.items():
        files = [sorted(DOCS.glob(f"{name}.md")) for name in names if "../" not in name]
        groups[caption] = [f"docs/{file.relative_to(DOCS).with_suffix('')}" for found in files for file in found]
        groups[caption] += [name.removeprefix("../") for name in names if "../" in name]
    listed = {name for names in groups.values() for name in names}
    others = sorted(f"docs/{file.relative_to(DOCS).with_suffix('')}" for file in DOCS.rglob("*.md"))
    groups["The project"][2:2] = [name for name in others if name not in listed]
    return groups


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append what the files do not have: the side bar's contents, the examples' pages, and what is generated."""
    if docname == root_doc:
        source[0] += "\n" + "\n".join(HIDDEN.format(caption, "\n".join(names)) for caption, names in pages().items())
    if docname == "docs/examples":
        names = sorted(f"../examples/{file.parent.name}/README" for file in DOCS.glob("../examples/*/README.md"))
        source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n"
    if docname in PARTS:
        source[0] += PARTS[docname]()


def with_generated_parts(*_: object) -> list[str]:
    """Read these pages again in every build: their files do not show whether the parts changed."""
    return list(PARTS)


def add_index(app: Sphinx, exception: Exception | None) -> None:
    """Make the front page the one that a browser opens first."""
    if exception is None and app.builder.name == "html":
        shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", add_contents)
    app.connect("env-get-outdated", with_generated_parts)
    app.connect("build-finished", add_index)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

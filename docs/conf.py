"""Sphinx builds the documents as a site: ``python -m sphinx -c docs . site`` in the top folder of the project.

The sources are the Markdown files as they stand in the repository, so links between them, and to code, lead to the same
places there and here. The front page is docs/index.md. A page that is added to docs/ appears without a change here.
What docs/generated.py makes is on the site only, as are the pages of the API, which a build writes to docs/api.
"""

from __future__ import annotations

import re
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

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "mermaid"]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**", "examples/*/README.md"]
exclude_patterns = [".*", "build", "data", "docs/figures", "docs/templates"]
exclude_patterns += ["paramserver", "runs", "site", "tests", "trainers"]

myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
templates_path = [str(DOCS / "templates")]  # absolute: autosummary looks in the top folder, others in docs/
# The members that the page of a class has, beside its docstring: all, or these. Others have none.
autosummary_context = {
    "documented": {
        "paramserver.Task": "",
        "paramserver.Callback": "",
        "paramserver.Result": "status, validation, checkpoint, model, metrics",
        "paramserver.ParameterServer": "forward, get_dist_gradients, get_param_rrefs",
        "paramserver.Subscriber": "latest, newer_than, close",
        "paramserver.online.weights.Weights": "step, is_current, state_dict",
        "paramserver.buffers.Buffer": (
            "put, put_many, get, get_batch, wait_ready, finish, close, info, state_dict, load_state_dict"
        ),
        "paramserver.optim.RowWiseAdagrad": "step, steps_rows",
        "paramserver.sources.Source": "",
        "paramserver.client.Client": "",
        "paramserver.trainers.Trainer": (
            "unwrapped_model, is_single_process_per_device, sampler_kwargs, data_parallel_group, block_backward_sync, "
            "data_available, on_before_forward, on_after_setup_optimizers, on_before_backward, on_after_backward, "
            "optimizer_state, init_connection, all_gather, stop, log"
        ),
        "paramserver.trainers.DdpTrainer": "configure_ddp",
        "paramserver.metrics.Sink": "",
    }
}
# With -n every reference must have a target. These have none on this site: names of other packages, names without their
# module in the text of a docstring, and annotations by classes that are no part of the API.
nitpick_ignore_regex = [
    (r"py:.*", r"(argparse|collections|contextlib|numpy|os|pathlib|torch|typing)\..*"),
    (r"py:.*", r"[^.]*"),
    (r"py:.*", r"paramserver\.trainers\.local_steps\..*"),
    (r"py:.*", r"paramserver\.(buffers|config|consistency|context|metrics|optim|server|sources|transport)\..*"),
]

html_theme = "furo"
html_static_path = ["site.css", "site.js"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_title = "paramserver"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False

# The pages in the order of the side bar. Those of docs/ that no group names are in the last one.
GROUPS = {
    "First steps": [
        *("start", "task", "modes", "buffers", "online", "steering", "subscribers", "actors"),
        *("checkpoints", "precision", "examples"),
    ],
    "On a cluster": ["clusters", "doctor", "devices", "losses", "benchmark", "profile"],
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
    "The project": ["../README", "architecture", "torch-notes", "release", "../CONTRIBUTING", "../CHANGELOG"],
}
HIDDEN = "```{{toctree}}\n:hidden:\n:caption: {}\n\n{}\n```\n"


def pages() -> dict[str, list[str]]:
    """Return the names of the pages that exist, by group, from the top folder."""
    groups: dict[str, list[str]] = {}
    for caption, names in GROUPS.items():
        files = [sorted(DOCS.glob(f"{name}.md")) for name in names if "../" not in name]
        groups[caption] = [f"docs/{file.relative_to(DOCS).with_suffix('')}" for found in files for file in found]
        groups[caption] += [name.removeprefix("../") for name in names if "../" in name]
    listed = {name for names in groups.values() for name in names} | {root_doc}
    others = sorted(f"docs/{file.relative_to(DOCS).with_suffix('')}" for file in DOCS.rglob("*.md"))
    groups["The project"][3:3] = [name for name in others if name not in listed]
    return groups


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append what the files do not have: the side bar's contents, the examples' pages, and what is generated."""
    if docname == root_doc:
        for caption, names in pages().items():
            source[0] += "\n" + HIDDEN.format(caption, "\n".join(f"/{name}" for name in names))
    if docname == "docs/examples":
        names = sorted(f"../examples/{file.parent.name}/README" for file in DOCS.glob("../examples/*/README.md"))
        source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n"
    if docname in PARTS:
        source[0] += PARTS[docname]()


def with_generated_parts(*_: object) -> list[str]:
    """Read these pages again in every build: their files do not show whether the parts changed."""
    return list(PARTS)


def remove_old_pages_of_the_api(*_: object) -> None:
    """Remove those that earlier builds wrote of names that docs/api.md has no more."""
    names = set(re.findall(r"\w+", (DOCS / "api.md").read_text(encoding="utf-8")))
    for page in (DOCS / "api").glob("*.rst"):
        if page.stem.rpartition(".")[2] not in names:
            page.unlink(missing_ok=True)


def add_index(app: Sphinx, exception: Exception | None) -> None:
    """Lead a browser that opens the folder to the front page."""
    if exception is None and app.builder.name == "html":
        page = f'<!doctype html><title>{project}</title><meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        Path(app.outdir, "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", remove_old_pages_of_the_api, priority=1)
    app.connect("source-read", add_contents)
    app.connect("env-get-outdated", with_generated_parts)
    app.connect("build-finished", add_index)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

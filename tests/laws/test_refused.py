"""The page of the site with what is refused has every sentence of the code, and no document quotes another one."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest
from source_tree import modules

from paramserver.config import KEYS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generated():
    """docs/generated.py, which makes the page."""
    spec = importlib.util.spec_from_file_location("generated", DOCS / "generated.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules["generated"] = script
    spec.loader.exec_module(script)
    yield script
    del sys.modules["generated"]


@pytest.fixture(scope="module")
def page(generated):
    """The text of the page, without the signs that Markdown adds."""
    return " ".join(generated.refused().replace("\\", "").split())


def test_the_page_has_every_sentence_that_is_raised(generated, page):
    missing, found = [], 0
    for module in modules():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            if getattr(node.func, "attr", getattr(node.func, "id", None)) not in generated.CLASSES:
                continue
            texts = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
            longest = max((text for text in texts if isinstance(text, str)), key=len, default="")
            if isinstance(node.args[0], (ast.Constant, ast.JoinedStr)) and len(re.findall(r"\w{3,}", longest)) > 2:
                found += 1
                if " ".join(longest.replace("\\", "").split()) not in page:
                    missing.append(f"{module.name}:{node.lineno}: {longest}")
    assert missing == []
    assert found > 200


def test_the_page_has_sentences_of_all_kinds(page):
    for part in (
        "cluster.spares (…) must be 0 with cluster.max_restarts (0)",
        "trainer.all_gather must have trainers that step together",
        "the sampler (…) must be iterable; return a sampler, or a list of indices",
        "server.transport (…) must be auto or rpc with server.compute server, where no parameters are sent",
    ):
        assert part in page


def test_messages_that_documents_quote_exist(page):
    """A quoted message is code of the form ``name (value) must ...``: the rule of a key, or a sentence of the page."""
    quoted = [
        (document.name, name, rule.removesuffix(" ..."))
        for document in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
        for name, rule in re.findall(r"`[^`\n]*?([\w.]+) \([^)`\n]*\) (must [^`\n]*)`", document.read_text())
    ]
    assert quoted
    assert [one for one in quoted if one[1] not in KEYS and f"{one[1]} (…) {one[2]}" not in page] == []

"""docs/architecture.md states what the tree has: folders, layers, files, registries, threads."""

import ast
import re
from pathlib import Path

from source_tree import ROOT, modules

from tests.laws.test_layers import LAYERS

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "paramserver"
# What is named without its folder in a sentence about that folder.
FILES = sorted(set(re.findall(r"(?<![\w/.])((?:\w+/)*\w+\.py)\b", PAGE)))


def section(title):
    """The text under a heading."""
    return re.search(rf"^## {title}$(.*?)(?=^## |\Z)", PAGE, re.M | re.S).group(1)


def rows(title):
    """The cells of the tables of a section, without headings."""
    lines = [line for line in section(title).splitlines() if line.startswith("|") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines][1:]


def test_the_folders_are_those_of_the_tree():
    named = [cells[0].strip("`/ ") for cells in rows("Folders")]
    folders = sorted(
        f"paramserver/{init.parent.name}" for init in PACKAGE.glob("*/__init__.py") if not init.parent.is_symlink()
    )
    assert named == [*folders, "trainers"]


def test_the_layers_are_those_of_the_law():
    assert [cells[1].replace("`", "") for cells in rows("Layers")] == LAYERS


def exists(name):
    found = [root for root in (ROOT, PACKAGE, ROOT / "trainers") if (root / name).is_file()]
    return bool(found) or any(PACKAGE.glob(f"**/{name}"))


def test_every_file_that_is_named_exists():
    assert len(FILES) > 100
    assert [name for name in FILES if not exists(name)] == []


def test_every_registry_that_is_named_exists():
    named = re.findall(r"`([A-Z_]+)` of `([\w/]+\.py)`", PAGE)
    assert named
    for registry, file in named:
        nodes = [
            node
            for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body
            if isinstance(node, (ast.Assign, ast.AnnAssign))
        ]
        assert registry in [name for node in nodes for name in _targets(node)], file


def _targets(node):
    nodes = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in nodes if isinstance(target, ast.Name)]


def test_a_class_or_member_that_is_named_exists():
    members = {}
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                functions = {n.name for n in ast.walk(node) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
                attributes = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                members[node.name] = functions | attributes
    outside = {
        "SimpleQueue",
        "ThreadAuthenticator",
        "ThreadPoolExecutor",
        "DistributedOptimizer",
        "DistributedDataParallel",
    }
    for name in set(re.findall(r"`([A-Z][a-z]\w+(?:\.\w+)?)(?:\(\))?`", PAGE)) - outside:
        owner, _, member = name.partition(".")
        assert owner in members, name
        assert not member or member in members[owner], name


def test_every_thread_has_a_row():
    table = "\n".join(" ".join(cells) for cells in rows("Threads and locks"))
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("threading.Thread", "ThreadPoolExecutor"):
                options = {k.arg: k.value for k in node.keywords}
                name = options.get("name", options.get("thread_name_prefix"))
                text = name.value if isinstance(name, ast.Constant) else name.values[0].value
                assert f"`{text}" in table, f"{module.name} starts a thread {text}"


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([\w./-]+\.md)\)", PAGE):
        assert (ROOT / "docs" / target).is_file() or (Path(ROOT) / target).is_file(), target

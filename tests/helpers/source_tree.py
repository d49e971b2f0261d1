"""The source of the package as syntax trees: modules, imports, and uses that the laws restrict."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"paramserver": "paramserver", "trainers": "paramserver.trainers"}
"""The folders of the top level that hold the package, and what each is imported as."""


@dataclass(frozen=True)
class Module:
    """A file; ``name`` is dotted, and that of the folder for an ``__init__``."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @property
    def is_init(self) -> bool:
        return self.path.name == "__init__.py"


@cache
def modules(root: Path = ROOT) -> tuple[Module, ...]:
    """Every module of the package under ``root``; each is parsed once, where its tree is read."""
    found = []
    # Links are not followed: the files of trainers/ are found once.
    for path in sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py")):
        top, *parts = path.relative_to(root).with_suffix("").parts
        name = ".".join([FOLDERS[top], *(parts[:-1] if parts[-1] == "__init__" else parts)])
        found.append(Module(name, path))
    return tuple(found)


@cache
def imported(tree: ast.AST) -> frozenset[str]:
    """Everything that is imported anywhere, also in functions: ``a.b`` and ``a.b.c`` for ``from a.b import c``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def on_import(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported; those for type checkers and in functions do not."""
    for statement in tree.body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            yield statement


def inside(name: str, of: Iterable[str]) -> bool:
    """Whether ``name`` is one of these modules or lies below one."""
    return any(name == one or name.startswith(f"{one}.") for one in of)


def comparisons_with(tree: ast.AST, words: frozenset[str]) -> list[int]:
    """Lines that compare something with one of these words: ``==``, ``in`` or ``case``."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            items = [item for side in sides for item in getattr(side, "elts", [side])]
            constants = [item for item in items if isinstance(item, ast.Constant)]
        elif isinstance(node, ast.MatchValue) and isinstance(node.value, ast.Constant):
            constants = [node.value]
        else:
            continue
        lines += [node.lineno for constant in constants if constant.value in words]
    return lines


def environment_uses(tree: ast.AST) -> list[int]:
    """Lines that touch the environment of the process through ``os``."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os":
            lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for alias in node.names if alias.name in names]
    return lines


def sleeps(tree: ast.AST) -> list[int]:
    """Lines that mention ``time.sleep``."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "sleep" and ast.unparse(node.value) in ("time", "asyncio"):
            lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            lines += [node.lineno for alias in node.names if alias.name == "sleep"]
    return lines


def private_torch(tree: ast.AST) -> set[str]:
    """Names with a leading underscore that are imported from torch, or reached through what is."""
    bound, found = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            bound |= full
            found |= {name for name in full.values() if name.startswith("torch.") and "._" in name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root, _, rest = ast.unparse(node).partition(".")
            if bound.get(root, "").split(".")[0] == "torch":
                found.add(f"{bound[root]}.{rest}")
    return found

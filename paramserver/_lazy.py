"""Lazy exports of a package: a name is imported on first access, so that importing the package itself is cheap."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__`` (PEP 562), ``__dir__`` and ``__all__`` for a package.

    The public names are those that the ``__init__`` of the package imports under ``if TYPE_CHECKING``. Type checkers
    read these imports, and this function parses them from the source, so each name is listed once. ``package`` and
    ``file`` are the package's ``__name__`` and ``__file__``.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    blocks = (node.body for node in tree.body if isinstance(node, ast.If))
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: str(node.module) for node in imports for alias in node.names}

    def getattr_of_package(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    names = sorted(modules)
    return getattr_of_package, lambda: names, names

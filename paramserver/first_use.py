"""Names of a package that are imported when they are used first, so that importing the package costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_first_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a package (PEP 562).

    Args:
        package: its ``__name__``.
        homes: by name the module of the package that has it.
    """

    def getattr_of_package(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return getattr_of_package

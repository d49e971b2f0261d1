"""Imports the modules of an example as a run imports them."""

import sys
from pathlib import Path
from types import SimpleNamespace

from paramserver.importing import load_object

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load_example(name, task):
    """The modules of ``examples/name`` by name. ``sys.path`` and ``sys.modules`` are restored."""
    folder = EXAMPLES / name
    path, modules = list(sys.path), dict(sys.modules)
    load_object(f"{folder / 'task.py'}:{task}", "task")
    found = {file.stem: load_object(f"{file}:__name__", "task") for file in folder.glob("*.py")}
    loaded = SimpleNamespace(**{stem: sys.modules[name] for stem, name in found.items()})
    sys.path[:] = path
    for module in found.values():
        del sys.modules[module]
    sys.modules.update({name: module for name, module in modules.items() if name in found.values()})
    return loaded

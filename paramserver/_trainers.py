"""Imports ``paramserver.trainers`` from its folder, which a checkout has at the top level, and as ``trainers``.

``trainers`` is the former name of the module; any other module of this name has precedence.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location, spec_from_loader
from pathlib import Path
from types import ModuleType

_NAME, _FORMER = "paramserver.trainers", "trainers"
_INSIDE = Path(__file__).absolute().parent / "trainers"
# In a checkout this is a link, for type checkers and editors; an unpacked archive may have none.
FOLDER = _INSIDE if _INSIDE.is_dir() and not _INSIDE.is_symlink() else _INSIDE.parents[1] / "trainers"
FORMER_FOLDERS = {FOLDER.resolve()}
"""Folders that are imported as ``paramserver.trainers`` only, though a top folder on ``sys.path`` has them."""
FORMER_NAME_NOTE = f"the module {_FORMER} is now {_NAME}; import it by this name, and use it in the config key trainer"


class _FormerName(Loader):
    """Imports a module by its own name, so that it is one object under both names."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        sys.modules[name] = import_module(f"paramserver.{name}")  # importlib returns what is here afterwards
        if name == _FORMER:
            import logging

            logging.getLogger("paramserver").warning(FORMER_NAME_NOTE)


class TrainersFinder:
    """Finds ``paramserver.trainers``, and ``trainers`` where no other module has this name."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return where the module ``name`` is; see ``importlib.abc.MetaPathFinder``."""
        if name == _NAME:
            return spec_from_file_location(name, FOLDER / "__init__.py")
        if name == _FORMER:
            return cls._another_module() or spec_from_loader(name, _FormerName())
        if name.startswith(f"{_FORMER}.") and former_name_is_used():
            return spec_from_loader(name, _FormerName())
        return None

    @classmethod
    def _another_module(cls) -> ModuleSpec | None:
        # The top folder of a checkout may be on sys.path, and precede the folder of a user's module.
        path = [entry for entry in sys.path if Path(entry, _FORMER).resolve() not in FORMER_FOLDERS]
        for finder in sys.meta_path:
            spec = None if finder is cls else finder.find_spec(_FORMER, path)
            if spec is not None and (spec.origin is None or Path(spec.origin).resolve().parent not in FORMER_FOLDERS):
                return spec
        return None


def former_name_is_used() -> bool:
    """Whether this process has imported the trainers under their former name."""
    return _FORMER in sys.modules and sys.modules[_FORMER] is sys.modules.get(_NAME)


def install_finder() -> None:
    """Add the finder to ``sys.meta_path``, first: a finder after the others cannot decide what precedes what."""
    sys.meta_path.insert(0, TrainersFinder)

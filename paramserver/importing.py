"""Import of user code by reference: ``module:Class`` or ``path/to/file.py:Class``."""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.machinery
import importlib.util
import io
import logging
import math
import os
import pickle
import re
import sys
import traceback
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from paramserver import __version__
from paramserver.errors import ParamserverError, SourceError, TaskError, UnsupportedConfiguration, kind_and_message

TORCH_FROM, TORCH_BELOW = "2.13", "2.16"
"""The releases of torch with which this version was tested, as setup.cfg has them."""

_log = logging.getLogger("paramserver")

# The keys whose values are references to user code.
_REFERENCES = frozenset(
    {"task", "trainer", "logging.sinks", "simulations.command", "simulations.function", "simulations.sampler"}
)
# Frames of files with these prefixes are not user code.
_LIBRARY_PREFIXES = ("<frozen", sys.prefix, sys.base_prefix, str(Path(__file__).parent))

PICKLED_TASK = "task.pkl"
"""The file of a run with its task, if that is a class without a file, such as one of a notebook's cell."""

_PICKLED_MODULE = "_paramserver_pickled"

references_in_import: list[str] = []
"""What ``load_object`` imports now: code at the top of these modules must start no run."""


@contextmanager
def torch_import_without_gc() -> Iterator[None]:
    """Disable garbage collection while torch is imported; do nothing if it is imported already.

    The import creates hundreds of thousands of objects that live as long as the process, so they are frozen as well:
    later collections skip them. This saves a tenth of the CPU time until a rank trains.

    Raises:
        UnsupportedConfiguration: it is no release that this version was tested with.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    check_torch_version()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def check_torch_version(version: str | None = None) -> None:
    """Check that the release of torch is one that this version was tested with. Does not import torch.

    Raises:
        UnsupportedConfiguration: it is not, or torch is not installed.
    """
    cure = f"run: python -m pip install 'torch>={TORCH_FROM},<{TORCH_BELOW}'"
    if version is None:
        try:
            version = metadata.version("torch")
        except metadata.PackageNotFoundError as error:
            if importlib.util.find_spec("torch") is not None:
                return  # a build that is not a package
            raise UnsupportedConfiguration(f"torch must be installed; {cure}") from error
    # Of a release candidate or a nightly build, the release that it leads to counts.
    release, first, end = (tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (version, TORCH_FROM, TORCH_BELOW))
    if not first <= release < end:
        raise UnsupportedConfiguration(
            f"torch ({version}) must be at least {TORCH_FROM} and below {TORCH_BELOW}, the releases that paramserver "
            f"{__version__} was tested with; {cure}"
        )


def code_folders(
    config_file: Path | None = None, overrides: Sequence[str] = (), recorded: Sequence[Path] = ()
) -> list[Path]:
    """Return where references to user code are searched, in this order.

    A reference in a file is relative to the folder of that file, one on the command line to the current folder. Without
    ``config_file`` (None) none is given, or it is that of a run that is resumed, whose folders are ``recorded``.

    Raises:
        UnsupportedConfiguration: the current folder was removed.
    """
    current = [current_folder()]
    files = [] if config_file is None else [config_file.resolve().parent]
    is_named_here = any(override.partition("=")[0].strip() in _REFERENCES for override in overrides)
    folders = [*current, *files, *recorded] if is_named_here else [*files, *recorded, *current]
    return list(dict.fromkeys(folders))


def current_folder() -> Path:
    """Return the current folder.

    Raises:
        UnsupportedConfiguration: it was removed.
    """
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise UnsupportedConfiguration(
            "the current folder must exist, and was removed; change to another one"
        ) from error


def source_file(user_class: type) -> str | None:
    """Return the file that defines ``user_class``; None if it was defined in a notebook or at a prompt."""
    module = sys.modules.get(user_class.__module__)
    file = getattr(module, "__file__", None)
    if user_class.__module__ == "__main__" and not hasattr(module, user_class.__qualname__.partition(".")[0]):
        return None  # the main module is another program's, such as a profiler's
    return None if file is None else str(Path(file).resolve())


@contextmanager
def keeps_process_state(key: str) -> Iterator[None]:
    """Change back, after user code, to the current folder, to which paths of a run are relative, and enable its log."""
    try:
        folder, before = Path.cwd(), Path().stat()
    except FileNotFoundError:  # it was removed while the run took place
        yield
        return
    try:
        yield
    finally:
        for name in list(logging.root.manager.loggerDict):
            if name.partition(".")[0] == _log.name:  # logging.config.dictConfig disables all that it does not name
                logging.getLogger(name).disabled = False
        if not os.path.samestat(before, Path().stat()):
            os.chdir(folder)
            _log.warning(
                "%s: its code changed the current folder, which is %s again, as paths of the run are relative to it; "
                "name the files that it reads by absolute paths, such as Path(__file__).parent / NAME",
                key,
                folder,
            )


def load_object(reference: str, key: str, folders: Sequence[Path] = ()) -> Any:
    """Import and return the object that ``reference`` names.

    A relative file is searched in ``folders``, in this order. They are put first on ``sys.path``.

    Raises:
        UnsupportedConfiguration: the reference is malformed.
        TaskError: there is no such module or name, or the module raised while it was imported.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        raise UnsupportedConfiguration(f'{key} ({reference}) must read "module:Class" or "path/to/file.py:Class"')
    for folder in reversed([str(f) for f in folders]):
        if folder in sys.path:  # perhaps behind another folder that has a module of this name
            sys.path.remove(folder)
        sys.path.insert(0, folder)
    references_in_import.append(reference)
    try:
        with keeps_process_state(key):
            if Path(place).name == PICKLED_TASK:
                return _load_pickled(place, key, folders)
            module = _load_file(place, key, folders) if place.endswith(".py") else _load_module(place, key, folders)
    finally:
        references_in_import.pop()
    if not hasattr(module, name) and place == "__main__":
        raise TaskError(
            f"{key} ({reference}) must name a module or a file that each process can import, and {name} was defined in "
            f"another program; name its file, --set {key}=path/to/file.py:{name}, or give the class to paramserver.run"
        )
    if not hasattr(module, name):
        raise TaskError(f"{key} ({reference}): {place} has no {name}; it has {_names_in(module)}")
    return getattr(module, name)


def _load_module(name: str, key: str, folders: Sequence[Path]) -> ModuleType:
    _check_loaded(name.partition(".")[0], key, folders)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise TaskError(
                f"{key}: there is no module {error.name}; "
                "the current folder, the config's folder and installed packages were searched"
            ) from error
        raise TaskError(f"{key}: importing {name} failed: {error}") from error
    except (Exception, SystemExit) as error:
        raise TaskError(f"{key}: importing {name} raised {describe_user_error(error)}") from error


def _check_loaded(name: str, key: str, folders: Sequence[Path]) -> None:
    """Refuse a module of ``folders`` if this process has loaded another one of that name, which would be used."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    spec = None if loaded is None else importlib.machinery.PathFinder.find_spec(name, [str(f) for f in folders])
    if loaded is None or spec is None or spec.origin is None or Path(spec.origin).resolve() == Path(loaded).resolve():
        return
    raise TaskError(
        f"{key}: module {name} must be {spec.origin}, and this process has loaded {loaded}; rename one of them, or run "
        "them in processes of their own"
    )


def find_file(place: str, key: str, folders: Sequence[Path]) -> Path:
    """Return the path of the file ``place``, which is absolute or relative to one of ``folders``.

    Raises:
        TaskError: there is no such file.
    """
    candidates = [Path(place)] if Path(place).is_absolute() else [folder / place for folder in folders]
    path = next((c for c in candidates if c.is_file()), None)
    if path is None:
        raise TaskError(f"{key}: there is no file {place}; looked in {', '.join(str(c.parent) for c in candidates)}")
    return path.resolve()


def _load_file(place: str, key: str, folders: Sequence[Path]) -> ModuleType:
    path = find_file(place, key, folders)
    loaded = sys.modules.get(path.stem)
    if loaded is not None and Path(getattr(loaded, "__file__", None) or "").resolve() == path:
        return loaded
    for imported in _loaded_imports_of(path):
        _check_loaded(imported, key, [path.parent])
    name = path.stem if loaded is None else f"_paramserver_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The file may import other files of its folder, and pickle finds its classes by the name in sys.modules.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise TaskError(f"{key}: importing {path} raised {describe_user_error(error)}") from error
    return module


def _loaded_imports_of(path: Path) -> list[str]:
    """Return the names at the top level that a file imports and another program has imported in this process.

    Not those of libraries, whose names a file of this folder may have. None if it is no Python, which its import will
    report.
    """
    source = path.read_bytes()
    try:
        text = unicodedata.normalize("NFKC", importlib.util.decode_source(source))  # as Python reads names
    except (SyntaxError, ValueError):
        return []
    # Most often no word of the file is such a name, and to parse it takes longer than its import.
    words = [word for word in set(re.findall(r"\w+", text)) if word in sys.modules]
    loaded = [
        word
        for word in words
        if not (getattr(sys.modules[word], "__file__", None) or "<frozen").startswith(_LIBRARY_PREFIXES)
    ]
    if not loaded:
        return []
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return sorted({name.partition(".")[0] for name in names}.intersection(loaded))


@contextmanager
def name_user_error(what: str) -> Iterator[None]:
    """Turn an error of user code in the block into a ``SourceError`` with its line; ``what`` is what is called."""
    try:
        yield
    except ParamserverError:
        raise  # a sentence of its own
    except Exception as error:
        raise SourceError(f"{what} raised {describe_user_error(error)}") from error


def describe_user_error(error: BaseException) -> str:
    """Describe an error raised by user code, with the last line of user code in its traceback.

    Use it in messages that are printed without a traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_LIBRARY_PREFIXES)]
    cure = ""
    if isinstance(error, SystemExit):
        cure = "; raise an error in its place; take values from task_args, and read a command line only under "
        cure += 'if __name__ == "__main__":'
    return kind_and_message(error) + (f" ({own[-1].filename}:{own[-1].lineno})" if own else "") + cure


def _names_in(module: ModuleType) -> str:
    own = [n for n, v in vars(module).items() if isinstance(v, type | FunctionType) and v.__module__ == module.__name__]
    return ", ".join(sorted(own)) or "no classes or functions"


def class_reference(user_class: type) -> tuple[str | None, list[Path]]:
    """Return the reference by which other processes import ``user_class``, and the folder in which its module is.

    None: they cannot, because it was defined in a notebook, at a prompt, or in a program that was read from standard
    input or that another one runs; send them ``pickle_class`` in ``PICKLED_TASK``. The folder is that of ``sys.path``
    by which this process has found the module, if it is not one of installed packages.

    Raises:
        TaskError: there is none, because the class was defined inside a function.
        UnsupportedConfiguration: the current folder was removed.
    """
    if "." in user_class.__qualname__:
        raise TaskError(
            f"{user_class.__qualname__} must be defined at the top of a module, so that other processes find it"
        )
    name, file = user_class.__module__, source_file(user_class)
    place = name
    if name == "__main__":
        if file is None or not Path(file).is_file():  # "<stdin>" where Python reads the program from a pipe
            return None, []
        spec = sys.modules[name].__spec__  # of a program that was started with -m, which may have relative imports
        name = name if spec is None else spec.name
        place = file if name == "__main__" else name
    # Python searches the folder of a script, and what a program adds to sys.path, in the process of that program only.
    folders: list[Path] = []
    if file is not None and name.partition(".")[0] != __package__:  # of this package ranks have loaded their own
        levels = name.count(".") + (Path(file).name == "__init__.py")
        searched = {(current_folder() / entry).resolve() for entry in sys.path}
        installed = ("site-packages", "dist-packages")
        folders = [f for f in Path(file).parents[levels : levels + 1] if f in searched and f.name not in installed]
    return f"{place}:{user_class.__name__}", folders


class _BoundedFile(io.BytesIO):
    """A file in memory that takes no more than ``max_bytes``."""

    def __init__(self, max_bytes: float) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self._max_bytes:
            raise ValueError(f"it uses more than {self._max_bytes:,} bytes")
        return super().write(data)


def pickle_class(user_class: type, max_bytes: float = math.inf) -> bytes:
    """Return a class that has no file with all that it uses of the program, for processes of this release of Python.

    Raises:
        TaskError: cloudpickle is missing, or the class uses what cannot be sent, such as an open file, or more than
            ``max_bytes``.
    """
    try:
        import cloudpickle
    except ImportError as error:
        raise TaskError(
            f"{user_class.__name__} was defined in a notebook, at a prompt or in a program that was read from standard "
            "input or that another one runs, so cloudpickle must send it to other processes; install the extra "
            "notebook, put the class into a .py file that the program imports, or use mode: local"
        ) from error
    file = _BoundedFile(max_bytes)
    try:
        cloudpickle.dump(user_class, file)
    except Exception as error:  # whatever the class refers to may raise
        raise TaskError(
            f"{user_class.__name__} cannot be sent to other processes: {kind_and_message(error)}; "
            "put it into a .py file, or leave out what it uses of the notebook"
        ) from error
    return file.getvalue()


def _load_pickled(place: str, key: str, folders: Sequence[Path]) -> Any:
    path = find_file(place, key, folders)
    try:
        loaded = pickle.loads(path.read_bytes())
    except (Exception, SystemExit) as error:
        raise TaskError(f"{key}: loading {path} raised {describe_user_error(error)}") from error
    _name_pickled(loaded)
    return loaded


def _name_pickled(user_class: Any) -> None:
    """Give the classes and functions that came with a pickled class a module, by which ranks pickle their instances."""
    module = sys.modules[_PICKLED_MODULE] = ModuleType(_PICKLED_MODULE)
    found = [user_class]
    while found:
        value = found.pop()
        value = getattr(value, "__func__", value)  # of a static or a class method
        if not isinstance(value, type | FunctionType):
            value = type(value)
        if value.__module__ != "__main__":
            continue
        value.__module__ = _PICKLED_MODULE
        if value.__qualname__ == value.__name__:
            setattr(module, value.__name__, value)
        # All functions that were pickled together have one dictionary of the names that they use.
        found += [*value.__mro__, *vars(value).values()] if isinstance(value, type) else value.__globals__.values()

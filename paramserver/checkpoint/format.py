"""What a checkpoint says about itself, and whether its files are what it says.

The folder of a run's checkpoints: names, the pointers ``latest`` and ``best``, and which one is the newest.

::

    checkpoints/step-00000100/              complete: nothing is renamed to such a name before it is whole
    checkpoints/latest, best                files with the name of a step folder
    checkpoints/.step-00000100.<pid>.tmp    being written
    checkpoints/.step-00000100.<pid>.old    moved aside while another of the same step takes its place
    checkpoints/.step-00000100.<pid>.gone   being removed
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paramserver.errors import CheckpointError
from paramserver.fileio import json_text

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_DIGEST_KEY = "manifest_sha256"
_OWN_KEYS = ("format_version", "step", "created", "files", _DIGEST_KEY)
_CHUNK_BYTES = 1 << 20
# What a text raises on the way from JSON to a manifest that it is none of.
_WRONG = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class FileEntry:
    """Size and hexadecimal SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``; ``about`` is what the writer of the checkpoint added (mode, trainers, ...)."""

    step: int
    created: str
    files: Mapping[str, FileEntry]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        taken = sorted(set(_OWN_KEYS) & set(self.metadata))
        if taken:
            raise ValueError(f"about ({', '.join(taken)}) must not use the manifest's own keys; rename them")

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    def to_text(self) -> str:
        """Return the JSON text, sealed with a digest of itself; ``parse`` is the inverse."""
        files = {name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in self.files.items()}
        own = {"format_version": self.format_version, "step": self.step, "created": self.created}
        content = json.loads(json_text({**own, **self.metadata, "files": files}))
        return json.dumps({**content, _DIGEST_KEY: _manifest_digest(content)}, indent=2) + "\n"

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Read ``text``.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError: it is not a manifest of a
                known format, or was altered.
        """
        content = json.loads(text)
        if content.pop(_DIGEST_KEY) != _manifest_digest(content):
            raise ValueError(f"{_DIGEST_KEY} is not the digest of the rest")
        files = {
            _checked_file_name(name): FileEntry(int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in content["files"].items()
        }
        about = {key: value for key, value in content.items() if key not in _OWN_KEYS}
        return cls(int(content["step"]), str(content["created"]), files, about, int(content["format_version"]))


def _checked_file_name(name: str) -> str:
    """The name of a file in the checkpoint's own folder."""
    if Path(name).name != name or "\0" in name:
        raise ValueError(f"{name!r} is not the plain name of a file")
    os.fsencode(name)  # a ValueError where no file can have that name
    return name


def _manifest_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint in ``folder``.

    Raises:
        CheckpointError: it is missing, unreadable, or of a newer version of this package.
    """
    path = folder / MANIFEST
    if os.path.lexists(path) and not path.is_file():
        raise CheckpointError(f"{path} cannot be read (it is no file)")
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing, so {folder} is not a complete checkpoint") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    version = newer_format(text)
    if version is not None:
        raise CheckpointError(
            f"{path} was written by a newer version (format {version}; this version reads up to {FORMAT_VERSION}); "
            "update paramserver"
        )
    try:
        return Manifest.parse(text)
    except _WRONG as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def newer_format(text: str) -> int | None:
    """Return the format version of a manifest's ``text`` if it is newer than ours.

    A newer format may have any other shape, so only its number is looked at.
    """
    try:
        version = json.loads(text)["format_version"]
    except _WRONG:
        return None  # not a manifest at all: parsing it says so
    return version if isinstance(version, int) and version > FORMAT_VERSION else None


def check_sizes(folder: Path, manifest: Manifest) -> str | None:
    """Say what is missing or of a wrong size in ``folder``; None if nothing. Reads no content."""
    for name, entry in manifest.files.items():
        path = folder / name
        size = _size_bytes(path)
        if size is None:
            return f"{path} is missing"
        if size != entry.bytes:
            return f"{path} has {size} bytes where its manifest says {entry.bytes}"
    return None


def _size_bytes(path: Path) -> int | None:
    """None where there is no such file, or no longer: the run that it is of may be removing it."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def check_digests(folder: Path, manifest: Manifest) -> str | None:
    """As ``check_sizes``, and the content of every file is compared with its SHA-256."""
    problem = check_sizes(folder, manifest)
    if problem:
        return problem
    for name, entry in manifest.files.items():
        try:
            digest = _sha256(folder / name)
        except OSError as error:
            return f"{folder / name} cannot be read ({error})"
        if digest != entry.sha256:
            return f"{folder / name} is damaged: its SHA-256 is not the one in the manifest"
    return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


LATEST = "latest"
BEST = "best"
_STEP_FOLDER = re.compile(r"step-([0-9]{8,18})")
_LEFTOVER = re.compile(r"\.(?P<name>[^.]+)\.(?P<pid>\d+)\.(?P<kind>tmp|old|gone)")


@dataclass(frozen=True)
class UnfinishedWrite:
    """A file or folder that a writer (process ``pid``) has not finished with."""

    path: Path
    final: Path
    pid: int
    kind: str


def step_name(step: int) -> str:
    """Name the folder of ``step``: ``step-00000100`` for 100.

    Raises:
        ValueError: ``step`` is negative.
    """
    if step < 0:
        raise ValueError(f"step ({step}) must be 0 or more")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a folder is named after; None where ``name`` is of something else."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match.group(1)) if match else None


def temporary_path(final: Path, kind: str) -> Path:
    """Where this process keeps the ``tmp``, ``old`` or ``gone`` state of ``final``."""
    return final.with_name(f".{final.name}.{os.getpid()}.{kind}")


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_pointer(folder: Path, pointer: str) -> Path | None:
    """Return the checkpoint that the file ``pointer`` (``latest`` or ``best``) names, there or not, or None.

    Raises:
        CheckpointError: ``pointer`` is no file, or one that nobody may read.
    """
    file = folder / pointer
    if not os.path.lexists(file):
        return None
    if not file.is_file():
        raise CheckpointError(f"{file} must be a file with the name of a checkpoint, and is none; move it away")
    try:
        name = file.read_text().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"{file} must be a file with the name of a checkpoint ({error.strerror or error}); move it away"
        ) from error
    return folder / name if step_of(name) is not None else None


def unfinished_writes(folder: Path) -> list[UnfinishedWrite]:
    """Everything in ``folder`` that is being written, replaced or removed, or was when its writer died."""
    matches = [(path, _LEFTOVER.fullmatch(path.name)) for path in sorted(folder.iterdir())]
    return [UnfinishedWrite(path, folder / m["name"], int(m["pid"]), m["kind"]) for path, m in matches if m]


def why_incomplete(checkpoint: Path) -> str | None:
    """Why ``checkpoint`` is not complete, from its manifest and the sizes of its files; None if it is complete.

    One of a newer format counts as complete: somebody else can read it.
    """
    try:
        return check_sizes(checkpoint, read_manifest(checkpoint))
    except CheckpointError as error:
        return None if _of_newer_format(checkpoint) else str(error)


def _of_newer_format(checkpoint: Path) -> bool:
    try:
        manifest = checkpoint / MANIFEST
        return manifest.is_file() and newer_format(manifest.read_text()) is not None
    except (OSError, UnicodeDecodeError):
        return False


def has_manifest(checkpoint: Path) -> bool:
    """Whether the folder has a manifest, which is written last: without one it never was a checkpoint."""
    try:
        os.lstat(checkpoint / MANIFEST)
    except PermissionError:
        return True  # who may not look cannot pass it over either
    except OSError:
        return False
    return True


def list_complete(folder: Path) -> list[Path]:
    """All complete checkpoints, in the order of ``list_written``."""
    return [path for path in list_written(folder) if why_incomplete(path) is None]


def list_written(folder: Path) -> list[Path]:
    """All checkpoints, whole or damaged since they were written, newest first.

    Steps beyond ``latest`` come last: they are of a future that was given up when the run went back.
    One that was moved aside counts while nothing has taken its place.
    """
    if not folder.is_dir():
        return []
    places = {path.name: path for path in folder.iterdir() if step_of(path.name) is not None}
    for leftover in unfinished_writes(folder):
        if leftover.kind == "old" and step_of(leftover.final.name) is not None:
            places.setdefault(leftover.final.name, leftover.path)
    latest = read_pointer(folder, LATEST)
    newest_step = step_of(latest.name) if latest else None

    def age(name: str) -> tuple[bool, int]:
        step = step_of(name) or 0
        return newest_step is not None and step > newest_step, -step

    return [places[name] for name in sorted(places, key=age) if has_manifest(places[name])]

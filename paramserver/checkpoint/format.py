"""The stored format of a checkpoint, and of the folder that holds a run's checkpoints.

::

    checkpoints/step-00000100/              a checkpoint: no folder gets such a name before it is complete
        manifest.json                       step, format version, and size and SHA-256 of every other file
        model.pt, optimizer.pt, run.pt      weights; optimizer state; counts, schedule, consistency
        trainer-0.pt, ...                   random states, buffer and position of each trainer
    checkpoints/latest, best                text files with the name of a step folder
    checkpoints/.step-00000100.<pid>.tmp    being written by process <pid>
    checkpoints/.step-00000100.<pid>.old    moved aside while another of the same step replaces it
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

from paramserver.errors import CheckpointError, kind_and_message
from paramserver.fileio import json_text

FORMAT_VERSION = 3
MANIFEST = "manifest.json"
LATEST = "latest"
BEST = "best"
_DIGEST_KEY = "manifest_sha256"
_OWN_KEYS = ("format_version", "step", "created", "files", _DIGEST_KEY)
_CHUNK_BYTES = 1 << 20
_STEP_FOLDER = re.compile(r"step-([0-9]{8,18})")
_UNFINISHED = re.compile(r"\.(?P<name>[^.]+)\.\d+\.(?P<kind>tmp|old|gone)")
# What parsing a text raises that is not a manifest.
_WRONG = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)


class OtherFormatError(CheckpointError):
    """A manifest has another format version: another release can read the checkpoint."""


@dataclass(frozen=True)
class FileEntry:
    """Size and hexadecimal SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    step: int
    created: str
    files: Mapping[str, FileEntry]  # size and digest of every other file, by name
    metadata: Mapping[str, Any] = field(default_factory=dict)  # further entries (mode, trainers, ...)
    format_version: int = FORMAT_VERSION  # of the files and what is in them

    def __post_init__(self) -> None:
        taken = sorted(set(_OWN_KEYS) & set(self.metadata))
        if taken:
            raise ValueError(f"metadata ({', '.join(taken)}) must not use the manifest's own keys; rename them")

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    def to_text(self) -> str:
        """Return the JSON text, with a digest of itself as its last key; ``parse`` is the inverse."""
        files = {name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in self.files.items()}
        own = {"format_version": self.format_version, "step": self.step, "created": self.created}
        # The digest is of what a reader parses, after ``json_text`` has replaced numbers that are not finite and keys
        # that are no strings.
        content = json.loads(json_text({**own, **self.metadata, "files": files}))
        return json.dumps({**content, _DIGEST_KEY: _manifest_digest(content)}, indent=2) + "\n"

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Read what ``to_text`` returned.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError: it is not a manifest, or
                was altered.
        """
        content = json.loads(text)
        # Before any other key is read: an altered manifest could list files that pass their own digests.
        if content.pop(_DIGEST_KEY) != _manifest_digest(content):
            raise ValueError(f"{_DIGEST_KEY} is not the digest of the rest")
        files = {
            _checked_file_name(name): FileEntry(int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in content["files"].items()
        }
        metadata = {key: value for key, value in content.items() if key not in _OWN_KEYS}
        return cls(int(content["step"]), str(content["created"]), files, metadata, int(content["format_version"]))


def _checked_file_name(name: str) -> str:
    """Return ``name`` if it is that of a file directly in the checkpoint's folder."""
    # A manifest may come from another machine: its names must not lead out of the checkpoint's folder.
    if Path(name).name != name or "\0" in name:
        raise ValueError(f"{name!r} is not the plain name of a file")
    os.fsencode(name)  # a ValueError where no file can have that name
    return name


def _manifest_digest(content: Mapping[str, Any]) -> str:
    # Sorted, so that the digest does not depend on the order of the keys in the file.
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint in ``folder``.

    Raises:
        CheckpointError: it is missing, unreadable, damaged, or of another format version.
    """
    path = folder / MANIFEST
    if os.path.lexists(path) and not path.is_file():
        raise CheckpointError(f"{path} cannot be read (it is not a file)")
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing, so {folder} is not a complete checkpoint") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    # Before the digest: another version may compute it differently, and must not be reported as damage.
    version = _other_format(text)
    if version is not None:
        cure = "update paramserver" if version > FORMAT_VERSION else "resume it with the release that wrote it"
        raise OtherFormatError(
            f"{path} has format version {version}, and this release of paramserver reads version {FORMAT_VERSION}; "
            f"{cure}"
        )
    try:
        return Manifest.parse(text)
    except _WRONG as error:
        raise CheckpointError(f"{path} is damaged ({kind_and_message(error)})") from error


def _other_format(text: str) -> int | None:
    """Return the format version of a manifest's ``text`` where it is not ours. Everything else in it may differ."""
    try:
        version = json.loads(text)["format_version"]
    except _WRONG:
        return None  # not a manifest at all: ``Manifest.parse`` reports it
    return version if isinstance(version, int) and version != FORMAT_VERSION else None


def check_sizes(folder: Path, manifest: Manifest) -> str | None:
    """Return what is missing or has a wrong size in ``folder``; None if nothing. Reads no content."""
    for name, entry in manifest.files.items():
        path = folder / name
        size = _size_bytes(path)
        if size is None:
            return f"{path} is missing"
        if size != entry.bytes:
            return f"{path} has {size} bytes where its manifest lists {entry.bytes}"
    return None


def _size_bytes(path: Path) -> int | None:
    """None where the file does not exist, or no longer: its run may be removing it."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def check_digests(folder: Path, manifest: Manifest) -> str | None:
    """As ``check_sizes``, and also compare the content of every file with its SHA-256."""
    # Sizes first: a truncated file of many GB is found without reading it.
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


@dataclass(frozen=True)
class UnfinishedWrite:
    """What a process is writing, replacing or removing, or was when it died; ``kind`` is tmp, old or gone."""

    path: Path
    final: Path
    kind: str


def step_name(step: int) -> str:
    """Return the name of the folder of ``step``.

    Raises:
        ValueError: ``step`` is negative.
    """
    if step < 0:
        raise ValueError(f"step ({step}) must be 0 or more")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a folder; None where ``name`` is not that of a checkpoint."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match.group(1)) if match else None


def temporary_path(final: Path, kind: str) -> Path:
    """Return the hidden path at which this process keeps the ``tmp``, ``old`` or ``gone`` state of ``final``."""
    return final.with_name(f".{final.name}.{os.getpid()}.{kind}")


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_pointer(folder: Path, pointer: str) -> Path | None:
    """Return the checkpoint that ``latest`` or ``best`` names, whether it exists or not; None without such a file.

    Raises:
        CheckpointError: ``pointer`` is not a file, or not one that this user may read.
    """
    file = folder / pointer
    if not os.path.lexists(file):
        return None
    if not file.is_file():
        raise CheckpointError(f"{file} must be a file with the name of a checkpoint, and is none; move it away")
    try:
        name = file.read_text().strip()
    # Removed since the check above, or damaged. Neither hides a checkpoint: the caller then takes the newest one
    # written.
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"{file} must be a file with the name of a checkpoint ({error.strerror or error}); move it away"
        ) from error
    return folder / name if step_of(name) is not None else None


def unfinished_writes(folder: Path) -> list[UnfinishedWrite]:
    """Return everything in ``folder`` that is being written, replaced or removed, or was when its process died."""
    matches = [(path, _UNFINISHED.fullmatch(path.name)) for path in sorted(folder.iterdir())]
    return [UnfinishedWrite(path, folder / m["name"], m["kind"]) for path, m in matches if m]


def why_incomplete(checkpoint: Path) -> str | None:
    """Return why ``checkpoint`` is incomplete, by its manifest and the sizes of its files; None if it is complete.

    One of another format version counts as complete: another release can read it.
    """
    try:
        return check_sizes(checkpoint, read_manifest(checkpoint))
    except OtherFormatError:
        return None
    except CheckpointError as error:
        return str(error)


def has_manifest(checkpoint: Path) -> bool:
    """Whether the folder has a manifest. It is written last, so without one the folder never was a checkpoint."""
    try:
        os.lstat(checkpoint / MANIFEST)
    except PermissionError:
        return True  # cannot be ruled out, so it must not be skipped
    except OSError:
        return False
    return True


def list_complete(folder: Path) -> list[Path]:
    """Return all complete checkpoints, in the order of ``list_written``."""
    return [path for path in list_written(folder) if why_incomplete(path) is None]


def list_written(folder: Path) -> list[Path]:
    """Return all checkpoints, intact or damaged since they were written, newest first.

    Steps after ``latest`` come last: the run was resumed from an earlier step and has abandoned them. A checkpoint that
    was moved aside counts until another has replaced it.
    """
    if not folder.is_dir():
        return []
    places = {path.name: path for path in folder.iterdir() if step_of(path.name) is not None}
    for unfinished in unfinished_writes(folder):
        if unfinished.kind == "old" and step_of(unfinished.final.name) is not None:
            # ``setdefault``: once the successor has the final name, it is the checkpoint, also before the old one is
            # removed.
            places.setdefault(unfinished.final.name, unfinished.path)
    latest = read_pointer(folder, LATEST)
    newest_step = step_of(latest.name) if latest else None

    def age(name: str) -> tuple[bool, int]:
        step = step_of(name) or 0
        return newest_step is not None and step > newest_step, -step

    return [places[name] for name in sorted(places, key=age) if has_manifest(places[name])]

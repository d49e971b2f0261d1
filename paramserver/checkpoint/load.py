"""Finding a checkpoint, and reading it after every file was compared with the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paramserver.checkpoint.format import (
    BEST,
    LATEST,
    MANIFEST,
    FileEntry,
    Manifest,
    check_digests,
    has_manifest,
    list_complete,
    list_written,
    read_manifest,
    read_pointer,
    step_name,
    step_of,
    why_incomplete,
)
from paramserver.errors import CheckpointError

# A run that saves every step and keeps one checkpoint may remove the chosen one at every attempt.
_MAX_ATTEMPTS = 10


class ObjectMissingError(CheckpointError):
    """An intact checkpoint does not hold an object. ``path`` is its folder, and ``name`` what it should hold."""

    def __init__(self, path: Path, name: str, names: Sequence[str]) -> None:
        super().__init__(f"checkpoint {path} holds no {name!r} (it holds {', '.join(names)})")
        self.path, self.name = path, name


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were all compared with their SHA-256: see ``read_checkpoint``."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def num_trainers(self) -> int:
        """How many trainers stored a part.

        Raises:
            CheckpointError: the manifest does not contain it.
        """
        trainers = self.manifest.metadata.get("trainers")
        if not isinstance(trainers, int) or isinstance(trainers, bool) or trainers < 1:
            raise CheckpointError(
                f"trainers ({trainers}) in {self.path / MANIFEST} must be how many trainers stored a part of that "
                "checkpoint; resume from another one"
            )
        return trainers

    @property
    def names(self) -> tuple[str, ...]:
        """The names that ``load`` and ``read_bytes`` accept: those of the files, without ``.pt``."""
        return tuple(name.removesuffix(".pt") for name in self.manifest.files)

    def load(self, name: str) -> Any:
        """Return the object saved as ``name``, by ``torch.load(weights_only=True)``, with its tensors on the CPU.

        Raises:
            CheckpointError: there is no such object, or the file was not written by ``torch.save``.
        """
        # Imported here, because it imports torch: a launcher chooses a checkpoint without it.
        from paramserver.checkpoint.serialization import check_mapping, load_archive

        path = self.file_path(name)
        return check_mapping(load_archive(path), str(path))

    def read_bytes(self, name: str) -> bytes:
        """Return the content of the file saved as ``name``."""
        return self.file_path(name).read_bytes()

    def file_path(self, name: str) -> Path:
        """Return the file that holds ``name``.

        Raises:
            CheckpointError: there is no such object.
        """
        files: Mapping[str, FileEntry] = self.manifest.files
        for candidate in (name, f"{name}.pt"):
            if candidate in files:
                return self.path / candidate
        raise ObjectMissingError(self.path, name, self.names)


def read_checkpoint(path: Path) -> Checkpoint:
    """Verify every file of the checkpoint in the folder ``path`` and open it.

    Raises:
        CheckpointError: a file is missing, damaged, or of another format version; the message names the file and the
            newest intact checkpoint.
    """
    path = Path(path)
    try:
        return _verify(path)
    except CheckpointError as error:
        intact = _newest_intact(path.parent, besides=path)
        cure = "no other checkpoint in that folder is good; start a new run, or --resume another one"
        if intact is not None:
            cure = f"the newest good one is {intact}; resume from it with --resume {intact}"
        raise CheckpointError(f"{error}; {cure}") from error


def load_chosen(run: Path, which: str, *names: str) -> tuple[Checkpoint, list[Any]]:
    """Choose, verify and load from a checkpoint of ``run``, also while another process trains it and removes old ones.

    ``which`` is ``latest``, ``best``, or a step by its number. All objects that are named are in memory on return,
    whatever happens to the files.

    Raises:
        CheckpointError: there is no such checkpoint; or it is damaged, or it disappeared at every attempt.
    """
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        try:
            path = choose_checkpoint(run, which)
        except CheckpointError:
            # A step names one checkpoint for ever, so choosing it again cannot help.
            if which not in (LATEST, BEST) or attempt == _MAX_ATTEMPTS:
                raise
            continue  # it may have been removed after its pointer was read
        # Taken before the first read: a folder that is replaced during the reading gives errors that are no damage.
        folder = _inode(path)
        try:
            checkpoint = _verify(path)
            # Loaded before returning: the run may remove the folder at any moment after this.
            return checkpoint, [checkpoint.load(name) for name in names]
        except ObjectMissingError:
            raise
        except CheckpointError as error:
            if folder == _inode(path) is not None:  # the same folder all the time, so it is damaged
                intact = _newest_intact(path.parent, besides=path)
                other = f"the newest good one is {intact}"
                if intact is None:
                    other = "no other checkpoint in that folder is good"
                raise CheckpointError(f"{error}; {other}") from error
    raise CheckpointError(
        f"checkpoint {which} of {run} was removed or replaced {_MAX_ATTEMPTS} times while it was read; try again when "
        "the run has ended, or give that run a larger checkpoint.keep"
    )


def _inode(folder: Path) -> int | None:
    """Distinguishes a folder from another one that got its name; None where there is none."""
    try:
        return folder.stat().st_ino
    except OSError:
        return None


def _verify(path: Path) -> Checkpoint:
    manifest = read_manifest(path)
    # A copy may have any name, but not the name of another step: that would resume the counts from a wrong step.
    if step_of(path.name) not in (None, manifest.step):
        raise CheckpointError(
            f"{path / MANIFEST} is of step {manifest.step}; if {path.name} was renamed, give it the name of that step"
        )
    wrong = check_digests(path, manifest)
    if wrong:
        raise CheckpointError(wrong)
    return Checkpoint(path, manifest)


def _newest_intact(folder: Path, besides: Path) -> Path | None:
    for candidate in list_complete(folder):
        if candidate.name != besides.name:
            try:
                # By digest, and not only by size: the user is about to be advised to resume from it.
                return _verify(candidate).path
            except CheckpointError:
                continue
    return None


def find_checkpoint(run: Path) -> Path:
    """Choose the checkpoint to resume ``run`` (a folder) from: the one ``latest`` names, or the newest written.

    A folder without a manifest was never completed, and is skipped. A damaged checkpoint is not: silently choosing an
    older one would resume from another state. ``read_checkpoint`` reports the damage.

    Raises:
        CheckpointError: there is none; the message lists what was found.
    """
    folder = Path(run) / "checkpoints"
    latest = read_pointer(folder, LATEST)
    # ``has_manifest`` and not ``why_incomplete``: a damaged ``latest`` is chosen, and reported when it is read.
    if latest is not None and has_manifest(latest):
        return latest
    there = list_written(folder)
    if there:
        return there[0]
    raise CheckpointError(
        f"{folder} must hold a complete checkpoint ({_describe_folder(folder)}); name another run, or start "
        "without --resume"
    )


def choose_checkpoint(run: Path, which: str) -> Path:
    """Return the checkpoint of ``run`` (a folder) that ``which`` names: ``latest``, ``best``, or a step by its number.

    Raises:
        CheckpointError: there is none; the message lists those that exist.
    """
    if which == LATEST:
        return find_checkpoint(run)
    folder = Path(run) / "checkpoints"
    found = read_pointer(folder, BEST) if which == BEST else None
    if which.isascii() and which.isdecimal():
        found = folder / step_name(int(which))
    if found is not None and found.is_dir():
        return found
    there = ", ".join(str(step_of(path.name)) for path in list_complete(folder)) or "none"
    if which == BEST:
        raise CheckpointError(
            f"checkpoint best of {run} must exist, and no validation has marked one, as only a run with "
            f"checkpoint.best and a validation_source does; choose {LATEST}, or one of the steps {there}"
        )
    best = f", {BEST}" if read_pointer(folder, BEST) is not None else ""
    raise CheckpointError(f"checkpoint {which} of {run} must exist; there are {LATEST}{best} and the steps {there}")


def skipped_checkpoints(checkpoint: Path) -> list[str]:
    """Return why each newer checkpoint next to ``checkpoint`` was skipped: what makes it incomplete. Newest first."""
    found = [(step_of(path.name), path) for path in checkpoint.parent.iterdir()]
    own = step_of(checkpoint.name) or 0
    newer = sorted(((step, path) for step, path in found if step is not None and step > own), reverse=True)
    return [wrong for _, path in newer if (wrong := why_incomplete(path)) is not None]


def _describe_folder(folder: Path) -> str:
    if not folder.is_dir():
        return "there is no such folder"
    latest = read_pointer(folder, LATEST)
    steps = sorted((path for path in folder.iterdir() if step_of(path.name) is not None), reverse=True)
    seen = [f"{LATEST} names {latest.name}" if latest else f"no {LATEST}"]
    seen += [str(why_incomplete(path)) for path in steps[:3]] or ["no step folder"]
    return "looked at: " + "; ".join(seen)

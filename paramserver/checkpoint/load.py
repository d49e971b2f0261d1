"""Finding a checkpoint and reading it: nothing is handed out that is not whole."""

from collections.abc import Mapping
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
    list_complete,
    has_manifest,
    read_pointer,
    why_incomplete,
    read_manifest,
    step_name,
    step_of,
    list_written,
)
from paramserver.errors import CheckpointError

# A run that saves every step and keeps one removes what a reader has chosen as often as it makes steps.
_MAX_ATTEMPTS = 10


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were all compared with their SHA-256."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def num_trainers(self) -> int:
        """How many trainers stored a part.

        Raises:
            CheckpointError: the manifest does not say it.
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
        """What ``load`` and ``bytes`` take: the file names without ``.pt``."""
        return tuple(name.removesuffix(".pt") for name in self.manifest.files)

    def load(self, name: str) -> Any:
        """Return the object saved as ``name``, by ``torch.load(weights_only=True)``, its tensors on the CPU.

        Raises:
            CheckpointError: there is no such object, or it is not one that ``torch.save`` wrote.
        """
        from paramserver.checkpoint.serialization import load_archive

        return load_archive(self.file_path(name))

    def read_bytes(self, name: str) -> bytes:
        """Return the content of the file saved as ``name``, as it is."""
        return self.file_path(name).read_bytes()

    def file_path(self, name: str) -> Path:
        """Return where ``name`` is stored.

        Raises:
            CheckpointError: there is no such object.
        """
        files: Mapping[str, FileEntry] = self.manifest.files
        for candidate in (name, f"{name}.pt"):
            if candidate in files:
                return self.path / candidate
        raise CheckpointError(f"checkpoint {self.path} holds no {name!r} (it holds {', '.join(self.names)})")


def read_checkpoint(path: Path) -> Checkpoint:
    """Check every file of the checkpoint in the folder ``path`` and open it.

    Raises:
        CheckpointError: something is missing, damaged, or of a newer version; names it and the newest good checkpoint.
    """
    path = Path(path)
    try:
        return _verify(path)
    except CheckpointError as error:
        good = _newest_intact(path.parent, besides=path)
        cure = "no other checkpoint beside it is good; start anew, or --resume another run"
        if good is not None:
            cure = f"the newest good one is {good}; go on from it with --resume {good}"
        raise CheckpointError(f"{error}; {cure}") from error


def load_chosen(run: Path, which: str, *names: str) -> tuple[Checkpoint, list[Any]]:
    """Choose, check and load from a checkpoint of ``run``, also beside the process that trains it and removes old ones.

    One that goes away meanwhile is looked for again: ``latest`` and ``best`` then are others.

    Args:
        run: the folder.
        which: ``latest``, ``best``, or a step by its number.
        names: of the objects to load; in memory they stay, whatever becomes of the files.

    Raises:
        CheckpointError: there is no such checkpoint, or no longer; or it is damaged, or went away each time.
    """
    for look in range(1, _MAX_ATTEMPTS + 1):
        try:
            path = choose_checkpoint(run, which)
        except CheckpointError:
            if which not in (LATEST, BEST) or look == _MAX_ATTEMPTS:
                raise
            continue  # it may have been removed after the pointer to it was read
        folder = _identity(path)
        try:
            checkpoint = _verify(path)
            return checkpoint, [checkpoint.load(name) for name in names]
        except CheckpointError as error:
            if folder == _identity(path) is not None:
                raise CheckpointError(f"{error}; {_alternative(path)}") from error
    raise CheckpointError(
        f"checkpoint {which} of {run} was removed or replaced {_MAX_ATTEMPTS} times while it was read; try again when the run "
        "has ended, or give that run a larger checkpoint.keep"
    )


def _alternative(damaged: Path) -> str:
    good = _newest_intact(damaged.parent, besides=damaged)
    return "no other checkpoint beside it is good" if good is None else f"the newest good one is {good}"


def _identity(folder: Path) -> int | None:
    """Tells a folder from another one that took its name; None where there is none."""
    try:
        return folder.stat().st_ino
    except OSError:
        return None


def _verify(path: Path) -> Checkpoint:
    manifest = read_manifest(path)
    if step_of(path.name) not in (None, manifest.step):
        raise CheckpointError(f"{path} holds the checkpoint of step {manifest.step}; give it the name of that step")
    wrong = check_digests(path, manifest)
    if wrong:
        raise CheckpointError(wrong)
    return Checkpoint(path, manifest)


def _newest_intact(folder: Path, besides: Path) -> Path | None:
    for candidate in list_complete(folder):
        if candidate.name != besides.name and _is_good(candidate):
            return candidate
    return None


def _is_good(path: Path) -> bool:
    try:
        return bool(_verify(path))
    except CheckpointError:
        return False


def find_checkpoint(run: Path) -> Path:
    """Choose the checkpoint to resume ``run`` (a folder) from: the one ``latest`` names, or the newest written.

    One without a manifest was not, and is passed over. Whether the chosen one still is what was written is for
    ``read_checkpoint`` to tell: to take an older one in its place, in silence, would go on from another state.

    Raises:
        CheckpointError: there is none; says what was looked at.
    """
    folder = Path(run) / "checkpoints"
    latest = read_pointer(folder, LATEST)
    if latest is not None and has_manifest(latest):
        return latest
    there = list_written(folder)
    if there:
        return there[0]
    raise CheckpointError(
        f"{folder} must hold a complete checkpoint ({_describe_folder(folder)}); name another run, or start without --resume"
    )


def choose_checkpoint(run: Path, which: str) -> Path:
    """The checkpoint of ``run`` (a folder) that ``which`` names: ``latest``, ``best``, or a step by its number.

    Raises:
        CheckpointError: there is none; names those that there are.
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
    raise CheckpointError(f"checkpoint {which} of {run} must exist; there are {LATEST} and the steps {there}")


def skipped_checkpoints(checkpoint: Path) -> list[str]:
    """What is wrong with those checkpoints beside ``checkpoint`` that are newer and not complete; newest first."""
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

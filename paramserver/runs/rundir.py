"""A run's folder: the files in it, its locks, and finding the newest run."""

from __future__ import annotations

import errno
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from itertools import compress
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from paramserver import __version__
from paramserver.checkpoint.memory import newer_in_memory
from paramserver.cluster import find_job, process_environ
from paramserver.errors import CheckpointError, FolderInUse, UnsupportedConfiguration
from paramserver.fileio import (
    TEMPORARY,
    atomic_write_bytes,
    atomic_write_text,
    explain_disk_errors,
    explain_not_writable,
    is_file,
    is_folder,
    json_text,
)
from paramserver.metrics.sinks import head_of, parse_record
from paramserver.platform import is_alive, start_ticks

_GIT_TIMEOUT_S = 5.0
# A process that has just locked a folder has written its id after this time, or has released the lock.
_HOLDER_WRITTEN_S = 0.5


class _Inside:
    """The path of a file or folder in that of a run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, kind: type[RunDir]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDir:
    """The folder of one run, the files in it, and its locks. ``chosen`` is the checkpoint to resume from."""

    path: Path
    chosen: Path | None = None

    config_file = _Inside("config.yaml")
    environment_file = _Inside("environment.json")
    summary_file = _Inside("summary.json")
    metrics_file = _Inside("metrics.jsonl")
    superseded_file = _Inside("metrics.superseded.jsonl")
    csv_file = _Inside("metrics.csv")
    losses_file = _Inside("losses.json")
    checkpoints_dir = _Inside("checkpoints")
    logs_dir = _Inside("logs")
    tensorboard_dir = _Inside("tensorboard")

    @property
    def name(self) -> str:
        return self.path.name or self.path.absolute().name  # also of the current folder

    def trace_file(self, global_rank: int) -> Path:
        return self.path / "profile" / f"rank-{global_rank}.pt.trace.json"

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint that was written completely, on the disk or in memory."""
        return any(self.checkpoints_dir.glob("step-*/manifest.json")) or newer_in_memory(self.path) is not None

    def remove_half_written(self) -> None:
        """Remove the files that a process was writing when it was killed. The caller holds the lock."""
        for path in self.path.glob(f".*{TEMPORARY}"):
            path.unlink()

    @property
    def resume_command(self) -> str:
        """The command that resumes the run, in the folder where it was started."""
        return f"python -m paramserver.launch --resume {shlex.quote(str(self.path))}"

    def log_file(self, global_rank: int) -> Path:
        return self.logs_dir / f"rank-{global_rank}.log"

    def used_on(self) -> str | None:
        """Return the host of the process that uses the folder; None if none lives on this host.

        Whether one of another host lives is not known.
        """
        for name in (".lock.json", ".reserved.json"):
            holder = read_mapping(self.path / name, json.loads)  # that of a process which was killed is left behind
            host = holder.get("host")
            if holder and (host != socket.gethostname() or _lives(holder)):
                return str(host)
        return None

    def task_folders(self) -> list[Path]:
        """The folders in which the run looked for its task when it began."""
        folders = read_mapping(self.environment_file, json.loads).get("folders")
        known = folders if isinstance(folders, list) else []
        return [Path(folder) for folder in known if isinstance(folder, str) and "\0" not in folder]

    def lock(self, resuming: bool = False) -> AbstractContextManager[None]:
        """Lock the folder for its only writer, rank 0; ``resuming`` selects the cure in the message.

        Raises:
            FolderInUse: another process holds the lock; names it and its host.
            UnsupportedConfiguration: the folder cannot be written to, or its file system has no locks.
        """
        return _locked(self.path, ".lock", resuming)

    def reserve(self, resuming: bool = False) -> AbstractContextManager[None]:
        """Reserve the folder for the whole attempt to start or resume its run.

        Rank 0 locks the folder later, and may be another process. In between, no other process may use it. The kernel
        releases the reservation of a process that is killed.

        Raises:
            FolderInUse, UnsupportedConfiguration: as ``lock``.
        """
        return _locked(self.path, ".reserved", resuming, leaves_file=False)


@contextmanager
def _locked(folder: Path, name: str, resuming: bool, leaves_file: bool = True) -> Iterator[None]:
    holder_file = folder / f"{name}.json"
    cure = "wait until it has ended, or stop it" if resuming else "stop that one, or choose another logging.name"
    # Locked by the kernel, so the lock of a killed process is free. ``thread_local=False``: it may be released in
    # another thread than the one that took it.
    file_lock = FileLock(str(folder / name), timeout=0, thread_local=False)
    with ExitStack() as ends:
        with explain_not_writable(f"run folder {folder}"):
            if not folder.is_dir():
                # Moved or removed. FileLock would make it again, which takes the place to which it is moved back.
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            try:
                _acquire(file_lock, holder_file)
            except Timeout:
                # Read only while the lock is held: the file of a killed process is left behind and describes no holder.
                holder = _holder(holder_file) or "a process that has not written its id yet"
                raise FolderInUse(f"run folder {folder} is in use by another run ({holder}); {cure}") from None
            ends.callback(file_lock.release)
            # Called before the release, or this would remove the files of the next holder.
            if not leaves_file:
                ends.callback(_remove, folder / name)
            about = {"pid": os.getpid(), "started": start_ticks(os.getpid()), "host": socket.gethostname()}
            atomic_write_text(holder_file, json_text(about))
        ends.callback(_remove, holder_file)
        yield


def _remove(file: Path) -> None:
    with explain_disk_errors(file, "file"):
        file.unlink(missing_ok=True)


def _acquire(file_lock: FileLock, holder_file: Path) -> None:
    try:
        file_lock.acquire()
    except Timeout:
        if _holder(holder_file) is not None:
            raise
        # The holder has only just locked it, or is about to release it.
        file_lock.acquire(timeout=_HOLDER_WRITTEN_S)


def _lives(holder: Mapping[str, Any]) -> bool:
    """Return whether the process of this host that wrote ``holder`` lives: another one may have its id by now."""
    pid = holder.get("pid")
    if not isinstance(pid, int) or not is_alive(pid):
        return False
    with suppress(OSError):  # this user may not see it
        return holder.get("started", 0) in (0, start_ticks(pid))  # 0: not known
    return True


def _holder(holder_file: Path) -> str | None:
    holder = read_mapping(holder_file, json.loads)
    return f"process {holder['pid']} on host {holder['host']}" if {"pid", "host"} <= holder.keys() else None


def check_log_folder(base: Path) -> None:
    """Check ``logging.run_dir`` on a host where a rank writes its log, before other ranks wait for it. Makes nothing.

    Raises:
        UnsupportedConfiguration: this user cannot write there.
    """
    existing = next(path for path in (base.absolute(), *base.absolute().parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        code = errno.EACCES if existing.is_dir() else errno.ENOTDIR
        with explain_not_writable(f"logging.run_dir ({base})"):
            raise OSError(code, os.strerror(code))


def newest_run(base: Path, name: str | None = None, task: str | None = None) -> Path:
    """Return the run in ``base`` of this ``logging.name``, else the one of it or of this ``task`` that started last.

    A folder that has the name comes before those whose config has it: a run that was renamed, or a copy.

    Raises:
        CheckpointError: there is none.
    """
    base = Path(base)
    if name is not None and is_file((named := RunDir(base / name)).config_file):
        return named.path
    wanted = next((run for run in newest_first(base) if _is_of(run, name, task)), None)
    if wanted is None:
        which = f"of logging.name {name}" if name is not None else f"of task {task}" if task is not None else "at all"
        looked_at = len(_folders_in(base))
        raise CheckpointError(
            f"{base} must hold a run {which}, and holds none ({looked_at} folders were looked at); "
            "give --resume the folder of a run, or start without it"
        )
    return wanted.path


def newest_first(base: Path) -> list[RunDir]:
    """Return the runs in ``base`` that began, the one that started last first; those that cannot be read are left out.

    A copy of a run, which started at the same time, comes after it.

    Raises:
        UnsupportedConfiguration: ``base`` cannot be read.
    """
    runs = [run for run in map(RunDir, _folders_in(base)) if is_file(run.config_file)]
    # By the recorded time, and not that of the folder, which changes with every file that is made in it.
    return sorted(runs, key=_start_of, reverse=True)


def _folders_in(base: Path) -> list[Path]:
    if not is_folder(base):
        return []
    try:
        return [path for path in base.iterdir() if is_folder(path)]
    except OSError as error:
        raise UnsupportedConfiguration(
            f"{base} must be a folder that this user can read ({error.strerror}); change its permissions"
        ) from error


def _is_of(run: RunDir, name: str | None, task: str | None) -> bool:
    if name is None and task is None:
        return True
    config = read_mapping(run.config_file, yaml.safe_load)
    if name is not None:
        logging = config.get("logging")
        return isinstance(logging, dict) and logging.get("name") == name
    return bool(config.get("task") == task)


def _start_of(run: RunDir) -> tuple[float, bool]:
    """When the run started, and whether it did in this folder."""
    about = read_mapping(run.environment_file, json.loads)
    try:
        started_s = datetime.fromisoformat(str(about.get("started"))).timestamp()
    except ValueError:
        started_s = run.path.stat().st_mtime
    return started_s, about.get("name") == run.name


def read_mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Parse a file of a run; return {} where it is missing or not a mapping, as a crash may leave any part of it."""
    if not path.is_file():
        return {}
    try:
        content = parse(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: Path, obj: Any) -> None:
    """Replace ``path`` by ``obj`` as JSON, atomically; numbers that are not finite become null (see ``json_text``)."""
    write_text(path, json_text(obj, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``, atomically.

    Raises:
        TrainingError: the disk refused; ``path`` is as it was.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """As ``write_text``."""
    with explain_disk_errors(path, "file"):
        atomic_write_bytes(path, content)


def supersede_metrics(metrics_file: Path, step: int, kinds: Collection[str] = ()) -> int:
    """Move the records after ``step`` to ``metrics.superseded.jsonl``, and a line that a crash tore.

    Records of ``kinds`` are moved at ``step`` itself too: they were written after the checkpoint. So were those of any
    kind with ``end: true``, which a run writes only because it ends. Return the number of lines moved; repeating it
    after a crash in its middle moves nothing twice.
    """
    if not metrics_file.exists():
        return 0
    # ``replace``: a crash may leave bytes that are no UTF-8; such a line is torn and moved.
    lines = metrics_file.read_text(errors="replace").removesuffix("\n").split("\n")
    valid = [_is_valid_at(line, step, kinds) for line in lines]
    # The last one may be torn after its head: a session that appends to the file lets it end with a whole line first.
    valid[-1] = valid[-1] and parse_record(lines[-1]) is not None
    moved = [line for line, is_valid in zip(lines, valid, strict=True) if not is_valid]
    if not moved:
        return 0
    superseded_file = metrics_file.with_name(f"{metrics_file.stem}.superseded{metrics_file.suffix}")
    before = superseded_file.read_text(errors="replace") if superseded_file.exists() else ""
    block = _joined(moved)
    if not before.endswith(block):  # else: an earlier call crashed between the two writes
        atomic_write_text(superseded_file, before + block)
    # After the copy: a crash between the two leaves records twice, never in neither file.
    atomic_write_text(metrics_file, _joined(compress(lines, valid)))
    return len(moved)


def _joined(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _is_valid_at(line: str, step: int, kinds: Collection[str]) -> bool:
    """Whether the record in ``line`` remains valid when the run resumes from ``step``. Of a torn line none does."""
    kind, of_step = head_of(line)
    if of_step == step:
        record = parse_record(line)
        return record is not None and kind not in kinds and record.get("end") is not True
    # A record without a step belongs to no version and stays.
    return kind is not None and (of_step is None or of_step < step)


def environment_record(command: Sequence[str]) -> dict[str, Any]:
    """Return where and with which versions a run started, for ``environment.json``. Does not import torch or numpy."""
    job = find_job(process_environ())
    return {
        "started": datetime.now(timezone.utc).isoformat(),
        "command": list(command),
        "job": None if job is None else job.id,
        "versions": {
            "python": platform.python_version(),
            "paramserver": __version__,
            # From the metadata of the packages: importing torch would take seconds before the ranks are started.
            **{package: package_version(package) for package in ("torch", "numpy")},
        },
        "executable": sys.executable,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "git_commit": _git_commit(),
    }


def package_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None

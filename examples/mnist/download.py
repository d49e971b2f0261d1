"""The four files of MNIST: found in a folder, or downloaded into it once for all processes."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from filelock import FileLock, Timeout

from paramserver.errors import TaskError

MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")

# The SHA-256 of each file's .gz, as the mirrors hold it.
CHECKSUMS = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}

_CHUNK_BYTES = 1 << 16
_SOCKET_TIMEOUT_S = 10.0  # after this time without data the next mirror is tried

log = logging.getLogger("paramserver")


def provide(
    folder: Path,
    *,
    download: bool = True,
    mirrors: Sequence[str] = MIRRORS,
    checksums: Mapping[str, str] = CHECKSUMS,
    timeout_s: float = 45.0,
) -> dict[str, Path]:
    """Return the path of each file, by its name without ``.gz``. Existing files are used as they are.

    Args:
        folder: folder of the files, plain or as .gz; missing ones are downloaded into it.
        download: download missing files.
        mirrors: URLs of folders, tried in this order.
        checksums: SHA-256 of each file's .gz, by its name without ``.gz``.
        timeout_s: limit of the whole call, including the wait for another process that downloads.

    Raises:
        TaskError: files are missing and cannot be downloaded; the message names them, the reason and the cure.
    """
    deadline = time.monotonic() + timeout_s
    if not _missing(folder, checksums):
        return _places(folder, checksums)
    if not download:
        raise _refusal(folder, checksums, "task_args.download is false")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=timeout_s):
            for name in _missing(folder, checksums):  # listed again: another process may have downloaded some
                if failures := _download(name, folder, mirrors, checksums[name], deadline):
                    raise _refusal(folder, checksums, f"no mirror gave {name}.gz ({', '.join(failures)})")
    except Timeout as error:
        raise _refusal(folder, checksums, f"another process held {error.lock_file} for {timeout_s:g} s") from None
    except OSError as error:
        raise _refusal(folder, checksums, f"nothing can be written there ({error})") from error
    return _places(folder, checksums)


def _places(folder: Path, names: Mapping[str, str]) -> dict[str, Path]:
    """Return the files that exist."""
    candidates = ((name, folder / f"{name}{ending}") for ending in (".gz", "") for name in names)
    return {name: path for name, path in candidates if path.is_file()}


def _missing(folder: Path, names: Mapping[str, str]) -> list[str]:
    found = _places(folder, names)
    return [name for name in names if name not in found]


def _download(name: str, folder: Path, mirrors: Sequence[str], checksum: str, deadline: float) -> list[str]:
    """Download one file from the first mirror that has it; return no failures, or one per mirror."""
    failures = []
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{name}.gz"
        try:
            _fetch(url, folder / f"{name}.gz", checksum, deadline)
        except (OSError, HTTPException, ValueError) as error:
            failures.append(f"{url}: {error}")
        else:
            log.info("downloaded %s", url)
            return []
    return failures or ["none is named"]


def _fetch(url: str, target: Path, checksum: str, deadline: float) -> None:
    """Download to ``target`` if the checksum matches; no other content ever has that name.

    The caller holds the lock of the folder, so no other process uses the temporary name.
    """
    part = target.with_name(f"{target.name}.part")
    digest = hashlib.sha256()
    try:
        with urlopen(url, timeout=min(_left(deadline), _SOCKET_TIMEOUT_S)) as answer, part.open("wb") as file:
            while chunk := answer.read1(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
                _left(deadline)
        if digest.hexdigest() != checksum:
            raise ValueError(f"the SHA-256 must be {checksum}, and is {digest.hexdigest()}")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _left(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the time for the download is over")
    return left_s


def _refusal(folder: Path, names: Mapping[str, str], why: str) -> TaskError:
    return TaskError(
        f"task_args.folder ({folder}) must hold {', '.join(_missing(folder, names))}, plain or as .gz, and {why}; "
        f"copy them there from {' or '.join(MIRRORS)}, or name the folder where they are"
    )

"""Simulations in .npz files, one each. Single samples are read without loading the rest. Needs numpy only."""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_LOCAL_HEADER_BYTES = (
    30  # of a member of a zip file; its last two fields are the lengths of the name and of the extra field
)


def file_of(folder: Path, simulation: int) -> Path:
    return folder / f"simulation-{simulation:05d}.npz"


def write_simulation(file: Path, parameters: Sequence[float], fields: Iterable[npt.NDArray[np.float32]]) -> None:
    """Store a simulation: ``parameters`` float64 [p], ``temperature`` float32 [steps, n, n].

    The file gets its name when it is complete.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with part.open("wb") as stream:
            np.savez(stream, parameters=np.asarray(parameters, np.float64), temperature=np.stack(list(fields)))
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def read_parameters(file: Path) -> npt.NDArray[np.float64]:
    """The parameters of a stored simulation."""
    return np.array(map_array(file, "parameters"))


def map_array(file: Path, name: str) -> npt.NDArray[Any]:
    """Map an array of an uncompressed .npz read-only. numpy's own ``mmap_mode`` supports plain .npy files only.

    Raises:
        ValueError: the file has no such array, or the array is compressed.
    """
    try:
        with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
            member = archive.getinfo(f"{name}.npy")
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{name} is compressed")
            stream.seek(member.header_offset)
            lengths = struct.unpack("<26x2H", stream.read(_LOCAL_HEADER_BYTES))
            stream.seek(sum(lengths), os.SEEK_CUR)
            np.lib.format.read_magic(stream)
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
            return np.memmap(file, dtype, "r", stream.tell(), shape)
    except (KeyError, ValueError, struct.error, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} must be a simulation that was stored here ({error}); remove it") from error


class StoredSimulations:
    """A map-style data set of a folder: the samples that an online run would receive.

    Args:
        folder: with the files of ``write_simulation``.

    Raises:
        ValueError: the folder has none, a file is damaged, or the shapes differ.
    """

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("simulation-*.npz"))
        if not self.files:
            raise ValueError(f"folder ({folder}) must hold simulations; make them with: python store.py {folder}")
        self.numbers = [int(file.stem.rpartition("-")[2]) for file in self.files]
        self.parameters = [read_parameters(file) for file in self.files]
        self.temperatures = [map_array(file, "temperature") for file in self.files]
        self.shape = self.temperatures[0].shape
        for file, temperature in zip(self.files, self.temperatures, strict=True):
            if temperature.shape != self.shape:
                raise ValueError(f"{file} must have shape {self.shape} as the others, it has {temperature.shape}")

    def __len__(self) -> int:
        return len(self.files) * int(self.shape[0])

    def __getitem__(self, index: int) -> dict[str, Any]:
        which, step = divmod(index, self.shape[0])
        return {
            "simulation": self.numbers[which],
            "step": step,
            "parameters": self.parameters[which],
            "temperature": np.array(self.temperatures[which][step]),
        }

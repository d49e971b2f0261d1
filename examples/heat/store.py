"""Stores the simulations that an online run would start in a folder, for offline training.

    python examples/heat/store.py data/heat [--config examples/heat/config.yaml] [--set simulations.count=10 ...]

Their number, sizes and parameters are those of the config's section ``simulations``, from the same sampler with the
same seed. Each simulation runs in a separate process, as it does online.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from solver import DT
from stored import file_of, read_parameters

from paramserver.config import Config, load_config
from paramserver.online.sampler import make_sampler
from paramserver.online.spec import IngestSpec

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 600.0  # of one simulation


def store(folder: Path, config: Config, dt: float = DT) -> float:
    """Store every simulation of ``config`` that is not stored yet.

    Returns:
        The elapsed seconds.

    Raises:
        RuntimeError: a simulation failed; the others end first.
        ValueError: the folder holds one with other parameters.
    """
    assert config.simulations is not None
    spec = IngestSpec.from_config(config.simulations)
    count = config.simulations.count or 0
    sampler = make_sampler(config.simulations.sampler, spec.parameters, config.seed, count)
    sizes = ["--n", spec.fields[0].shape[0], "--steps", config.simulations.steps, "--dt", dt]
    commands = []
    for simulation in range(count):
        file, parameters = file_of(folder, simulation), [float(value) for value in sampler.draw(simulation)]
        if not _is_stored(file, parameters):
            commands.append(["--file", file, "--parameters", *parameters, *sizes])
    began = time.monotonic()
    with ThreadPoolExecutor(config.simulations.at_once) as pool:
        list(pool.map(_run, commands))
    return time.monotonic() - began


def _is_stored(file: Path, parameters: Sequence[float]) -> bool:
    if not file.exists():
        return False
    if not np.array_equal(read_parameters(file), parameters):
        raise ValueError(f"{file} must hold the parameters that the config gives it; choose another folder")
    return True


def _run(arguments: Sequence[object]) -> None:
    command = [sys.executable, str(HERE / "simulate.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", type=Path, default=HERE / "config.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    arguments = parser.parse_args()
    seconds = store(arguments.folder, load_config(arguments.config, overrides=arguments.overrides))
    size = sum(file.stat().st_size for file in arguments.folder.glob("simulation-*.npz"))
    print(f"{arguments.folder}: {size / 1e6:.0f} MB, {seconds:.1f} s")


if __name__ == "__main__":
    main()

"""One simulation of the heat equation, which sends each field as soon as it is computed, or stores all of them.

Use it as ``simulations.function`` of a config, as ``simulations.command``, or as a program that the user starts::

    python simulate.py                                                          started by a run, which sets the rest
    python simulate.py --address tcp://127.0.0.1:5555 --simulation 3 --parameters 300 100 200 300 400
    python simulate.py --file data/heat/simulation-00003.npz --parameters 300 100 200 300 400 --n 100

It needs numpy for the solver and pyzmq for the client, but no torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from solver import DIFFUSIVITY, DT, PARAMETERS, solve
from stored import write_simulation

if TYPE_CHECKING:
    from paramserver.client import Client

N, STEPS = 32, 100


def simulate(parameters: Iterable[float], client: Client, dt: float = DT) -> None:
    """Solve, and send as many fields as the run expects, in its size. ``send`` waits while the buffers are full."""
    n, _ = client.fields["temperature"]
    for step, temperature in enumerate(solve(parameters, n, client.steps or STEPS, dt)):
        client.send(step, {"temperature": temperature})


def simulate_to_disk(parameters: Sequence[float], file: Path, n: int = N, steps: int = STEPS, dt: float = DT) -> None:
    """Write the same samples to a file."""
    write_simulation(file, parameters, solve(parameters, n, steps, dt))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=N, help="--file: inner points in each direction (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="--file: samples (%(default)s)")
    parser.add_argument("--dt", type=float, default=DT, help="length of a step (%(default)s)")
    parser.add_argument("--parameters", type=float, nargs="+", help=", ".join((*PARAMETERS, f"[{DIFFUSIVITY}]")))
    parser.add_argument("--simulation", type=int, help="its number, if no run started it")
    parser.add_argument("--address", help="of the run, if no run started it")
    parser.add_argument("--keys", help="folder of keys, for an address beyond loopback")
    parser.add_argument("--file", type=Path, help="store the fields here; send nothing")
    return parser


def main() -> None:
    parser = make_parser()
    arguments = parser.parse_args()
    if arguments.file is not None:
        if arguments.parameters is None:
            parser.error("--file needs --parameters")
        simulate_to_disk(arguments.parameters, arguments.file, arguments.n, arguments.steps, arguments.dt)
        return
    from paramserver.client import Client

    with Client(arguments.address, keys=arguments.keys).open(arguments.simulation, arguments.parameters) as client:
        simulate(client.parameters, client, arguments.dt)


if __name__ == "__main__":
    main()

"""``python -m tests.simulation --seeds 1000000``: runs of many seeds; a seed that fails is printed."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence

from tests.simulation.simulation import SimulatedRun, simulate

_CHUNK = 100


def run_chunk(seeds: range) -> list[SimulatedRun]:
    """Run the worlds of these seeds, in any process."""
    return [simulate(seed) for seed in seeds]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    parser.add_argument("--most", type=int, default=10, help="end after so many failures")
    args = parser.parse_args(arguments)
    if args.seed is not None:
        outcome = simulate(args.seed, tracing=args.trace)
        print("\n".join(outcome.trace), end="\n" if outcome.trace else "")
        print(f"seed {outcome.seed}: {outcome.violation or 'all invariants hold'} (digest {outcome.digest:08x})")
        return int(outcome.violation is not None)
    began = time.perf_counter()
    last = args.first + args.seeds
    chunks = [range(first, min(first + _CHUNK, last)) for first in range(args.first, last, _CHUNK)]
    failures = done = events = redone = generations = replaced = 0
    with multiprocessing.get_context("fork").Pool(args.processes) as pool:
        for outcomes in pool.imap(run_chunk, chunks):
            for outcome in outcomes:
                done, events, redone = done + 1, events + outcome.events, redone + outcome.redone
                generations, replaced = generations + outcome.generations - 1, replaced + outcome.incarnations - 1
                if outcome.violation is not None:
                    failures += 1
                    print(f"seed {outcome.seed}: {outcome.violation}")
                    print(f"    python -m tests.simulation --seed {outcome.seed} --trace", flush=True)
            if failures >= args.most:
                break
    print(
        f"{done} seeds, {failures} with a violation, {time.perf_counter() - began:.1f} s: {events} events, "
        f"{generations} restarts of the server, {redone} updates made again, at most {replaced} replaced trainers"
    )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())

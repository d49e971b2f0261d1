"""How much a buffer adds to the bare gather of a batch.

Per kind: the median time of ``get_batch(256)`` from 100,000 samples of 4 KB (float32[1024]) over the median time of one
numpy gather ``array[rows]`` of the same rows from an array of the same shape (not the same memory, so neither finds the
other's rows in the cache). The two alternate, one torch thread, and both allocate what they return.

    python -m tests.measure.buffer_gather [--samples 100000] [--batch 256] [--gets 200] [--repeats 5]
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from paramserver.buffers import Buffer, make_buffer
from tests.measure.common import parser_of

WIDTH = 1024


def filled(kind: str, array: np.ndarray) -> Buffer:
    """A buffer that holds the rows of ``array`` and can be drawn from without ever running low."""
    pseudo_epochs = 1 if kind == "reservoir" else 10**6
    buffer = make_buffer(kind, capacity=len(array), pseudo_epochs=pseudo_epochs)
    buffer.put_many(array, keys=range(len(array)), timeout=60)
    return buffer


def medians(buffer: Buffer, array: np.ndarray, batch: int, gets: int) -> tuple[float, float]:
    """Median seconds of a get and of a bare gather of the same rows, taken in turns."""
    get_s, gather_s = [], []
    for _ in range(gets):
        started = time.perf_counter()
        drawn = buffer.get_batch(batch, timeout=60)
        get_s.append(time.perf_counter() - started)
        rows = np.array(drawn.keys)
        del drawn
        started = time.perf_counter()
        gathered = array[rows]
        gather_s.append(time.perf_counter() - started)
        del gathered
    return statistics.median(get_s), statistics.median(gather_s)


def main() -> None:
    parser = parser_of(__doc__, samples=100_000, batch=256, gets=200, repeats=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    array = rng.random((args.samples, WIDTH), np.float32)
    for kind in ("fifo", "firo", "reservoir"):
        buffer = filled(kind, array)
        medians(buffer, array, args.batch, 20)  # warm
        pairs = [medians(buffer, array, args.batch, args.gets) for _ in range(args.repeats)]
        ratios = [get / gather for get, gather in pairs]
        get_us, gather_us = (1e6 * statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"{kind:9s} get_batch({args.batch}) {get_us:7.1f} us, numpy gather {gather_us:7.1f} us, "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
        buffer.close()


if __name__ == "__main__":
    main()

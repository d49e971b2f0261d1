"""A subscriber in a process of its own, without torch: reads versions to the end of the run, and prints what it saw.

    python follower.py ADDRESS [ENCODING] [counted]

Prints a line ``VERSIONS SECONDS BYTES`` at the end of the run. With ``counted`` all numbers of a version but the module
buffer ``steps`` must be its step; a version that is torn, or older than the one before, ends it with code 1.
"""

import sys
import time

import numpy as np

from paramserver.errors import RunOver
from paramserver.subscriber import Subscriber

LIMIT_S = 120


def read(weights, counted):
    """Touch all bytes of a version."""
    arrays = [array for name, array in weights.items() if name != "steps"]
    if not counted:
        return sum(float(np.sum(array, dtype=np.float64)) for array in arrays)
    found = {float(value) for array in arrays for value in (array.min(), array.max())}
    assert found == {weights.step}, f"torn: {weights} has {found}"
    return 0.0


def main(address, encoding="exact", counted=""):
    versions = num_bytes = 0
    began = time.monotonic()
    with Subscriber(address, encoding=encoding) as model:
        weights = model.latest(timeout_s=LIMIT_S)
        try:
            while True:
                read(weights, bool(counted))
                versions, num_bytes = versions + 1, num_bytes + len(weights.data)
                newer = model.newer_than(weights.version, timeout_s=LIMIT_S)
                assert newer is not None, "the run has neither ended nor made a version"
                assert newer.version > weights.version, f"{newer} is older than {weights}"
                weights = newer
        except RunOver:
            print(versions, time.monotonic() - began, num_bytes)


if __name__ == "__main__":
    main(*sys.argv[1:])

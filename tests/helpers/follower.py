"""Subscribers, without torch: each reads versions to the end of the run. ``following`` is one in a thread.

    python follower.py ADDRESS [ENCODING] [counted]

Prints a line ``VERSIONS SECONDS BYTES`` at the end of the run. With ``counted`` all numbers of a version but the module
buffer ``steps`` must be its step; a version that is torn, or older than the one before, ends it with code 1.
"""

import sys
import threading
import time
from contextlib import contextmanager

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


def versions(address, encoding="exact"):
    """Every version that is received, to the end of the run; each is newer than the one before."""
    with Subscriber(address, encoding=encoding) as model:
        weights = model.latest(timeout_s=LIMIT_S)
        try:
            while True:
                yield weights
                newer = model.newer_than(weights.version, timeout_s=LIMIT_S)
                assert newer is not None, "the run has neither ended nor made a version"
                assert newer.version > weights.version, f"{newer} is older than {weights}"
                weights = newer
        except RunOver:
            return


class Follower(threading.Thread):
    """Receives every version that it can until the run ends, and compares all numbers in each with its step.

    Args:
        counts: the module buffer ``steps`` is the step too.
    """

    def __init__(self, address, encoding="exact", counts=True):
        super().__init__()
        self.address, self.encoding, self.counts = address, encoding, counts
        self.received, self.error = [], None

    def run(self):
        try:
            for weights in versions(self.address, self.encoding):
                read(weights, counted=True)
                assert not self.counts or int(weights["steps"]) == weights.step
                self.received.append(weights)
        except BaseException as error:  # noqa: BLE001 - raised by ``following``
            self.error = error

    @property
    def steps(self):
        return [weights.step for weights in self.received]


@contextmanager
def following(address, **options):
    """A follower during a block, which must have received nothing wrong by its end."""
    follower = Follower(address, **options)
    follower.start()
    yield follower
    follower.join(LIMIT_S)
    assert not follower.is_alive()
    if follower.error is not None:
        raise follower.error


def main(address, encoding="exact", counted=""):
    count = num_bytes = 0
    began = time.monotonic()
    for weights in versions(address, encoding):
        read(weights, bool(counted))
        count, num_bytes = count + 1, num_bytes + len(weights.data)
    print(count, time.monotonic() - began, num_bytes)


if __name__ == "__main__":
    main(*sys.argv[1:])

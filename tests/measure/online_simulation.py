"""The simulation of tests/measure/online.py, which needs no torch."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np


def simulate(parameters: Any, client: Any) -> None:
    """Send numbers that no other simulation sends; number 1 kills itself once in its middle if its parameter is set."""
    for step in range(client.steps):
        if client.simulation == 1 and client.attempt == 0 and step == client.steps // 2 and parameters[1] > 0.5:
            os.kill(os.getpid(), signal.SIGKILL)
        client.send(step, {"u": np.full(client.fields["u"], 1000 * client.simulation + step, np.float32)})

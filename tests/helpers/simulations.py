"""Simulations of the tests, which need no torch; every sample is different."""

import os
import signal
import time
from pathlib import Path

import numpy as np

SHAPE = (4, 3)


def field(simulation, step, parameters):
    """The sample of a simulation at a step; every sample is different."""
    rng = np.random.default_rng([simulation, step])
    return (rng.standard_normal(SHAPE) + parameters.sum()).astype("float32")


def simulate(parameters, client):
    """As many steps as there are."""
    for step in range(client.steps):
        client.send(step, {"u": field(client.simulation, step, parameters)})


def simulate_group(parameters, client):
    """Each member sends its rows."""
    rows = np.array_split(np.arange(SHAPE[0]), client.members)[client.member]
    for step in range(client.steps):
        client.send(step, {"u": field(client.simulation, step, parameters)[rows]})


def die_once(client, step):
    """Kill the process of an odd simulation in its middle, the first time; a file in the working directory says so."""
    if client.simulation % 2 and client.attempt == 0 and step == client.steps // 2:
        Path(f"killed-{client.simulation}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def simulate_killed_once(parameters, client):
    """Simulation 1 is killed in its middle, the first time."""
    for step in range(client.steps):
        if client.simulation == 1:
            die_once(client, step)
        client.send(step, {"u": field(client.simulation, step, parameters)})


def simulate_continued(parameters, client):
    """As ``simulate_killed_once``, and continues where the run lacks a step; leaves where that was."""
    steps = client.steps or 8
    if client.simulation == 1:
        Path(f"first-step-{client.attempt}").write_text(str(client.first_step))
    for step in range(client.first_step, steps):
        if client.simulation == 1 and client.attempt == 0 and step == steps // 2:
            time.sleep(1.5)  # until the trainers have reported what they have
            os.kill(os.getpid(), signal.SIGKILL)
        client.send(step, {"u": field(client.simulation, step, parameters)})


def simulate_hopeless(parameters, client):
    """Fails at its first step."""
    raise RuntimeError("the solver diverged on purpose")


def simulate_watched(parameters, client):
    """Leaves its pid in the folder of the run, sends one sample and computes for ever."""
    Path(f"pid-{os.getpid()}").touch()
    client.send(0, {"u": field(client.simulation, 0, parameters)})
    signal.pause()


def simulate_silent(parameters, client):
    """Lives and sends nothing."""
    time.sleep(600)


def simulate_wrong(parameters, client):
    """Simulation 0 sends a NaN at step 2 before the right one at its end."""
    order = list(range(client.steps))
    for step in order:
        values = field(client.simulation, step, parameters)
        if client.simulation == 0 and step == 2:
            spoilt = values.copy()
            spoilt[0, 0] = np.nan
            client.send(step, {"u": spoilt})
            continue
        client.send(step, {"u": values})


MAX_STALENESS = 2


def act(parameters, client):
    """Sends the version that it has; even simulations keep their first one, and odd ones take the newest.

    The last sample of simulation 0 is certainly too old.
    """
    from paramserver.subscriber import Subscriber

    with Subscriber() as model:
        weights = model.latest(timeout_s=20)
        for step in range(client.steps):
            if client.simulation == 1:
                die_once(client, step)
            if client.simulation % 2:
                weights = model.newer_than(weights.version, timeout_s=0) or weights
            elif client.simulation == 0 and step == client.steps - 1:
                model.newer_than((weights.version.generation, weights.step + MAX_STALENESS), timeout_s=20)
            client.send(step, {"u": field(client.simulation, step, parameters)}, version=weights.version)


def act_as_planned(parameters, client):
    """Sends versions that do not depend on timing."""
    for step in range(client.steps):
        client.send(
            step, {"u": field(client.simulation, step, parameters)}, version=(1, (client.simulation + step) % 2)
        )


def act_of_the_future(parameters, client):
    """At the first attempt one sample has a version that there is not yet."""
    for step in range(client.steps):
        version = (1, 10**6) if (client.attempt, step) == (0, 3) else (1, 0)
        client.send(step, {"u": field(client.simulation, step, parameters)}, version=version)


def act_too_late(parameters, client):
    """All samples are of the first version, and come slowly."""
    for step in range(client.steps):
        client.send(step, {"u": field(client.simulation, step, parameters)}, version=(1, 0))
        time.sleep(0.05)

"""The actor of examples/actors, which every second time is killed in its middle. It needs that folder in its path."""

import time

import actor
from simulations import die_once


class Killed:
    """A client of an actor that is killed before it sends the sample at half of its steps, the first time."""

    def __init__(self, client, pace_s):
        self._client, self._pace_s = client, pace_s

    def __getattr__(self, name):
        return getattr(self._client, name)

    def send(self, step, *sample, **options):
        time.sleep(self._pace_s)  # the time that an environment computes
        die_once(self, step)
        self._client.send(step, *sample, **options)


def act(parameters, client):
    actor.act(parameters, Killed(client, 0.0))


def act_slowly(parameters, client):
    actor.act(parameters, Killed(client, 0.05))

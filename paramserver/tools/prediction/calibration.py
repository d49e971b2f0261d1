"""From measured runs to a deployment that can be simulated: its compute, its size, and the costs that explain it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product

import torch
import yaml

from paramserver.config import config_from_mapping, mode_of, server_computes
from paramserver.errors import UnsupportedConfiguration
from paramserver.parameters.flat import FlatLayout
from paramserver.tools.bench.cost_model import LinkSpeed
from paramserver.tools.bench.slowdown import SlowdownSpec
from paramserver.tools.prediction.network import Costs, Deployment, simulate
from paramserver.tools.report.results import CaseResult
from paramserver.transport.compression import make_codec

JITTER = 0.05
"""By what the compute of a step varies where nothing else is known; without it trainers would stay in step for ever."""

TRANSFER_JITTER = 0.3
"""By what transfers vary: TCP does not give each the same rate. Chosen with measurements (docs/scale.md)."""

_COMPUTES = ("data", "forward")
# How often a parameter is tried at this multiple of its value, and at its reciprocal.
_FACTORS = (3.0, 1.4, 1.1)
# The costs of a message and of its bytes take the place of each other, so a search parameter by parameter ends between
# them. It begins at the best of these multiples of both.
_STARTS = (0.3, 1.0, 3.0, 10.0)
_MOST_STARTS = 2
# A cost that is 4 times its default counts like an error of 4 % in each run: what runs do not show keeps its default.
_PRIOR = (0.04 / math.log(4.0)) ** 2
_STEPS, _WARM_STEPS = 12, 3


def deployment_of(
    result: CaseResult, link: LinkSpeed, cores: int, one_machine: bool, costs: Costs | None = None
) -> Deployment:
    """Return what a measured run is for the simulator.

    ``result`` is a completed one, of a mode with servers; ``link`` is of an interface of the hosts. With
    ``one_machine`` the hosts share the ``cores``. ``costs`` are those that were fitted; None for the defaults.

    Raises:
        UnsupportedConfiguration: the result lacks what the simulator needs, or is of a run that it has no model of.
    """
    where = f"the result {result.case}, repeat {result.repeat},"
    text = result.environment.get("config")
    if not isinstance(text, str):
        raise UnsupportedConfiguration(f"{where} must have the config of its run; benchmark again")
    config = config_from_mapping(yaml.safe_load(text))
    if not mode_of(config).has_servers or server_computes(config):
        raise UnsupportedConfiguration(
            f"{where} must be of mode rpc with server.compute: trainer, which the simulator models; measure that"
        )
    phases, size = result.phases_ms, result.model_bytes
    if not result.is_completed or not size or not result.samples or not result.steps or not phases.get("forward"):
        raise UnsupportedConfiguration(
            f"{where} must be complete, with model_bytes, steps, samples and phases_ms; benchmark again"
        )
    # The type of the parameters is not in a result; it is float32 with few exceptions.
    exact = FlatLayout((torch.float32,), (1,), ())
    on_wire = make_codec(config.server).wire_layout(exact).dtypes[0].itemsize / exact.dtypes[0].itemsize
    return Deployment(
        config=config,
        message_bytes=size * on_wire,
        forward_s=sum(phases.get(name) or 0.0 for name in _COMPUTES) / 1e3,
        backward_s=(phases.get("backward") or 0.0) / 1e3,
        link=link,
        samples=config.training.batch_size * config.training.accumulate_batches,
        costs=costs or Costs(),
        cores=cores,
        one_machine=one_machine,
        slow=SlowdownSpec(**result.scenario["slow"]) if result.scenario.get("slow") else None,
        jitter=JITTER,
        transfer_jitter=TRANSFER_JITTER,
        seed=result.repeat,
    )


def error_of(deployment: Deployment, samples_per_second: float, steps: int = _STEPS, warm: int = _WARM_STEPS) -> float:
    """Return the simulated throughput over the measured one, less 1."""
    return simulate(deployment, steps, warm).samples_per_second / samples_per_second - 1


def fit(measured: Sequence[tuple[Deployment, float]]) -> Costs:
    """Return the costs with which the simulator explains measured runs best, starting from those of the first.

    The sum of the squared errors is minimized parameter by parameter, from several starts; a parameter on which no run
    depends keeps its value.
    """
    first = measured[0][0].costs
    default = asdict(first)

    def loss(values: dict[str, float]) -> float:
        costs = Costs(**values)
        errors = [error_of(replace(deployment, costs=costs), rate) for deployment, rate in measured]
        far = sum(math.log(values[name] / default[name]) ** 2 for name in default)
        return sum(math.log1p(error) ** 2 for error in errors) + _PRIOR * far

    starts = [
        {**default, "message_s": default["message_s"] * message, "byte_s": default["byte_s"] * byte}
        for message, byte in product(_STARTS, _STARTS)
    ]
    found = [_descend(loss, start) for start in sorted(starts, key=loss)[:_MOST_STARTS]]
    return Costs(**min(found, key=loss))


def _descend(loss: Callable[[dict[str, float]], float], start: dict[str, float]) -> dict[str, float]:
    """Return the values to which a search parameter by parameter comes from ``start``."""
    best, values = loss(start), dict(start)
    for factor in _FACTORS:
        improved = True
        while improved:
            improved = False
            for name in start:
                for tried in (values[name] * factor, values[name] / factor):
                    if name == "link_share" and tried > 1.0:
                        continue
                    candidate = {**values, name: tried}
                    if (found := loss(candidate)) < best * 0.99:
                        best, values, improved = found, candidate, True
    return values

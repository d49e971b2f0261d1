"""Rank 0 with a disk, gradients that name their pushes, and a history of what was applied."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from paramserver import simulator
from paramserver.checkpoint.save import ChunkedFile
from paramserver.consistency import PushId
from paramserver.runs.checkpoint_manager import StagedCheckpoint
from paramserver.transport.rpc import RpcServerTransport

if TYPE_CHECKING:
    from tests.simulation.simulation import World

PushKey = tuple[int, int, int, int]
"""View, trainer, incarnation and sequence of a push."""


def push_key(push: PushId) -> PushKey:
    return push.generation, push.trainer_index, push.incarnation, push.sequence


def make_gradient(key: PushKey) -> torch.Tensor:
    """Return the gradient of a push: it names the push."""
    return torch.tensor((*key, 0, 0, 0, 0), dtype=torch.float64)


class Store(simulator.Store):
    """Also of the versions that are validated; the parameters are the list of pushes that were applied."""

    def __init__(self, node):
        super().__init__(node)
        self.updater.on_validation_end = lambda version, means, since: None
        self.updater.state_dict = dict
        self.retained = {}
        self.gradients: list[PushKey] = []  # of which the last update was made

    def snapshot(self):
        return [], None


class ShardContent(simulator.ShardContent):
    """Reads the pushes from their gradients."""

    def __init__(self, node):
        super().__init__(node)
        self._accumulated = []

    def average(self, gradients, factors):
        keys = [[tuple(map(int, flat[:4].tolist())) for flat in own] for own in gradients]
        for own in keys:
            self.node.world.check(own[0] == own[1], f"gradients of pushes {own} are applied as those of one")
        self.node.store.gradients = [own[0] for own in keys]
        return super().average(gradients, factors)

    def accumulate(self, gradients, factors):
        self._accumulated += gradients

    def pop_average(self):
        accumulated, self._accumulated = self._accumulated, []
        return self.average(accumulated, ())


class Checkpoints(simulator.Checkpoints):
    """Checkpoints of a simulated disk: what rank 0 stages is pickled, and is in ``World.manifest`` some time later."""

    def __init__(self, node, config):
        super().__init__(node, config)
        self.node = node
        manifest = node.world.manifest
        self.writer: Any = SimpleNamespace(raise_error=lambda: None)
        self.resumed = None if manifest is None else pickle.loads(manifest)
        self.newest = self._resume = self.resumed
        self.writing: list[bytes] = []
        if self.resumed is not None:
            self.first_step = self.resumed["step"]
            self.monitor.load_state_dict(self.resumed["monitor"])
            self.consistency_state, self.ledger_state = self.resumed["consistency"], self.resumed["ledger"]

    def trainer_part(self, trainer_index, newest=False):
        held = self.newest if newest else self.resumed
        return None if held is None else held["parts"][trainer_index]

    def stage(self, step, model, updater, reason, since, consistency=None, ledger=None):
        self.node.world.check(step == self.node.store.version, f"a checkpoint of {step} is staged at another version")
        state = {
            "step": step,
            "monitor": self.monitor.state_dict(),
            "consistency": consistency,
            "ledger": ledger,
            "applied": self.node.history,
        }
        return StagedCheckpoint(step, {"state": pickle.dumps(state)}, False, reason, since)

    def commit(self, staged, parts: Mapping[int, Any], pause_s):
        state = pickle.loads(staged.objects["state"])
        state["parts"] = {
            i: pickle.loads(b"".join(part)) if isinstance(part, ChunkedFile) else part for i, part in parts.items()
        }
        world = self.node.world
        world.check_manifest(state)
        self.writing.append(pickle.dumps(state))
        world.after(world.rng.uniform(0.0, 0.3), self._write)

    def _write(self):
        if not self.node.alive or not self.writing:
            return
        manifest = self.writing.pop(0)
        self.newest = pickle.loads(manifest)
        self.node.world.note("written", self.newest["step"])
        self.node.world.manifest = manifest

    def finish_writing(self):
        while self.writing:
            self._write()


class FaultyNode(simulator.Node):
    """A session of rank 0: a server, which may be paused, and what it has applied."""

    world: World
    store_type = Store
    content_type = ShardContent
    checkpoints_type = Checkpoints
    transport_type = RpcServerTransport

    def __init__(self, world, generation):
        super().__init__(world, generation)
        self.started = world.now
        self.paused_until = 0.0
        resumed = self.checkpoints.resumed
        self.history: list[tuple[PushKey, tuple[int, ...]]] = [] if resumed is None else resumed["applied"]
        """Each applied push and its positions."""

    def record(self, record):
        self.world.note(record["kind"], record.get("trainer"), record.get("text", ""))
        super().record(record)
        if record["kind"] == "validation":
            self.world.validated(record["step"], record["samples"])

    def close(self):
        self.checkpoints.finish_writing()
        super().close()

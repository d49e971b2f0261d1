"""Trainers that send gradients, validate and save, in processes that freeze, and that the network cuts off."""

from __future__ import annotations

import pickle
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from paramserver.consistency import Verdict
from paramserver.distributed.rpc_calls import is_numbered, is_repeatable
from paramserver.errors import PeerLost
from paramserver.metrics.records import TrainerTotals, WeightedSums
from paramserver.server.parameter_server import ParameterServer
from paramserver.simulator import Call, Process, Session, SimulatedTask
from paramserver.transport.autograd import push_root
from paramserver.transport.messages import StepGrant
from tests.simulation.node import FaultyNode, make_gradient, push_key

if TYPE_CHECKING:
    from tests.simulation.simulation import World


class FaultyProcess(Process):
    """A process that computes as fast as the seed decides, may be frozen or cut off, and may have left."""

    def __init__(self, world, index):
        super().__init__(world, index)
        self.compute_s = world.rng.choice((0.05, 0.1, 0.1, 0.4))
        self.left = False
        self.frozen_until = self.cut_until = 0.0


class Backward(Call):
    """The call in which distributed autograd sends the first gradient of a push."""

    def handle(self, server):
        pulled, gradient = self.args
        torch.autograd.backward([push_root([gradient], pulled[:1])])


def may_repeat(call):
    """Return whether a call is sent again after its message was lost."""
    if isinstance(call, Backward):
        return False
    handler = getattr(ParameterServer, call.method)
    # A pull is sent again in another autograd context.
    return call.method == "pull" or (is_repeatable(handler) and (call.number > 0 or not is_numbered(handler)))


class FaultySession(Session):
    """A session of a trainer that also validates and saves; its messages are checked and may be late."""

    world: World
    process: FaultyProcess
    node: FaultyNode

    def __init__(self, world, process, node):
        super().__init__(world, process, node)
        self.last_delivery = 0.0
        self.silent_since: float | None = None
        self.validated: int | None = None
        self.saved: int | None = None
        self.sender: SimulatedTask | None = None

    def restore(self, reply):
        """Continue with the part of a checkpoint, if the reply to the join has one."""
        if reply.data_position is None and reply.stored_part is not None:
            self.data.load(reply.stored_part)
            self.saved = reply.step

    def run(self):
        reply = yield from self.join()
        decision = yield from self.fit(reply.lockstep)
        if not decision.interrupted and (yield from self.validate(decision)):
            self.saved = None
        yield from self.save("end")
        yield Call("leave", (self.id, TrainerTotals(self.index), decision))

    def push(self, push, pulled):
        """Report a push, and send its gradients in two parts; the report may come first or last."""
        report = replace(push.report, nonfinite=self.world.nonfinite_of(push.id))
        key = push_key(push.id)
        gradient = make_gradient(key)
        bucket = Call("receive_bucket", (push.id, report.version, 1, gradient))
        calls = [bucket, Call("push", (replace(push, report=report),))]
        begun = [self.begin(call) for call in self.world.rng.sample(calls, len(calls))]
        yield Backward("backward", (pulled, gradient))
        grant = None
        for call in begun:
            reply = yield call
            grant = reply if isinstance(reply, StepGrant) else grant
        self.world.acknowledged(key, grant.result)
        return grant

    def begin(self, call):
        """Make a call whose reply is awaited later."""

        def wait():
            return (yield call)

        task = SimulatedTask(self, wait())
        self.tasks = [known for known in self.tasks if not known.done] + [task]
        self.world.resume(task)
        return task

    def is_due(self, step):
        return _due(step, self.config.training.validate_every) or _due(step, self.save_every)

    @property
    def save_every(self):
        every = self.config.checkpoint.every
        return self.config.training.validate_every if every is None else every

    def meet(self, decision):
        if decision.verdict is Verdict.VALIDATE:
            yield from self.validate(decision)
            return
        improved = False
        if _due(self.step, self.config.training.validate_every):
            improved = yield from self.validate(decision)
        if improved or _due(self.step, self.save_every):
            yield from self.save("best" if improved else "periodic")

    def validate(self, decision):
        own = decision.verdict is not Verdict.VALIDATE or decision.share == self.index
        if own and self.validated == self.step:
            return False
        self.validated = self.step if own else self.validated
        yield Call("view_version", (self.id, self.step))
        yield 0.05
        sums = WeightedSums()
        sums.add({"loss": float(zlib.crc32(b"%d" % self.step) % 5)}, 1)
        if decision.verdict is Verdict.VALIDATE:
            yield Call("report_validation_share", (self.id, self.step, decision.share, sums))
            return False
        shares = [self.index]
        while True:
            reply = yield Call("report_validation", (self.id, self.step, dict.fromkeys(shares, sums)))
            if not (shares := reply.missing):
                return bool(reply.improved)
            yield 0.05

    def save(self, reason):
        if self.saved != self.step:
            self.saved = self.step
            yield from self.wait_saved()
            part, step = self.data.part(), self.step
            if not (yield Call("stage_checkpoint", (self.id, reason))):
                return
            self.sender = SimulatedTask(self, self.send_part(step, part))
            self.tasks.append(self.sender)
            self.world.resume(self.sender)
        if reason == "end":
            yield from self.wait_saved()

    def wait_saved(self):
        if self.sender is not None and not self.sender.done:
            yield self.sender

    def send_part(self, step, part):
        content = torch.from_numpy(np.frombuffer(bytearray(pickle.dumps(part)), np.uint8))
        yield Call("receive_part_chunk", (self.id, step, content[:40]))
        yield Call("receive_part_chunk", (self.id, step, content[40:]))
        yield Call("finish_part", (self.id, step, 0.001))

    # The connection.

    def beat(self):
        world, process = self.world, self.process
        is_over = self.ended or not process.alive or self.lost is not None
        if not is_over and process.frozen_until > world.now:
            world.at(process.frozen_until + world.rng.uniform(0.0, self.config.server.heartbeat_s), self.beat)
        else:
            super().beat()

    def send_heartbeat(self):
        """Send one, unless something is in its way."""
        now = self.world.now
        if self.process.cut_until > now or self.node.paused_until > now:
            self.silent_since = now if self.silent_since is None else self.silent_since
            if now - self.silent_since > self.config.server.lost_after_s:
                self.mark_lost(PeerLost("the server is lost: it did not answer"))
        else:
            self.silent_since = None
            super().send_heartbeat()


def _due(step, every):
    return every > 0 and step % every == 0

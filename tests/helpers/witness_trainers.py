"""Trainers as a user writes them, which count what happens in a step."""

import os
import signal
from collections import Counter
from dataclasses import replace

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import DistributedOptimizer

from paramserver.distributed.local_calls import LocalConnection
from paramserver.distributed.tcp_calls import TcpConnection
from paramserver.trainers import DdpTrainer, RpcTrainer, ddp_control


class CountingTrainer(DdpTrainer):
    """Counts the buckets of gradients that are all-reduced."""

    count = 0

    def configure_ddp(self, model, device_ids):
        wrapped = super().configure_ddp(model, device_ids)

        def counted(state, bucket):
            self.count += 1
            return allreduce_hook(state, bucket)

        wrapped.register_comm_hook(None, counted)
        return wrapped

    def leave(self, totals, decision):
        self.log("gradient_all_reduces", self.count)
        super().leave(totals, decision)


class ReducingTrainer(DdpTrainer):
    """Agrees by reductions, as ranks on several hosts do."""

    def init_connection(self):
        ddp_control.share_rows = lambda group, channel, timeout_s: None  # nor are gradients shared then
        super().init_connection()

    def leave(self, totals, decision):
        assert self.control.agreement.shared is None
        self.log("rank_reduced", self.trainer_index, reduce="none")
        super().leave(totals, decision)


class WitnessTrainer(RpcTrainer):
    """Asserts that each step enters a distributed-autograd context, runs backward and steps a DistributedOptimizer.

    The report of its push is sent before the backward.
    """

    def on_after_setup_optimizers(self):
        assert isinstance(self.optimizer, DistributedOptimizer)
        self.seen = []
        begin, step, backward = self.optimizer.begin_step, self.optimizer.step, dist_autograd.backward

        def begun(context_id, *report):
            self.seen.append(("report", context_id, dist_autograd._current_context()._context_id()))
            return begin(context_id, *report)

        def stepped(context_id, *report):
            self.seen.append(("step", context_id, dist_autograd._current_context()._context_id()))
            return step(context_id, *report)

        def went_back(context_id, roots, **options):
            self.seen.append(("backward", context_id, dist_autograd._current_context()._context_id()))
            return backward(context_id, roots, **options)

        self.optimizer.begin_step, self.optimizer.step = begun, stepped
        dist_autograd.backward = went_back

    def leave(self, totals, decision):
        words = [word for word, _, _ in self.seen]
        assert words == ["report", "backward", "step"] * totals.batches, words
        assert all(context == current for _, context, current in self.seen)
        assert len({context for _, context, _ in self.seen}) == totals.batches
        self.log("witnessed", totals.batches)
        super().leave(totals, decision)


class LocalTrainer(RpcTrainer):
    """Counts the calls that it sends over RPC and over sockets, by handler, between its first and last step."""

    def on_after_setup_optimizers(self):
        self.sent = Counter()
        send, call, over_tcp = rpc.rpc_async, LocalConnection.call, TcpConnection.call

        def sent(to, handle, args=(), **options):
            self.sent["rpc", args[1] if len(args) > 1 else handle.__name__] += 1
            return send(to, handle, args=args, **options)

        def called(connection, target, kwargs):
            self.sent["local", target[1]] += 1
            return call(connection, target, kwargs)

        def connected(connection, target, kwargs):
            self.sent["tcp", target[1]] += 1
            return over_tcp(connection, target, kwargs)

        rpc.rpc_async, LocalConnection.call, TcpConnection.call = sent, called, connected

    def leave(self, totals, decision):
        for (way, handler), count in self.sent.items():
            self.log(f"{way} {handler}", count)
        self.log("steps", totals.steps.count)
        super().leave(totals, decision)


class BrokenOffTrainer(RpcTrainer):
    """Ends its TCP connections in the middle of two steps, the second time of those that have ended."""

    def on_before_backward(self, loss):
        if self.step in (2, 4):
            for connection in self.server._sockets.values():
                connection.shut_down()
            self.log("broken off", len(self.server._sockets))


class MixedTrainer(RpcTrainer):
    """Trainer 1 cannot connect over TCP. Of the first bucket of trainer 0 only the second revision arrives."""

    def init_connection(self):
        if self.trainer_index == 1:
            self.control.connect_tcp = lambda: False
        super().init_connection()

    def on_after_setup_optimizers(self):
        send = self.server.send_bucket

        def loses_first(version, bucket, gradient, revision=0, has_all=True):
            if bucket.flat_index or self.trainer_index:
                return send(version, bucket, gradient, revision, has_all)
            call = send(version, bucket, gradient, 1, has_all)
            call.wait()  # as before a push
            return call

        self.server.send_bucket = loses_first


class TutorialTrainer(RpcTrainer):
    """Uses the server as the RPC tutorial does, before training: forward, backward, gradients, parameter references."""

    rounding = 0.0

    def on_after_setup_optimizers(self):
        self.unwrapped_model.eval()
        images = torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(self.trainer_index))
        server = self.server.rref.rpc_sync()
        with dist_autograd.context() as context_id:
            output = server.forward(images)
            dist_autograd.backward(context_id, [output.pow(2).mean()])
            there = server.get_dist_gradients(context_id)
        self.unwrapped_model.train()
        output_here = self.unwrapped_model(images)
        output_here.pow(2).mean().backward()
        here = {n: p.grad for n, p in self.unwrapped_model.named_parameters() if p.requires_grad}
        assert torch.allclose(output, output_here, rtol=0.0, atol=self.rounding)
        assert there.keys() == here.keys()
        assert all(torch.allclose(there[name], here[name], rtol=0.0, atol=self.rounding) for name in here)
        self.unwrapped_model.zero_grad()
        references = server.get_param_rrefs()
        self.log("references", len(references))
        self.log("server", rpc.rpc_sync(self.server.rref.owner(), identity_of, args=(self.server.rref,)))


class TutorialOnGpu(TutorialTrainer):
    """The server computes on another device than the trainer."""

    rounding = 1e-5


def identity_of(server):
    """Runs on the server: the identity of the object that the reference owns."""
    return id(server.local_value())


class EarlyTrainer(RpcTrainer):
    """Counts the gradient buckets that are sent during backward and after it."""

    going_back = False

    def on_after_setup_optimizers(self):
        self.left = {"early": 0, "late": 0}
        begin = self.server.send_bucket

        def counted(*message):
            self.left["early" if self.going_back else "late"] += 1
            return begin(*message)

        self.server.send_bucket = counted

    def backward_batch(self, loss, batches):
        self.going_back = True
        super().backward_batch(loss, batches)
        self.going_back = False

    def leave(self, totals, decision):
        for when, count in self.left.items():
            self.log(when, count / totals.steps.count / len(self.pull.transport.buckets))
        super().leave(totals, decision)


class EarlyCounter(RpcTrainer):
    """Counts the buckets of the next version that arrived before it was complete, and those that were pulled anew."""

    def on_after_setup_optimizers(self):
        self.early, self.anew = 0, 0
        finish = self.pull.finish

        def counted():
            early = dict(self.pull.early)
            finish()
            calls, first = self.pull._calls, [0]
            for call in calls[:-1]:
                first.append(first[-1] + len(call.wait()))
            kept = sum(self.pull.pulled[first[b.server_index] + b.flat_index] is tensor for b, tensor in early.items())
            self.early += kept
            self.anew += len(early) - kept

        self.pull.finish = counted

    def leave(self, totals, decision):
        self.log("early", self.early / totals.steps.count)
        self.log("anew", self.anew)
        super().leave(totals, decision)


class DiesBetweenBuckets(EarlyCounter):
    """Trainer 1 dies in its fifth step, when the other one has received the update of a bucket that both have sent."""

    def on_after_setup_optimizers(self):
        super().on_after_setup_optimizers()
        send, sent = self.server.send_bucket, []

        def dies(*message):
            call = send(*message)
            if self.trainer_index == 1 and self.step == 4:
                sent.append(call)
                if len(sent) == 2:
                    sent[0].wait()
                    os.kill(os.getpid(), signal.SIGKILL)
            return call

        self.server.send_bucket = dies


class OtherBackend(DdpTrainer):
    """Trainer 1 has a GPU, as on a host with other devices."""

    def init_connection(self):
        if self.trainer_index:
            self.process = replace(self.process, placement=replace(self.process.placement, backend="nccl"))
        super().init_connection()

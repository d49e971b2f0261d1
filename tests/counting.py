"""Trainers of our own, as a user would write them: they count what happens in a step."""

import torch.distributed.autograd as dist_autograd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import DistributedOptimizer

from trainers import DdpTrainer, RpcTrainer


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


class WitnessTrainer(RpcTrainer):
    """Sees that each step enters a distributed-autograd context, runs its backward and steps a DistributedOptimizer."""

    def on_after_setup_optimizers(self):
        assert isinstance(self.optimizer, DistributedOptimizer)
        self.seen = []
        step, backward = self.optimizer.step, dist_autograd.backward

        def stepped(context_id, *report):
            self.seen.append(("step", context_id, dist_autograd._current_context()._context_id()))
            return step(context_id, *report)

        def went_back(context_id, roots, **options):
            self.seen.append(("backward", context_id, dist_autograd._current_context()._context_id()))
            return backward(context_id, roots, **options)

        self.optimizer.step = stepped
        dist_autograd.backward = went_back

    def leave(self, totals, decision):
        words = [word for word, _, _ in self.seen]
        assert words == ["backward", "step"] * totals.batches, words
        assert all(context == current for _, context, current in self.seen)
        assert len({context for _, context, _ in self.seen}) == totals.batches
        self.log("witnessed", totals.batches)
        super().leave(totals, decision)

"""Optimizers that torch does not have, each with another way to keep its state, and a task that trains with any."""

import importlib
import math
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from tasks import ReferenceTask
from torch import nn
from torch.optim import Optimizer


class Lion(Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023. Its groups have what its defaults have."""

    updates_each = "element"

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((average * first + p.grad * (1 - first)).sign_(), alpha=-group["lr"])
                average.mul_(second).add_(p.grad, alpha=1 - second)


class Lamb(Optimizer):
    """You et al., "Large Batch Optimization for Deep Learning", 2020. Its step is a Python number in the groups."""

    updates_each = "parameter"

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state["exp_avg"].lerp_(p.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                unbiased = state["exp_avg_sq"] / (1 - second ** group["step"])
                update = state["exp_avg"] / (1 - first ** group["step"]) / (unbiased.sqrt() + group["eps"])
                update += group["weight_decay"] * p
                trust = p.norm() / update.norm() if p.norm() > 0 and update.norm() > 0 else 1.0
                p.add_(update * trust, alpha=-group["lr"])


class RelativeAdafactor(Optimizer):
    """Like that of transformers: ``lr`` is None, and the state has numbers, None, and tensors of other shapes."""

    updates_each = "parameter"

    def __init__(self, params, lr=None, eps=1e-3, decay=-0.8):
        super().__init__(params, {"lr": lr, "eps": eps, "decay": decay, "relative_step": lr is None})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, square = self.state[p], p.grad.float() ** 2 + 1e-30
                if not state:
                    rows, columns = (square.mean(-1), square.mean(0)) if p.ndim > 1 else (None, square.clone())
                    state |= {"step": 0, "RMS": 0.0, "exp_avg_sq_row": rows, "exp_avg_sq_col": columns}
                state["step"] += 1
                keep = 1 - state["step"] ** group["decay"]
                if state["exp_avg_sq_row"] is not None:
                    state["exp_avg_sq_row"].lerp_(square.mean(-1), 1 - keep)
                state["exp_avg_sq_col"].lerp_(square if p.ndim < 2 else square.mean(0), 1 - keep)
                state["RMS"] = float(p.float().norm() / math.sqrt(max(p.numel(), 1)))
                lr = group["lr"] or min(1e-2, 1 / math.sqrt(state["step"])) * max(group["eps"], state["RMS"])
                p.add_((p.grad.float() / state["exp_avg_sq_col"].sqrt()).clamp_(-1, 1).to(p.dtype), alpha=-lr)


class ScheduleFree(Optimizer):
    """Defazio et al., "The Road Less Scheduled", 2024: SGD. ``eval()`` moves the parameters to the average."""

    def __init__(self, params, lr=0.05, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum, "k": 0, "train_mode": False})

    def _move(self, is_training, weight_of):
        for group in self.param_groups:
            if group["train_mode"] != is_training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], weight_of(group["momentum"]))
                group["train_mode"] = is_training

    def train(self):
        self._move(True, lambda momentum: 1 - momentum)

    def eval(self):
        self._move(False, lambda momentum: 1 - 1 / momentum)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("step() was called in eval()")
            share = 1 / (group["k"] + 1)
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, share)
                p.add_(p.grad, alpha=group["lr"] * (group["momentum"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])


class Swapping(Optimizer):
    """SGD that keeps an average beside the parameters: ``eval()`` exchanges them. The mode is not in its state."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.is_training = True

    @torch.no_grad()
    def _swap(self, is_training):
        if self.is_training != is_training:
            for p, state in self.state.items():
                other = state["average"].clone()
                state["average"].copy_(p)
                p.copy_(other)
            self.is_training = is_training

    def train(self):
        self._swap(True)

    def eval(self):
        self._swap(False)

    @torch.no_grad()
    def step(self, closure=None):
        assert self.is_training
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
                    self.state[p].setdefault("average", p.detach().clone()).lerp_(p, 0.1)


class OwnLayout(Optimizer):
    """Has no defaults, no ``state`` by parameter and a ``state_dict`` of its own, with nested containers."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {})
        self.rate, self.count = lr, torch.tensor(0)
        self.velocity = [[torch.zeros_like(p) for p in group["params"]] for group in self.param_groups]

    def state_dict(self):
        return {"velocity": self.velocity, "count": self.count, "note": ("own", None, {"rate": self.rate})}

    def load_state_dict(self, state_dict):
        self.velocity, self.count = [list(own) for own in state_dict["velocity"]], state_dict["count"].clone()
        self.rate = state_dict["note"][2]["rate"]

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group, velocities in zip(self.param_groups, self.velocity, strict=True):
            for p, velocity in zip(group["params"], velocities, strict=True):
                if p.grad is not None:
                    velocity.mul_(0.9).add_(p.grad)
                    p.add_(velocity, alpha=-self.rate / math.sqrt(int(self.count)))


class HalfLayout(OwnLayout):
    """Its ``state_dict`` has ``state``, which is not by parameter, and no ``param_groups``."""

    def state_dict(self):
        return {"state": {"velocity": self.velocity, "count": self.count}}

    def load_state_dict(self, state_dict):
        self.velocity, self.count = state_dict["state"]["velocity"], state_dict["state"]["count"]


class Nested(Optimizer):
    """Keeps containers, texts, flags, counts and float64 in the state of each parameter; torch's load changes these."""

    updates_each = "element"

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state |= {"kind": "heavy ball", "seen": torch.zeros((), dtype=torch.int64), "clipped": None}
                state["moments"] = [torch.zeros_like(p, dtype=torch.float64), {"sign": torch.zeros_like(p).bool()}]
            assert (state["kind"], state["seen"].dtype) == ("heavy ball", torch.int64)
            state["seen"] += 1
            moment, signs = state["moments"]
            moment.mul_(0.9).add_(p.grad)
            same = signs["sign"].logical_not_().logical_or_(p.grad > 0)
            p.add_((moment * (0.5 + 0.5 * same)).to(p.dtype), alpha=-self.param_groups[0]["lr"])
            signs["sign"].copy_(p.grad > 0)
            state["clipped"] = bool(int(state["seen"]) % 2)


class Extrapolating(Optimizer):
    """Daskalakis et al., "Training GANs with Optimism", 2018. It keeps the gradient of a step itself, and no copy."""

    updates_each = "element"

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(2 * p.grad - self.state[p].get("previous", p.grad), alpha=group["lr"])
                self.state[p]["previous"] = p.grad


class Counting(Optimizer):
    """Its state has entries that are of no parameter: a number, a text and a tensor."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        self.state["kind"] = "counting"
        self.state["sum"] = self.state.get("sum", torch.zeros(2)) + 1
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p].setdefault("first", p.grad.clone())
            p.sub_(p.grad + 0.1 * self.state[p]["first"], alpha=0.05 / self.state["steps"] ** 0.5)


class Wrapper(Optimizer):
    """Lookahead (Zhang et al., 2019) around SGD. It does not call ``Optimizer.__init__``, as many wrappers."""

    def __init__(self, base):
        self.base, self.count = base, 0

    @property
    def param_groups(self):
        return self.base.param_groups

    @property
    def state(self):
        return self.base.state

    def state_dict(self):
        return {**self.base.state_dict(), "count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]
        self.base.load_state_dict({name: value for name, value in state_dict.items() if name != "count"})

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.count += 1
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            slow = self.state[p].setdefault("slow", p.detach().clone())
            if self.count % 3 == 0:
                p.copy_(slow.lerp_(p, 0.5))


class Langevin(Optimizer):
    """Welling and Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics", 2011: draws noise in each step.

    From every generator that a process has by default. ``numpy.random.normal`` keeps a number for its next call.
    """

    updates_each = "element"

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
                    p.add_(torch.randn_like(p), alpha=1e-3 * (1 + random.random() + float(np.random.normal())))


class Rotated(Optimizer):
    """Vyas et al., "SOAP", 2024, without Adam: its state has tensors whose columns follow each other in memory."""

    updates_each = "parameter"

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, grad = self.state[p], p.grad.reshape(p.shape[0] if p.ndim else 1, -1)
                if not state:
                    state |= {"covariance": torch.eye(len(grad), dtype=p.dtype), "moment": torch.zeros_like(grad.T).T}
                state["covariance"].lerp_(grad @ grad.T, 0.1)
                if "basis" not in state:
                    state["basis"] = torch.linalg.eigh(state["covariance"]).eigenvectors
                state["basis"] = torch.linalg.qr(state["covariance"] @ state["basis"]).Q
                state["moment"].lerp_(grad, 0.1)
                update = state["basis"] @ torch.tanh(state["basis"].T @ state["moment"] * 10)
                p.add_(update.reshape(p.shape), alpha=-group["lr"])


class Raising(Lion):
    """Raises what is no ``Exception`` in its third step."""

    updates_each = "element"
    kind = SystemExit
    count = 0

    def step(self, closure=None):
        self.count += 1
        if self.count == 3:
            raise self.kind("from step 3")
        return super().step(closure)


class Interrupting(Raising):
    kind = KeyboardInterrupt


def noisy_sgd(parameters):
    """An optimizer of torch with a hook that draws."""

    def draw(optimizer, args, kwargs):
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            p.grad.add_(torch.randn_like(p), alpha=1e-3)

    sgd = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    sgd.register_step_pre_hook(draw)
    return sgd


_SMALL = {"lr": 1e-2}
OF_TORCH = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "ASGD", "RMSprop", "Rprop"), _SMALL),
    **dict.fromkeys(("Adadelta", "Adafactor", "Muon"), _SMALL),
}
OWN = {
    "Lion": Lion,
    "Lamb": Lamb,
    "RelativeAdafactor": RelativeAdafactor,
    "ScheduleFree": ScheduleFree,
    "Swapping": Swapping,
    "OwnLayout": OwnLayout,
    "HalfLayout": HalfLayout,
    "Nested": Nested,
    "Counting": Counting,
    "Extrapolating": Extrapolating,
    "Langevin": Langevin,
    "Rotated": Rotated,
    "NoisySGD": noisy_sgd,
    "Wrapper": lambda params: Wrapper(torch.optim.SGD(params, lr=0.05, momentum=0.9)),
}
RAISING = {"Raising": Raising, "Interrupting": Interrupting}
OF_PACKAGES = {
    "timm.optim.lamb.Lamb": {},
    "timm.optim.Lion": {},
    "transformers.optimization.Adafactor": {},
    "schedulefree.SGDScheduleFree": {"lr": 0.05},
    "schedulefree.AdamWScheduleFree": _SMALL,
    "schedulefree.RAdamScheduleFree": _SMALL,
    "lion_pytorch.Lion": {"lr": 1e-3},
}
WITH_MODES = {"ScheduleFree", "Swapping", *(name for name in OF_PACKAGES if name.startswith("schedulefree"))}
NAMES = [*OF_TORCH, *OWN, *OF_PACKAGES]


def build(name, parameters):
    """An optimizer by name; skips the test where its package is not installed."""
    if name in OWN or name in RAISING:
        return {**OWN, **RAISING}[name](parameters)
    module, _, kind = (f"torch.optim.{name}" if name in OF_TORCH else name).rpartition(".")
    return getattr(importlib.import_module(module), kind)(parameters, **{**OF_TORCH, **OF_PACKAGES}[name])


class AnyOptimizer(ReferenceTask):
    """The reference task with the optimizer of this name; trainer ``dying`` dies once, at its sixth batch."""

    def __init__(self, optimizer, die=None, dying=1, **options):
        super().__init__(optimizer, **options)
        self.die, self.dying = die, dying

    def training_step(self, model, batch, batch_idx):
        is_due = (self.trainer.trainer_index, batch_idx) == (self.dying, 5)
        if self.die is not None and is_due and not Path(self.die).exists():
            Path(self.die).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(model, batch, batch_idx)

    def build_optimizer(self, model):
        parameters = [p for p in model.parameters() if p.requires_grad]
        return build(self.optimizer, [p for p in parameters if p.ndim == 2] if self.optimizer == "Muon" else parameters)


class SparseOptimizers(ReferenceTask):
    """Two optimizers, one of them of an embedding with sparse gradients, which some trainers do not use in a step."""

    def __init__(self, kind="SparseAdam", sparse=True, **options):
        super().__init__(**options)
        self.kind, self.sparse = kind, sparse

    def build_model(self):
        torch.manual_seed(0)
        table = nn.Embedding(40, 5, sparse=self.sparse)
        other = nn.Embedding(40, 5, sparse=self.sparse)
        return nn.ModuleDict({"table": table, "other": other, "body": super().build_model()})

    def build_optimizer(self, model):
        tables = [model["table"].weight, model["other"].weight]
        body = [p for p in model["body"].parameters() if p.requires_grad]
        options = {"momentum": 0.9} if self.kind == "SGD" else {}
        kind = OWN.get(self.kind) or getattr(torch.optim, self.kind)
        return {"tables": kind(tables, lr=0.05, **options), "body": torch.optim.SGD(body, lr=0.05)}

    def _losses(self, model, batch):
        images, labels = batch
        rows = (images.flatten(1).sum(1) * 7).long().abs() % 40
        output = model["body"](images).detach() + model["table"](rows)
        if int(rows[0]) % 2:  # differs between trainers
            output = output + model["other"](rows)
        return nn.functional.cross_entropy(output, labels), nn.functional.cross_entropy(model["body"](images), labels)

    def training_step(self, model, batch, batch_idx):
        self.trainer.optimize("tables", self._losses(model, batch)[0])
        self.trainer.optimize("body", self._losses(model, batch)[1])

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        return {"loss": self._losses(model, batch)[0]}

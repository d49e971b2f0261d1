"""Tasks whose models change their module buffers, layers or parameters in the ways that a forward or a hook can."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paramserver import Task
from paramserver.trainers import RpcTrainer


class Statistics(nn.Module):
    """Buffers of several dtypes that a forward assigns, registers and reshapes; its output depends on all of them."""

    def __init__(self, persistent=False):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("evaluations", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("low", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("widest", torch.tensor([]))  # gets its shape at the first forward
        self.register_buffer("previous", None)
        self.register_buffer("passing", torch.zeros(4), persistent=persistent)
        self.register_buffer("kind", torch.zeros(1))  # becomes another dtype
        self.register_buffer("alias", self.mean)  # one tensor with two names

    def forward(self, x):
        with torch.no_grad():
            if self.training:
                self.previous = self.mean
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
                self.alias = self.mean
                self.calls = self.calls + 1
                self.seen = self.seen | (x.mean(0) > 0)
                self.low = self.low * 0.5 + x[0, :2].bfloat16()
                self.passing = self.passing + x.abs().mean(0)
                self.kind = self.kind.double() + 0.25
                if self.widest.numel() == 0:
                    self.widest.resize_(2, 2)
                    self.widest.zero_()
                self.widest += x[:2, :2].abs()
                if self.calls == 3:
                    self.register_buffer("registered", torch.ones(3, dtype=torch.int32))
                if self.calls > 3:
                    self.registered = self.registered + 1
            else:
                self.evaluations = self.evaluations + 1
        scale = 1 + 0.01 * (self.calls + self.evaluations + self.low.float().sum() + self.kind.float().sum())
        previous = 0 if self.previous is None else self.previous
        return (x - self.mean + 0.1 * previous + 0.01 * self.seen + 0.01 * self.passing) * scale


class Buffers(Task):
    """A model with such buffers, which the task changes too, outside of the forward."""

    def __init__(self, optimizers=1, quantized=True, persistent=False, without=()):
        self.optimizers = optimizers
        for hook in without:
            setattr(self, hook, lambda _: None)
        self.persistent = persistent
        self.quantized = quantized

    def build_model(self):
        layers = [nn.Linear(4, 4), Statistics(self.persistent), nn.BatchNorm1d(4), nn.Linear(4, 1)]
        if self.quantized:
            layers[1:1] = [torch.ao.quantization.PerChannelMinMaxObserver(ch_axis=1)]
        model = nn.Sequential(*layers)
        model.register_buffer("steps", torch.zeros(1))
        model.register_buffer("hooks", torch.zeros(6, dtype=torch.float64))
        return model

    def build_optimizer(self, model):
        if self.optimizers == 1:
            return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return {
            "first": torch.optim.SGD(model[0].parameters(), lr=0.01),
            "rest": torch.optim.Adam([p for layer in model[1:] for p in layer.parameters()], lr=0.01),
        }

    def train_source(self, partition):
        inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def validation_source(self, partition):
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))

    @property
    def model(self):
        return self.trainer.unwrapped_model

    def training_step(self, model, batch, batch_idx):
        inputs, targets = batch
        self.model.steps = self.model.steps + 0.01 * self.model.hooks.sum().float()
        loss = ((model(inputs) - targets + 0.01 * self.model.steps) ** 2).mean()
        self.model.steps = self.model.steps + inputs.mean()
        if self.optimizers == 1:
            return loss
        self.trainer.optimize("first", loss)
        loss = ((model(inputs) - targets + 0.01 * self.model.steps) ** 2).mean()
        self.trainer.optimize("rest", loss)
        return None

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        inputs, targets = batch
        self.model.hooks[0] += 1
        return {"loss": ((model(inputs) - targets) ** 2).mean()}

    def on_train_start(self):
        self.model.hooks[1] = 1

    def on_epoch_start(self, epoch):
        self.model.hooks[2] += 1 + epoch

    def on_epoch_end(self, epoch):
        self.model.hooks = self.model.hooks * 1.5

    def on_validation_end(self, batch_idx):
        self.model.hooks[3] += 1

    def on_batch_start(self, batch_idx):
        self.model.hooks[4] += 1

    def on_batch_end(self, batch_idx):
        self.model.hooks[5] += 1


class Growing(nn.Module):
    """Keeps a table that is as long as the largest input needs; its output depends on the length."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x):
        needed = 1 + int(8 * x.detach().abs().max())
        if self.training and len(self.table) < needed:
            self.table = torch.arange(float(needed))
        return x * (1 + 0.01 * len(self.table))


class Grows(Buffers):
    """A module buffer of it has another shape on each trainer after a step."""

    def build_model(self):
        model = super().build_model()
        model.insert(0, Growing())
        return model

    def build_optimizer(self, model):
        return super().build_optimizer(model[1:])


class CallsAgain(Buffers):
    """Calls the model twice for a loss, and once more without gradients, as for a metric."""

    def __init__(self):
        super().__init__(quantized=False)

    def training_step(self, model, batch, batch_idx):
        inputs, targets = batch
        loss = super().training_step(model, batch, batch_idx) + ((model(inputs + 0.1) - targets) ** 2).mean()
        with torch.no_grad():
            model(inputs)
        return loss


class GrowsAndCallsAgain(CallsAgain, Grows):
    """Both."""


class Served(Buffers):
    """The same without access to the model."""

    def __init__(self):
        super().__init__(quantized=False)

    def training_step(self, model, batch, batch_idx):
        inputs, targets = batch
        return ((model(inputs) - targets) ** 2).mean()

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        inputs, targets = batch
        return {"loss": ((model(inputs) - targets) ** 2).mean()}

    def on_train_start(self):
        pass

    def on_epoch_start(self, epoch):
        pass

    on_epoch_end = on_validation_end = on_batch_start = on_batch_end = on_epoch_start


class Changes(Buffers):
    """Changes its layers or parameters at the start of batch 3."""

    def __init__(self, what):
        super().__init__(quantized=False)
        self.what = what

    def on_batch_start(self, batch_idx):
        if batch_idx == 3:
            getattr(self, self.what)(self.model)

    def replaced_layer(self, model):
        model[0] = nn.Linear(4, 4)

    def added_layer(self, model):
        model.append(nn.Linear(1, 1))

    def removed_layer(self, model):
        model[3] = nn.Identity()

    def replaced_parameter(self, model):
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())

    def added_parameter(self, model):
        model[0].scale = nn.Parameter(torch.ones(1))

    def activation(self, model):
        model.add_module("last", nn.Tanh())


class LargeBuffers(Buffers):
    """Module buffers of more than one packet of a socket."""

    def build_model(self):
        model = super().build_model()
        model.register_buffer("large", torch.arange(100_000.0))
        return model

    def training_step(self, model, batch, batch_idx):
        self.model.large = self.model.large + 1
        return super().training_step(model, batch, batch_idx)


class TypedBuffer(nn.Module):
    """Counts in a buffer of any type, or keeps an expanded view of what it is given."""

    def __init__(self, kind, changes_to=None):
        super().__init__()
        self.changes_to = None if changes_to is None else getattr(torch, changes_to)
        self.register_buffer("typed", torch.ones(3, 4).to(getattr(torch, kind, None) or torch.float32))
        self.register_buffer("single", self.typed[0, 0].clone())
        self.is_expanded = kind == "expanded"

    def forward(self, x):
        if self.training and self.is_expanded:
            self.typed = x.detach().sum().reshape(1, 1).expand(3, 4)
        elif self.training:
            counted = (self.typed.to(torch.float32) + (1 if x.sum() > 0 else 2)) % 7
            self.typed = counted.to(self.changes_to or self.typed.dtype)
            self.single = self.typed[0, 0].clone()
        return x + self.typed.to(x.dtype).mean() / 100


class TypedBuffers(Buffers):
    def __init__(self, kind, changes_to=None, **options):
        super().__init__(quantized=False, **options)
        self.kind, self.changes_to = kind, changes_to

    def build_model(self):
        model = super().build_model()
        return model.append(TypedBuffer(self.kind, self.changes_to))


class FrozenBase(nn.Module):
    """A frozen layer, and frozen weights of any type."""

    def __init__(self, kind):
        super().__init__()
        self.layer = nn.Linear(4, 4).requires_grad_(False)
        self.narrow = nn.Parameter(torch.randint(4, (4, 4)).to(getattr(torch, kind)), requires_grad=False)

    def forward(self, x):
        return self.layer(x) + x @ self.narrow.to(x.dtype)


class AdapterModel(nn.Sequential):
    """Its ``state_dict()`` leaves out the frozen base, as is usual for adapters."""

    def state_dict(self, *arguments, **options):
        state = super().state_dict(*arguments, **options)
        for name in [name for name in state if "base." in name]:
            del state[name]
        return state

    def load_state_dict(self, state, strict=True, assign=False):
        return super().load_state_dict(state, strict=False, assign=assign)


class Adapter(Buffers):
    def __init__(self, kind, **options):
        super().__init__(quantized=False, **options)
        self.kind = kind

    def build_model(self):
        model = AdapterModel(*super().build_model())
        model.register_buffer("steps", torch.zeros(1))
        model.register_buffer("hooks", torch.zeros(6, dtype=torch.float64))
        model[0].register_module("base", FrozenBase(self.kind))
        model[0].register_forward_pre_hook(lambda layer, inputs: layer.base(*inputs))
        return model


class Center(Buffers):
    """A frozen parameter follows the outputs of this trainer, as in self-distillation; each has its own."""

    def build_model(self):
        model = super().build_model()
        model.center = nn.Parameter(torch.zeros(1), requires_grad=False)
        return model

    def training_step(self, model, batch, batch_idx):
        inputs, targets = batch
        outputs = model(inputs)
        with torch.no_grad():
            self.model.center.lerp_(outputs.square().mean(0), 0.1)  # after BatchNorm all have one mean
        return ((outputs - self.model.center - targets) ** 2).mean()


class SparseBuffer(Buffers):
    def build_model(self):
        model = super().build_model()
        model.register_buffer("adjacency", torch.eye(4).to_sparse())
        return model


class ClipsInHook(Buffers):
    """Scales its gradients to a norm of 1 in ``on_batch_end``, and records the norm that it found."""

    def on_batch_end(self, batch_idx):
        self.log("norm", nn.utils.clip_grad_norm_(self.model.parameters(), 1.0), reduce="none")


class OverSocket(RpcTrainer):
    """Refuses a run whose steps do not make all their calls over the unix socket."""

    def agree(self):
        assert self.server.local is not None
        if not hasattr(self, "_sent"):
            self._sent, connection = [], self.server.local
            call = connection.call

            def counted(target, kwargs):
                future = call(target, kwargs)
                self._sent.append(future is not None)
                return future

            connection.call = counted
        return super().agree()

    def leave(self, totals, decision):
        assert len(self._sent) >= 6, self._sent
        assert all(self._sent), self._sent
        super().leave(totals, decision)


class Uneven(Buffers):
    """Trainer 0 has twice as many samples as trainer 1."""

    def train_source(self, partition):
        inputs = torch.randn(96 // (1 + partition.index), 4, generator=torch.Generator().manual_seed(0))
        return iter(list(zip(inputs, inputs.sum(1, keepdim=True), strict=True)))

"""Tasks with embedding tables: weights of ``nn.Embedding`` and ``nn.EmbeddingBag`` with sparse gradients."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

from paramserver import Task
from paramserver.checkpoint.staging import RowStream
from paramserver.optim import RowWiseAdagrad

ROWS = 60
SETTINGS = {"dtype": torch.float64, "sparse": True}


class Scores(nn.Module):
    """Tables of several widths, one of them in two modules, two whose outputs are added, and a dense layer."""

    def __init__(self, sparse=True, rare=True):
        super().__init__()
        settings = {**SETTINGS, "sparse": sparse}
        self.users = nn.Embedding(ROWS, 4, padding_idx=0, **settings)
        self.items, self.places = nn.Embedding(ROWS, 4, **settings), nn.Embedding(ROWS, 4, **settings)
        self.words = nn.EmbeddingBag(ROWS, 3, mode="mean", **settings)
        self.weighted = nn.EmbeddingBag(ROWS, 5, mode="sum", **settings)
        self.tied = nn.Embedding(ROWS, 5, **settings)
        self.tied.weight = self.weighted.weight
        self.rare = nn.Embedding(ROWS, 2, **settings) if rare else None
        self.head = nn.Linear(19, 1, dtype=torch.float64)

    def forward(self, ids, weights):
        columns = ids.t().contiguous()  # otherwise autograd copies gradients
        users = self.users(ids[:, 0]) + torch.tanh(self.items(columns[3]) + self.places(columns[1]))
        parts = [users, self.words(ids), self.weighted(ids, per_sample_weights=weights)]
        parts += [self.tied(ids[:, 1])]
        # In many steps no trainer uses this table, or only some of them.
        is_used = self.rare is not None and int(ids[0, 2]) % 3 == 0
        parts += [self.rare(ids[:, 2]) if is_used else parts[0].new_zeros(len(ids), 2)]
        return self.head(torch.cat(parts, 1))[:, 0]


def build_optimizer(kind, parameters):
    if kind in ("SparseAdam", "RowWiseAdagrad"):
        tables = [p for p in parameters if len(p) == ROWS]
        dense = torch.optim.Adam([p for p in parameters if len(p) != ROWS], lr=0.02)
        return [dense, (RowWiseAdagrad if kind == "RowWiseAdagrad" else torch.optim.SparseAdam)(tables, lr=0.02)]
    return getattr(torch.optim, kind)(parameters, lr=0.1)


class Tables(Task):
    """A regression on ids, of which few rows occur in most batches, and some of them twice.

    Args:
        rare: there is a table that some trainers do not use in a step, for which DDP has no sparse gradient.
        die: trainer 1 kills itself in its sixth batch, once, if this file does not exist.
    """

    def __init__(self, kind="Adagrad", sparse=True, rare=True, samples=240, die=None):
        self.kind, self.sparse, self.rare, self.samples, self.die = kind, sparse, rare, samples, die

    def build_model(self):
        return Scores(self.sparse, self.rare)

    def build_optimizer(self, model):
        return build_optimizer(self.kind, list(model.parameters()))

    def train_source(self, partition):
        return self._data(1, self.samples)

    def validation_source(self, partition):
        return self._data(2, 36)  # few: over messages each batch asks for the rows of each table

    def _data(self, seed, samples):
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(samples, 4, generator=generator, dtype=torch.float64)
        ids = (ROWS * uniform**3).long()
        weights = torch.rand(samples, 4, generator=generator, dtype=torch.float64)
        return TensorDataset(ids, weights, (ids.sum(1) % 5).double())

    def training_step(self, model, batch, batch_idx):
        ids, weights, target = batch
        return F.mse_loss(model(ids, weights), target)

    def die_once(self, batch_idx):
        if self.die is not None and self.trainer.trainer_index == 1 and batch_idx == 5 and not Path(self.die).exists():
            Path(self.die).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        return {"loss": self.training_step(model, batch, -1)}


class Turns(Tables):
    """Two named optimizers, each with a table and a dense layer, that are stepped in turns."""

    def build_model(self):
        parts = {"one": Scores(self.sparse, self.rare), "two": Scores(self.sparse, self.rare)}
        return nn.ModuleDict(parts)

    def build_optimizer(self, model):
        return {name: torch.optim.Adagrad(part.parameters(), lr=0.1) for name, part in model.items()}

    def training_step(self, model, batch, batch_idx):
        ids, weights, target = batch
        for name in ("one", "two"):
            other = model["two" if name == "one" else "one"](ids, weights).detach()
            self.trainer.optimize(name, F.mse_loss(model[name](ids, weights), target + 0.1 * other))

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        ids, weights, target = batch
        return {"loss": F.mse_loss(model["one"](ids, weights) + model["two"](ids, weights), target)}


class Twins(Tables):
    """A table and a dense weight with the same values and gradients: what is applied to one is applied to the other."""

    def build_model(self):
        table, twin = nn.Embedding(ROWS, 4, **SETTINGS), nn.Embedding(ROWS, 4, dtype=torch.float64)
        twin.load_state_dict(table.state_dict())
        return nn.ModuleDict({"table": table, "twin": twin})

    def training_step(self, model, batch, batch_idx):
        self.die_once(batch_idx)
        return sum((model[name](batch[0]).sum((1, 2)) - batch[2]).square().mean() for name in ("table", "twin"))


class Counts(Twins):
    """Twins whose gradients count the samples of each row, whatever the values are. With SGD they are exact."""

    def build_model(self):
        model = super().build_model()
        for layer in model.values():
            nn.init.zeros_(layer.weight)
        return model

    def training_step(self, model, batch, batch_idx):
        self.die_once(batch_idx)
        time.sleep(0.005)  # so that faults meet a run that lasts
        return sum(model[name](batch[0]).sum((1, 2)).mean() for name in ("table", "twin"))

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        rows = {name: model[name](batch[0]) for name in ("table", "twin")}
        return {"difference": (rows["table"] - rows["twin"]).abs().max(), "sum": rows["twin"].sum()}


class Others(Tables):
    """Models of other forms, by ``kind``; with "hooks" they are used between two steps."""

    def __init__(self, kind, uneven=False):
        super().__init__("Adagrad")
        self.form, self.uneven = kind, uneven

    def build_model(self):
        layers = {"bag": nn.EmbeddingBag(ROWS, 4, mode="sum", **SETTINGS)}
        if self.form == "column":
            layers["table"] = nn.Embedding(ROWS, 4, **SETTINGS)
            layers["table"].weight = nn.Parameter(torch.randn(4, ROWS, dtype=torch.float64).t())
        elif self.form == "small":
            layers |= {"one": nn.Embedding(1, 4, **SETTINGS), "no_width": nn.Embedding(ROWS, 0, **SETTINGS)}
        if self.form != "only":
            layers["dense"] = nn.Linear(4, 4, dtype=torch.float64)
        return nn.ModuleDict(layers)

    def train_source(self, partition):
        data = self._data(1, self.samples)
        return Subset(data, range(200)) if self.uneven else data

    def training_step(self, model, batch, batch_idx):
        ids, _, target = batch
        values = model["bag"](ids)
        if "table" in model:
            values = values + model["table"](ids[:, 0])
        if "one" in model:
            empty = model["bag"](ids[:0]).sum()
            values = values + model["one"](ids[:, 0] * 0) + model["no_width"](ids[:, 1]).sum() + empty
        if "dense" in model:
            values = model["dense"](values)
        return F.mse_loss(values.sum(1), target)

    def use_model(self, *_):
        if self.form == "hooks":
            with torch.no_grad():
                assert self.trainer.model["bag"](torch.tensor([[1, 2]])).isfinite().all()

    on_train_start = on_epoch_start = on_epoch_end = on_validation_end = on_checkpoint = on_train_end = use_model


class Large(Tables):
    """One table of 70 MB, from which each update takes 1.6 in all."""

    def build_model(self):
        return nn.ModuleDict(
            {"table": nn.Embedding(2_200_000, 4, _weight=torch.zeros(2_200_000, 4).double(), sparse=True)}
        )

    def training_step(self, model, batch, batch_idx):
        return model["table"](batch[0]).sum((1, 2)).mean()

    def validation_source(self, partition):
        return None


class Repeated(Tables):
    """Tables of which each push has 1,000 rows with the gradient 1; the same rows in each third push.

    Args:
        kind: an optimizer of ``build_optimizer``, or ``OwnRows`` or ``WithModes`` of this file.
        shapes: rows and columns of the tables.
        spoil: whether the last row is NaN.
    """

    def __init__(self, kind="Adagrad", shapes=((2_200_000, 4),), spoil=False):
        super().__init__(kind)
        self.shapes, self.spoil = shapes, spoil

    def build_model(self):
        model = nn.ModuleDict()
        for number, (rows, width) in enumerate(self.shapes):
            weight = torch.zeros(rows, width, dtype=torch.float64)
            weight[-1] = float("nan") if self.spoil else 0.0
            model[f"table{number}"] = nn.Embedding(rows, width, _weight=weight, sparse=True)
        return model

    def build_optimizer(self, model):
        own = {"OwnRows": OwnRows, "WithModes": WithModes, "RowWiseAdagrad": RowWiseAdagrad}.get(self.kind)
        return super().build_optimizer(model) if own is None else own(model.parameters())

    def training_step(self, model, batch, batch_idx):
        used = [torch.arange(batch_idx % 3, len(t.weight) - 1, len(t.weight) // 1000) for t in model.values()]
        return sum(table(ids[:1000]).sum() for table, ids in zip(model.values(), used, strict=True))

    def validation_source(self, partition):
        return None


class SlowlyWritten(Repeated):
    """Ranges of rows are written slowly."""

    def build_model(self):
        if "ranges" not in self.__dict__:
            self.ranges = RowStream.ranges
            RowStream.ranges = lambda stream: slowly(self.ranges(stream))
        return super().build_model()


def slowly(ranges):
    for rows in ranges:
        time.sleep(0.03)
        yield rows


class OwnRows(torch.optim.Optimizer):
    """Adagrad whose state is there from the beginning and is loaded in place, with an entry that is of no parameter."""

    steps_rows = True

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = torch.full_like(parameter, 0.5)
        self.state["steps"] = torch.zeros(1)

    def load_state_dict(self, state_dict):
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            for name, value in state_dict["state"][number].items():
                self.state[parameter].setdefault(name, value.clone()).copy_(value)
        self.state["steps"].copy_(state_dict["state"]["steps"])

    @torch.no_grad()
    def step(self, closure=None):
        self.state["steps"] += 1
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                rows, values = parameter.grad._indices()[0], parameter.grad._values()
                total = self.state[parameter]["sum"]
                total[rows] += values * values
                parameter[rows] -= 0.1 * values / total[rows].sqrt()


class WithModes(torch.optim.Optimizer):
    """SGD with rows that are larger by 1 in ``train()`` than in ``eval()``, which its state counts."""

    steps_rows = True

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "training": False})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["offset"] = torch.zeros(len(parameter))

    def switch(self, training, offset):
        group = self.param_groups[0]
        if group["training"] != training:
            group["training"] = training
            for parameter in group["params"]:
                parameter.data.add_(offset)
                self.state[parameter]["offset"] += offset

    def train(self):
        self.switch(True, 1.0)

    def eval(self):
        self.switch(False, -1.0)

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter[parameter.grad._indices()[0]] -= 0.1 * parameter.grad._values()


class OneTable(Tables):
    """A model that is a table and another layer, changed by ``change`` in a way that is refused."""

    def __init__(self, change, kind="Adagrad"):
        super().__init__(kind)
        self.change = change

    def build_model(self):
        change, table = self.change, nn.Embedding(ROWS, 4, **SETTINGS)
        if change == "max_norm":
            table.max_norm = 1.0
        elif change == "max":
            table = nn.EmbeddingBag(ROWS, 4, mode="max", dtype=torch.float64)
            table.sparse = True
        return nn.ModuleDict({"table": table, "other": nn.Linear(4, ROWS, bias=False, dtype=torch.float64)})

    def build_optimizer(self, model):
        if self.kind == "SparseAdam":
            return torch.optim.SparseAdam(model.parameters())
        if self.change in ("momentum", "weight_decay", "fused"):
            value = True if self.change == "fused" else 0.5
            return torch.optim.SGD(model.parameters(), lr=0.1, **{self.change: value})
        return super().build_optimizer(model)

    def training_step(self, model, batch, batch_idx):
        ids, table = batch[0], model["table"]
        if self.change == "dense":
            return table.weight.square().sum()
        if self.change == "data":
            table.weight.data.mul_(0.5)
        if self.change == "to_sparse":
            table.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.to_dense().to_sparse()))
        if self.change == "functional":
            return F.embedding(ids, model["other"].weight, sparse=True).square().sum()
        return table(ids).square().sum()

    def validation_source(self, partition):
        return None


class BareParameter(nn.Linear):
    """Looks up rows of a parameter, with a sparse gradient, that are then the input of a layer."""

    def __init__(self):
        super().__init__(4, 1, dtype=torch.float64)
        self.rows = nn.Parameter(torch.randn(ROWS, 4, dtype=torch.float64))

    def forward(self, ids, weights):
        return super().forward(F.embedding(ids[:, 0], self.rows, sparse=True))[:, 0]


class WithoutModule(Tables):
    """Has a sparse gradient that is of no module with ``sparse=True``."""

    def build_model(self):
        return BareParameter()

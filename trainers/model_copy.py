"""What a trainer of the parameter server holds of the server's model, and what of it the task changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paramserver.checkpoint import stage_copy
from paramserver.errors import TaskError
from paramserver.metrics.records import TableUse
from paramserver.parameters.flat import FlatLayout, trainable_parameters
from paramserver.parameters.model import LoadedParameters, extra_state_dict
from paramserver.parameters.model_tree import ModelTree, PackedBuffers
from paramserver.parameters.numerics import checksums
from paramserver.parameters.remote_tables import RemoteTable


class ModelCopy:
    """The model of a trainer: the servers own its trained parameters, which a task does not change.

    What else a task changes is sent to server 0: module buffers and frozen parameters. ``parameters`` are the trained
    ones, by name, in the order of the server's layout; with ``shares_memory`` they are the server's memory.
    ``before_refusal`` is called before a change of the task is refused. ``tables`` are the embedding tables, by name,
    and where the rows of each server end.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        shares_memory: bool = False,
        before_refusal: Callable[[], object] = lambda: None,
        tables: Mapping[str, list[int]] | None = None,
    ) -> None:
        self.parameters = parameters
        self.tree = ModelTree(model)
        self.keeps_buffers = False  # a change of them between two steps is kept
        self._model = model
        self._shares_memory = shares_memory
        self._before_refusal = before_refusal
        self._tables = dict(tables or {})
        # Rows that are on the servers only cannot be changed here.
        own = {name: parameter for name, parameter in parameters.items() if not isinstance(parameter, RemoteTable)}
        self.loaded = LoadedParameters(own, owned=not shares_memory, tables=self._tables.keys())
        self.known_buffers: PackedBuffers | None = None  # that the server sent, or was sent, last
        trained = {id(parameter) for parameter in parameters.values()}
        self._frozen = {n: p for n, p in model.named_parameters() if id(p) not in trained}
        self._frozen_sums = checksums(self._frozen)
        self._changed_frozen: set[str] = set()

    # Trained parameters.

    def check_unchanged(self, between_steps: bool = False) -> None:
        """Refuse changes that the task made to trained parameters since they were loaded.

        Between steps a server may have written to the memory that it shares with this process.
        """
        try:
            self.loaded.check(values=not (between_steps and self._shares_memory))
        except TaskError:
            self._before_refusal()
            raise

    @contextmanager
    def hooks_called(self, are_waiting: bool) -> Iterator[None]:
        """Refuse changes of hooks that are called in this context. ``are_waiting``: the others wait for this trainer.

        Shared memory stays as it is meanwhile.
        """
        stays = are_waiting or not self._shares_memory
        self.check_unchanged(between_steps=True)
        self.loaded.note(values=stays)
        yield
        self.check_unchanged(between_steps=not stays)

    def check_gradients(self) -> None:
        """Refuse, by name, what would be lost."""
        for name, trained in self.parameters.items():
            gradient = trained.grad
            if gradient is None or gradient.layout is (torch.sparse_coo if name in self._tables else torch.strided):
                if gradient is not None and gradient.is_sparse and gradient.sparse_dim() != 1:
                    raise TaskError(
                        f"the gradient of table {name} must have one sparse dimension, its rows, and has "
                        f"{gradient.sparse_dim()}; make it with to_sparse(1)"
                    )
            elif name in self._tables:
                raise TaskError(
                    f"the gradient of table {name} is dense, and the module has sparse=True; use the table in its "
                    "module only, or set sparse=False"
                )
            else:
                raise TaskError(
                    f"the gradient of parameter {name} is sparse, and that of no nn.Embedding or nn.EmbeddingBag with "
                    "sparse=True; use one of these, or dense gradients (sparse=False)"
                )

    def coalesce_rows(self) -> tuple[int, int]:
        """Add up values for the same row in gradients of tables; return how many ids and rows these have."""
        ids = rows = 0
        for name in self._tables:
            table = self.parameters[name]
            if (gradient := table.grad) is None:
                continue
            table.grad = gradient.coalesce()
            row_bytes = table.numel() // max(len(table), 1) * table.element_size()
            if name not in self.tree.table_uses:
                self.tree.table_uses[name] = TableUse(len(table), row_bytes, self._tables[name])
            self.tree.table_uses[name].add(gradient._nnz(), table.grad._indices()[0].cpu().numpy())
            ids, rows = ids + gradient._nnz(), rows + table.grad._nnz()
        return ids, rows

    # Module buffers, and what else the server lacks.

    def load_buffers(self, packed: PackedBuffers | None) -> None:
        """Load the module buffers that the server sent; None if it sent none."""
        if packed is not None:
            self.tree.load_buffers(packed)
            self.known_buffers = packed

    def pack_buffers(self) -> PackedBuffers:
        """Return the module buffers, to be sent to the server."""
        self.known_buffers = self.tree.pack_buffers()
        return self.known_buffers

    def changed_buffers(self) -> PackedBuffers | None:
        """Return the module buffers that changed since the server sent or received them; None if none is kept."""
        if self.known_buffers is None or not self.keeps_buffers:
            return None
        changed = self.tree.pack_changed_buffers(self.known_buffers)
        if changed is not None:
            self.pack_buffers()
        return changed

    def extra_state(self) -> dict[str, Any]:
        """Return what the model of the server lacks: ``get_extra_state`` of the modules, and changed frozen parameters.

        A task may change frozen parameters, such as those of a target network, also through ``.data``, so their values
        are compared.
        """
        sums = checksums(self._frozen)
        self._changed_frozen |= {name for name in sums if sums[name] != self._frozen_sums[name]}
        frozen = {name: self._frozen[name].detach() for name in sorted(self._changed_frozen)}
        on_cpu: dict[str, Any] = stage_copy({**extra_state_dict(self._model), **frozen})
        return on_cpu


def find_trained(model: nn.Module, layout: FlatLayout) -> dict[str, Tensor]:
    """Return the parameters of a model that correspond to the slots of the server's layout, in its order.

    Raises:
        TaskError: one is missing, or has another shape.
    """
    own = trainable_parameters(model)
    for slot in layout.slots:
        if slot.name not in own or tuple(own[slot.name].shape) != slot.shape:
            raise TaskError(
                f"build_model must build the same model in every process, and parameter {slot.name} of shape "
                f"{slot.shape} is on the server only; let nothing in it depend on the rank or on time"
            )
    return {slot.name: own[slot.name] for slot in layout.slots}

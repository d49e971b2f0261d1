"""Writes the rows of embedding tables that have changed since a step, for serving: ``paramserver export RUN_DIR``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.checkpoint import load_chosen
from paramserver.checkpoint.format import LATEST, step_of
from paramserver.errors import CheckpointError, UnsupportedConfiguration
from paramserver.evaluate import add_checkpoint_arguments
from paramserver.launch import run_command
from paramserver.predict import check_out, write_tensors
from paramserver.process_utils import print_output
from paramserver.runs.resume import open_run

if TYPE_CHECKING:
    from torch import Tensor


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paramserver export",
        description="Write the rows of embedding tables (docs/tables.md) that have changed since a step, and all other "
        "weights, for a process that serves the model and has the weights of that step. Needs no code of the task; the "
        "run may still be in progress.",
        epilog="Exit codes: 0 done, 2 the input is wrong.",
    )
    add_checkpoint_arguments(parser)
    parser.add_argument(
        "--rows_since",
        type=int,
        required=True,
        metavar="STEP",
        help="rows that an update after this step has changed; 0 for those that any update has changed",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="name.npz or name.pt; a file that exists is replaced"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    given = make_parser().parse_args(argv)
    return run_command(lambda: print_output(export_rows(given.run, given.rows_since, given.out, given.checkpoint)))


def export_rows(run_dir: Path, since: int, out: Path, which: str = "latest") -> str:
    """Write what has changed after step ``since`` up to a checkpoint, and describe the file.

    It holds ``step``, that of the checkpoint; of each table, such as ``users.weight``, the numbers of rows and their
    values as ``users.weight.rows`` and ``users.weight.values``; and all other weights and module buffers by their name.
    Load it with ``numpy.load`` or ``torch.load``.

    Args:
        run_dir: the folder of the run, or of one of its checkpoints.
        since: rows that an update after this step has changed.
        out: the file.
        which: ``latest``, ``best``, or the number of a step.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged, or no versions of rows are in it.
        UnsupportedConfiguration: ``since`` is not between 0 and the step of the checkpoint, or the file is not usable.

    Example::

        >>> export_rows(Path("runs/ratings"), 1000, Path("new.npz"))  # doctest: +SKIP
        'new.npz: step 1200; users.weight 5120 of 1000000 rows, items.weight 880 of 50000 rows'
    """
    check_out(out)
    run = open_run(run_dir)
    if run.chosen is not None and which == LATEST:
        which = str(step_of(run.chosen.name))
    checkpoint, (weights, optimizer, state) = load_chosen(run.path, which, "model", "optimizer", "run")
    if not 0 <= since <= checkpoint.step:
        raise UnsupportedConfiguration(
            f"--rows_since ({since}) must be from 0 to {checkpoint.step}, the step of {checkpoint.path}; give the step "
            "of the last export, or --checkpoint"
        )
    tables = _rows_since(optimizer, state.get("parameters", ()), since)
    if not tables:
        raise CheckpointError(
            f"{checkpoint.path} has no versions of rows; train embedding tables (nn.Embedding or nn.EmbeddingBag with "
            "sparse=True), and with this release of paramserver"
        )
    write_tensors(out, _content(checkpoint.step, weights, tables))
    counts = [f"{name} {len(rows)} of {len(weights[name])} rows" for name, rows in tables.items()]
    return f"{out}: step {checkpoint.step}; {', '.join(counts)}"


def _rows_since(optimizer: Mapping[str, Any], names: Sequence[str], since: int) -> dict[str, Tensor]:
    """Return the numbers of the rows that have changed after ``since``, by the name of their table."""
    from paramserver.optim.named_optimizers import states_by_position
    from paramserver.optim.row_versions import ROW_VERSION

    return {
        names[position]: (state[ROW_VERSION] > since).nonzero()[:, 0]
        for position, state in states_by_position(optimizer).items()
        if ROW_VERSION in state
    }


def _content(step: int, weights: Mapping[str, Any], tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    import torch

    content = {"step": torch.tensor(step)}
    of_tables = {weights[name].data_ptr() for name in tables}  # also under other names, if they are tied
    for name, weight in weights.items():
        if name in tables:
            content |= {f"{name}.rows": tables[name], f"{name}.values": weight[tables[name]]}
        elif isinstance(weight, torch.Tensor) and weight.data_ptr() not in of_tables:
            content[name] = weight
    return content

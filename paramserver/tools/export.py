"""Writes the model of a checkpoint, or the rows of tables that have changed, for serving: ``paramserver export``."""

from __future__ import annotations

import argparse
import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.checkpoint import load_chosen
from paramserver.checkpoint.format import LATEST, step_of
from paramserver.errors import CheckpointError, TaskError, UnsupportedConfiguration, kind_and_message
from paramserver.evaluate import Restored, add_checkpoint_arguments, restore
from paramserver.importing import name_user_error
from paramserver.launch import CommandParser, add_overrides, run_command
from paramserver.predict import check_out, replaced_file, source_batches, write_tensors
from paramserver.process_utils import print_output
from paramserver.runs.resume import open_run

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram


_ONNX_BYTES = 2**31 - 2**20  # of one file of protobuf, less what is not a weight


@dataclass(frozen=True)
class Format:
    """A format of models: the ending of its files, the packages that it needs, and what makes the bytes of one."""

    ending: str
    packages: Sequence[str]
    to_bytes: Callable[[Restored, str | None], bytes]


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="paramserver export",
        description="Write the model of a checkpoint for a process that serves it (--format). Or write the rows of "
        "embedding tables (docs/tables.md) that have changed since a step, and all other weights (--rows_since), for a "
        "process that has the weights of that step, which needs no code of the task. The run may still be in progress.",
        epilog="Exit codes: 0 done, 1 the code of the task failed, 2 the input is wrong.",
    )
    add_checkpoint_arguments(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--format", choices=list(FORMATS), help="of the model; onnx and safetensors need the extra export"
    )
    what.add_argument(
        "--rows_since",
        type=int,
        metavar="STEP",
        help="rows that an update after this step has changed; 0 for those that any update has changed",
    )
    parser.add_argument(
        "--source",
        metavar="CODE",
        help="onnx and torch_export: module:function or path/to/file.py:function, as of paramserver predict; the model "
        "is traced with its first batch in predict_step (default: the first batch of the validation)",
    )
    endings = ", ".join(f"name{one.ending}" for one in FORMATS.values())
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help=f"{endings}; of rows name.npz or name.pt; a file that exists is replaced",
    )
    add_overrides(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    given = make_parser().parse_args(argv)

    def export() -> None:
        if given.format is None:
            if given.source is not None or given.overrides:
                raise UnsupportedConfiguration(
                    "--source and --set must be left out with --rows_since, which builds no model; use --format"
                )
            text = export_rows(given.run, given.rows_since, given.out, given.checkpoint)
        else:
            text = export_model(given.run, given.format, given.out, given.checkpoint, given.source, given.overrides)
        print_output(text)

    return run_command(export)


def export_model(
    run_dir: Path,
    format: str,
    out: Path,
    which: str = LATEST,
    source: str | None = None,
    overrides: Sequence[str] = (),
) -> str:
    """Write the model of a checkpoint, in ``eval()`` and on the CPU, and describe the file.

    Of ``safetensors``, ``safetensors.torch.load_file`` gives the ``state_dict()``. The others have the computation too:
    what ``forward`` does with the first input that it gets. The first dimension of each tensor in it may have another
    size than there, unless it is 1 or the computation depends on it.

    ``source`` is the reference of a function that returns samples, as for ``predict_run``, for which ``predict_step``
    calls the model; None for ``validation_step`` and the first batch of the validation. The rest is as for
    ``evaluate_run``.

    Raises:
        CheckpointError: as ``evaluate_run``.
        TaskError: there is no input, or the model cannot be traced.
        UnsupportedConfiguration: a package is missing, or the format cannot hold the model, or the file has another
            ending, or its folder does not exist.
    """
    kind = FORMATS[format]
    check_out(out, kind.ending)
    for package in kind.packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UnsupportedConfiguration(
                f"--format ({format}) needs {package}; install the extra export, or {package}"
            ) from error
    restored = restore(run_dir, which, [*overrides, "device.kind=cpu"])
    restored.model.eval()
    content = kind.to_bytes(restored, source)
    with replaced_file(out) as file:
        file.write(content)
    count = sum(parameter.numel() for parameter in restored.model.parameters())
    return f"{out}: {format}, {count} parameters, by {restored.checkpoint.path.name}"


def _to_safetensors(restored: Restored, source: str | None) -> bytes:
    from safetensors.torch import save
    from torch import Tensor

    if source is not None:
        raise UnsupportedConfiguration("--source is for onnx and torch_export, which trace the model; leave it out")
    state = restored.model.state_dict()
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise UnsupportedConfiguration(
            f"--format (safetensors) holds tensors only, and the model has {', '.join(others)}; choose torch_export"
        )
    # Copies: tied weights are stored under each of their names, so that load_state_dict finds all.
    return save({name: value.clone().contiguous() for name, value in state.items()})


def _to_torch_export(restored: Restored, source: str | None) -> bytes:
    import torch

    file = io.BytesIO()
    torch.export.save(_trace(restored, source), file)
    return file.getvalue()


def _to_onnx(restored: Restored, source: str | None) -> bytes:
    import torch

    state = restored.model.state_dict().values()
    if (size := sum(value.nbytes for value in state if isinstance(value, torch.Tensor))) >= _ONNX_BYTES:
        raise UnsupportedConfiguration(
            f"--format (onnx) holds at most {_ONNX_BYTES} bytes, and the model has {size}; choose torch_export"
        )
    program = torch.onnx.export(_trace(restored, source), dynamo=True, verbose=False)
    assert program is not None
    return bytes(program.model_proto.SerializeToString())


def _trace(restored: Restored, source: str | None) -> ExportedProgram:
    """Return what ``forward`` computes, with a first dimension of any size where that is possible."""
    import torch
    from torch.utils._pytree import tree_leaves

    arguments, keywords = _example(restored, source)
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in tree_leaves((arguments, keywords)):
        if isinstance(tensor, torch.Tensor) and tensor.dim() and len(tensor) > 1:
            shapes[tensor] = {0: torch.export.Dim.AUTO}
    dynamic = shapes.dynamic_shapes(restored.model, arguments, keywords)  # type: ignore[no-untyped-call]
    try:
        return torch.export.export(restored.model, arguments, keywords, dynamic_shapes=dynamic)
    except Exception as error:
        raise TaskError(
            f"{type(restored.model).__name__}.forward cannot be traced by torch.export "
            f"({kind_and_message(error).splitlines()[0]}); change it, or choose safetensors"
        ) from error


def _example(restored: Restored, source: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments and keyword arguments with which a step of the task calls the model first."""
    import torch

    from paramserver.sources import Partition
    from paramserver.trainers.validation import validation_batches

    task, calls = restored.task, list[tuple[tuple[Any, ...], dict[str, Any]]]()
    step: Callable[..., Any]
    further: tuple[int, ...]
    if source is not None:
        what, step, further, batches = "--source", task.predict_step, (0,), source_batches(restored, source)
    else:
        what, step, further = "validation_source", task.validation_step, (0, restored.batch_idx)
        if (loader := validation_batches(task, Partition(0, 1), restored.config)) is None:
            raise TaskError(
                f"{type(task).__name__} has no validation_source, with whose first batch the model is traced; give "
                "--source module:function, which returns samples"
            )
        batches = (batch for batch, _ in loader)
    batch = next(batches, None)
    if batch is None:
        raise TaskError(f"{what} gave no samples; return at least one")
    hook = restored.model.register_forward_pre_hook(lambda _, *inputs: calls.append(inputs), with_kwargs=True)
    try:
        with torch.no_grad(), name_user_error(f"{step.__name__}, batch 0 of {what},"):
            if source is None:
                task.on_validation_start(restored.batch_idx)
            step(restored.model, batch, *further)
    finally:
        hook.remove()
    if not calls:
        raise TaskError(
            f"{step.__name__} must call the model that it is given, which is traced with that input; call it"
        )
    return calls[0]


FORMATS = {
    "safetensors": Format(".safetensors", ("safetensors",), _to_safetensors),
    "onnx": Format(".onnx", ("onnx", "onnxscript"), _to_onnx),
    "torch_export": Format(".pt2", (), _to_torch_export),
}


def export_rows(run_dir: Path, since: int, out: Path, which: str = "latest") -> str:
    """Write what has changed after step ``since`` up to a checkpoint, and describe the file.

    It holds ``step``, that of the checkpoint; of each table, such as ``users.weight``, the numbers of rows and their
    values as ``users.weight.rows`` and ``users.weight.values``, under each name of tied tables; and all other weights
    and module buffers by their name.
    Load it with ``numpy.load`` or ``torch.load``.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged, or no versions of rows are in it.
        UnsupportedConfiguration: ``since`` is not between 0 and the step of the checkpoint, or the file is not usable,
            or a tensor of the model has the name of another entry of the file.
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
    from paramserver.optim.row_steps import ROW_VERSION

    return {
        names[position]: (state[ROW_VERSION] > since).nonzero()[:, 0]
        for position, state in states_by_position(optimizer).items()
        if ROW_VERSION in state
    }


def _content(step: int, weights: Mapping[str, Any], tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    import torch

    content = {"step": torch.tensor(step)}
    # By their memory: a table that is tied to another one has both names in a state_dict, and one in the optimizer.
    changed = {(weights[name].data_ptr(), weights[name].shape): rows for name, rows in tables.items()}
    for name, weight in weights.items():
        if not isinstance(weight, torch.Tensor):
            continue
        own = {name: weight}
        if (rows := changed.get((weight.data_ptr(), weight.shape))) is not None:
            own = {f"{name}.rows": rows, f"{name}.values": weight[rows]}
        if twice := content.keys() & own.keys():
            raise UnsupportedConfiguration(
                f"--rows_since writes an entry {min(twice)} of its own, and the model has a tensor of this name; "
                "rename it in the model, or export the whole model with --format"
            )
        content |= own
    return content

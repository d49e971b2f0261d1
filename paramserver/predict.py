"""Writes what the model of a checkpoint returns for given samples: ``paramserver predict RUN_DIR``."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.evaluate import Restored, add_checkpoint_arguments, restore
from paramserver.fileio import TEMPORARY, atomic_rename
from paramserver.importing import current_folder, load_object, name_user_error
from paramserver.launch import CommandParser, add_overrides, run_command
from paramserver.process_utils import exit_process, print_output

if TYPE_CHECKING:
    from torch import Tensor

    from paramserver.task import Task

_BARE = "output"  # the name of an output that is a tensor, in a file that has names


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="paramserver predict",
        description="Write what the model of a run's checkpoint returns for given samples: Task.predict_step for each "
        "batch, by default model(batch). Trains nothing; the run may still be in progress.",
        epilog="Exit codes: 0 done, 1 it failed, 2 the input is wrong.",
    )
    add_checkpoint_arguments(parser)
    parser.add_argument(
        "--source",
        required=True,
        metavar="CODE",
        help="module:function or path/to/file.py:function; it takes no arguments and returns the samples: a data set, "
        "an iterable, or a DataLoader, whose batches are used as they are",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="name.npz or name.pt; a file that exists is replaced"
    )
    add_overrides(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    given = make_parser().parse_args(argv)
    return run_command(
        lambda: print_output(predict_run(given.run, given.source, given.out, given.checkpoint, given.overrides))
    )


def predict_run(run_dir: Path, source: str, out: Path, which: str = "latest", overrides: Sequence[str] = ()) -> str:
    """Write the outputs of a checkpoint's model for the samples of ``source``, and describe the file.

    The outputs of all batches are joined along the first dimension. A file ``.npz`` holds numpy arrays, ``.pt`` a
    tensor, or a dictionary of tensors: by their keys in what ``Task.predict_step`` returns, or by their position.

    Args:
        run_dir, which, overrides: as for ``evaluate_run``.
        source: reference of the function that returns the samples.
        out: the file.

    Raises:
        CheckpointError: as ``evaluate_run``.
        TaskError: the outputs cannot be joined or stored.
        UnsupportedConfiguration: the file has another ending, or its folder does not exist.

    Example::

        >>> predict_run(Path("runs/digits"), "task.py:test_images", Path("out.npz"), "best")  # doctest: +SKIP
        'out.npz: output (360x10, float32), by step-00001200'
    """
    check_out(out)
    restored = restore(run_dir, which, overrides)
    outputs = _predict(restored, source_batches(restored, source))
    write_tensors(out, outputs)
    kinds = [
        f"{name or _BARE} ({'x'.join(map(str, tensor.shape))}, {str(tensor.dtype).removeprefix('torch.')})"
        for name, tensor in outputs.items()
    ]
    return f"{out}: {', '.join(kinds)}, by {restored.checkpoint.path.name}"


def source_batches(restored: Restored, source: str) -> Iterator[Any]:
    """Return the batches of the samples that the function ``source`` returns, for a model of ``restored``."""
    samples = load_object(source, "--source", [current_folder(), *restored.folders])
    try:
        inspect.signature(samples).bind()
    except TypeError as error:
        raise TaskError(
            f"--source ({source}) is {samples!r}; it must be a function without arguments that returns the samples"
        ) from error
    with name_user_error(f"--source ({source})"):
        returned = samples()
    training = restored.config.training
    return _batches(restored.task, returned, training.validation_batch_size or training.batch_size)


def _predict(restored: Restored, batches: Iterable[Any]) -> dict[str, Tensor]:
    import torch

    from paramserver.parameters.model import autocast
    from paramserver.trainers.validation import eval_mode, make_input_mover

    task, config, placement = restored.task, restored.config, restored.placement
    move = make_input_mover(placement)
    found: list[dict[str, Tensor]] = []
    with eval_mode(restored.model), autocast(placement.device, config.training.precision):
        for batch_idx, batch in enumerate(batches):
            with name_user_error(f"predict_step, batch {batch_idx} of --source,"):
                outputs = task.predict_step(restored.model, move(batch), batch_idx)
            if not (outputs := _named_tensors(outputs)):
                raise TaskError(f"predict_step returned no tensor for batch {batch_idx}; return at least one")
            if found and outputs.keys() != found[0].keys():
                raise TaskError(
                    f"predict_step must return the same outputs for every batch: {', '.join(found[0])} for the first, "
                    f"and {', '.join(outputs)} for batch {batch_idx}"
                )
            found.append(outputs)
    if not found:
        raise TaskError("--source gave no samples; return at least one")
    try:
        return {name: torch.cat([outputs[name] for outputs in found]) for name in found[0]}
    except RuntimeError as error:
        raise TaskError(
            f"the outputs of all batches must have the same shape but for the first dimension ({error}); pad or reduce "
            "them in predict_step"
        ) from error


def _batches(task: Task, samples: Any, size: int) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    from paramserver.sources.factory import is_map_style

    if isinstance(samples, DataLoader):
        yield from samples
        return
    if not is_map_style(samples) and not isinstance(samples, Iterable):
        raise TaskError(f"--source returned {type(samples).__name__}; it must return a data set or an iterable")
    with name_user_error("the data set of --source"):
        length = len(samples) if is_map_style(samples) else None
        one_by_one = iter(samples) if length is None else (_sample(samples, index) for index in range(length))
    for number in count():
        with name_user_error(f"--source, after {number * size} samples,"):
            group = list(islice(one_by_one, size))
        if not group:
            return
        with name_user_error(f"process_sample or collate, for samples {number * size} and those after it of --source,"):
            batch = task.collate([task.process_sample(sample) for sample in group])
        yield batch


def _sample(samples: Any, index: int) -> Any:
    with name_user_error(f"--source, index {index} of the data set,"):
        return samples[index]


def _named_tensors(value: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors of an output, on the CPU, by their place in it, which is "" if the output is a tensor."""
    import torch
    from torch import Tensor

    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise TaskError(f"predict_step: {name or 'the output'} is a sparse tensor; return output.to_dense()")
        if value.dim() == 0:
            raise TaskError(f"predict_step: {name or 'the output'} must have a first dimension, that of the samples")
        return {name: value.detach().cpu()}
    if not isinstance(value, (Mapping, list, tuple)):
        raise TaskError(
            f"predict_step: {name or 'the output'} is {type(value).__name__}; return tensors, or dictionaries, lists "
            "and tuples of them"
        )
    found: dict[str, Tensor] = {}
    for place, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        if item is None:
            continue
        own = _named_tensors(item, f"{name}.{place}" if name else str(place))
        if not str(place) or not own.keys().isdisjoint(found):
            known = ", ".join(map(repr, [*found, *own]))
            raise TaskError(f"predict_step: outputs must have names that differ and are not empty, not {known}; rename")
        found.update(own)
    return found


def check_out(out: Path, *endings: str) -> None:
    """Check a file that is to be written: by ``write_tensors``, unless other endings are given.

    Raises:
        UnsupportedConfiguration: it has another ending, or its folder does not exist.
    """
    endings = endings or (".npz", ".pt")
    if out.suffix not in endings:
        cure = "choose one of them" if len(endings) > 1 else "rename it"
        raise UnsupportedConfiguration(f"--out ({out}) must end in {' or '.join(endings)}; {cure}")
    if not out.parent.is_dir() or out.is_dir():
        raise UnsupportedConfiguration(f"--out ({out}) must be a file in a folder that exists; make the folder first")


def write_tensors(out: Path, outputs: Mapping[str, Tensor]) -> None:
    """Write tensors by name as numpy arrays (``.npz``) or with ``torch.save`` (``.pt``); replace the file at the end.

    One with the name "" is written as it is to ``.pt``, and as ``output`` to ``.npz``.

    Raises:
        UnsupportedConfiguration: the file cannot be written.
    """
    import numpy as np
    import torch

    with replaced_file(out) as file:
        if out.suffix == ".pt":
            torch.save(outputs.get("", dict(outputs)), file)
        else:
            with zipfile.ZipFile(file, "w") as archive:  # not numpy.savez, whose arguments are names too
                for name, tensor in outputs.items():
                    # numpy has no bfloat16 and no float8; float32 holds each of their values.
                    is_narrow = tensor.is_floating_point() and (
                        tensor.dtype is torch.bfloat16 or tensor.dtype.itemsize == 1
                    )
                    array = (tensor.float() if is_narrow else tensor).numpy()
                    with archive.open(f"{name or _BARE}.npy", "w", force_zip64=True) as entry:
                        np.lib.format.write_array(entry, array, allow_pickle=False)


@contextmanager
def replaced_file(out: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that takes the place of ``out`` once it is complete.

    Raises:
        UnsupportedConfiguration: the file cannot be written.
    """
    temporary = out.with_name(f".{out.name}.{os.getpid()}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            yield file
        atomic_rename(temporary, out)
    except OSError as error:
        raise UnsupportedConfiguration(f"--out ({out}) cannot be written ({error}); choose another file") from error
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))

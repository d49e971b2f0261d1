"""Uses the model of a checkpoint, without training: ``paramserver evaluate RUN_DIR`` and ``paramserver predict``."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.checkpoint import Checkpoint, load_chosen
from paramserver.checkpoint.format import LATEST, step_of
from paramserver.config import Config, load_config
from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.fileio import TEMPORARY, atomic_rename
from paramserver.importing import code_folders, load_object
from paramserver.launch import add_overrides, report_error
from paramserver.process_utils import exit_process, print_output
from paramserver.runs.resume import find_config_file, open_run

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paramserver.devices import Placement
    from paramserver.task import Task


@dataclass(frozen=True)
class Evaluation:
    """The result of validating a checkpoint.

    Args:
        checkpoint: its name.
        step: its step.
        samples: how many validation samples were used.
        values: exact means over ``samples`` samples, by the name of the metric.
        logged: what the task last passed to ``self.log``, by name.
    """

    checkpoint: str
    step: int
    samples: int
    values: dict[str, float]
    logged: dict[str, float]


class EvaluationTrainer:
    """What ``task.trainer`` is during an evaluation or prediction: it only has ``log`` and ``all_gather``."""

    trainer_index = 0

    def __init__(self) -> None:
        self.logged: dict[str, float] = {}

    def log(self, name: str, value: Any, reduce: str = "mean") -> None:
        self.logged[name] = float(value)

    def all_gather(self, value: Any) -> list[Any]:
        from trainers.base import private_copy

        return [private_copy(value)]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``paramserver evaluate``."""
    parser = argparse.ArgumentParser(
        prog="paramserver evaluate",
        description="Validate the model of a run's checkpoint with the run's own task and data. Trains and changes "
        "nothing; the run may still be in progress.",
        epilog="Exit codes: 0 done, 1 the validation failed, 2 the input is wrong.",
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="the folder of a run, or of one of its checkpoints")
    parser.add_argument(
        "--checkpoint", default="latest", metavar="WHICH", help="latest (default), best, or a step such as 1200"
    )
    add_overrides(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = make_parser().parse_args(argv)
    try:
        found = evaluate_run(arguments.run, arguments.checkpoint, arguments.overrides)
    except KeyboardInterrupt:
        return 1
    except Exception as error:  # noqa: BLE001 - printed last; with its traceback, unless the input is wrong
        return report_error(error)
    print_output(json.dumps(asdict(found)) if arguments.json else _text(found))
    return 0


def _text(found: Evaluation) -> str:
    rows = [("checkpoint", found.checkpoint), ("step", str(found.step)), ("samples", str(found.samples))]
    rows += [(name, f"{value:.6g}") for name, value in sorted({**found.logged, **found.values}.items())]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}s}  {value}" for name, value in rows)


def evaluate_run(run_dir: Path, which: str = "latest", overrides: Sequence[str] = ()) -> Evaluation:
    """Validate the model of a checkpoint on the first device of the config, with all validation samples.

    Args:
        run_dir: the folder of the run, or of one of its checkpoints.
        which: ``latest``, ``best``, or the number of a step.
        overrides: as after ``--set``.

    Raises:
        CheckpointError: there is no such checkpoint, or it was removed meanwhile, or it is damaged.
        TaskError: the task has no validation samples.

    Example::

        >>> result = evaluate_run(Path("runs/digits"), "best")  # doctest: +SKIP
        >>> result.step, result.values  # doctest: +SKIP
        (1200, {'accuracy': 0.97})
    """
    restored = _restore(run_dir, which, overrides)
    return _evaluate(restored)


@dataclass(frozen=True)
class _Restored:
    """The model of a checkpoint, with the task as it was then.

    Args:
        folders: where code is searched.
        batch_idx: of the next training batch.
    """

    config: Config
    folders: Sequence[Path]
    checkpoint: Checkpoint
    task: Task
    model: nn.Module
    placement: Placement
    batch_idx: int


def _restore(run_dir: Path, which: str, overrides: Sequence[str]) -> _Restored:
    """Load the model of a checkpoint; see ``evaluate_run`` for the arguments."""
    from paramserver.devices import place_trainer
    from paramserver.parameters.model import build_model, load_weights
    from paramserver.task import make_task, restore_task

    run = open_run(run_dir)
    config = load_config(find_config_file(run), overrides=overrides)
    if run.chosen is not None and which == LATEST:
        which = str(step_of(run.chosen.name))
    # Everything is read at once: a run in progress may remove the checkpoint while the model is built.
    name = "model" if config.training.ema_decay is None else "ema"
    checkpoint, (weights, part) = load_chosen(run.path, which, name, "trainer-0")
    folders = code_folders(overrides=overrides, recorded=run.task_folders())
    task = make_task(config, folders)
    placement, task.trainer = place_trainer(config, 0, 1), EvaluationTrainer()
    task.devices, task.config = placement.devices, config
    model = build_model(task, config.seed, placement)
    load_weights(model, weights, str(checkpoint.path))
    restore_task(task, part["task"], {})
    return _Restored(config, folders, checkpoint, task, model, placement, part["counters"]["batch_idx"])


def _evaluate(restored: _Restored) -> Evaluation:
    from paramserver.sources import Partition
    from trainers.validation import evaluate, make_input_mover, validation_batches

    config, task, model, placement = restored.config, restored.task, restored.model, restored.placement
    batches = validation_batches(task, Partition(0, 1), config)
    if batches is None:
        raise TaskError(f"{type(task).__name__}.validation_source gives nothing to validate; write one")
    batch_idx = restored.batch_idx
    task.on_validation_start(batch_idx)
    sums = evaluate(
        task, model, batches, batch_idx, make_input_mover(placement), config.training.precision, placement.device
    )
    task.on_validation_end(batch_idx)
    checkpoint = restored.checkpoint
    return Evaluation(checkpoint.path.name, checkpoint.step, sums.samples, sums.means(), task.trainer.logged)


# Predictions.


def make_predict_parser() -> argparse.ArgumentParser:
    """Return the parser of ``paramserver predict``."""
    parser = argparse.ArgumentParser(
        prog="paramserver predict",
        description="Write what the model of a run's checkpoint returns for given samples: Task.predict_step for each "
        "batch, by default model(batch). Trains nothing; the run may still be in progress.",
        epilog="Exit codes: 0 done, 1 it failed, 2 the input is wrong.",
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="the folder of a run, or of one of its checkpoints")
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
    parser.add_argument(
        "--checkpoint", default="latest", metavar="WHICH", help="latest (default), best, or a step such as 1200"
    )
    add_overrides(parser)
    return parser


def predict_main(argv: Sequence[str] | None = None) -> int:
    """Run ``paramserver predict`` and return the exit code."""
    arguments = make_predict_parser().parse_args(argv)
    try:
        text = predict_run(arguments.run, arguments.source, arguments.out, arguments.checkpoint, arguments.overrides)
    except KeyboardInterrupt:
        return 1
    except Exception as error:  # noqa: BLE001 - as in ``main``
        return report_error(error)
    print_output(text)
    return 0


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
    if out.suffix not in (".npz", ".pt"):
        raise UnsupportedConfiguration(f"--out ({out}) must end in .npz or .pt; choose one of them")
    if not out.parent.is_dir() or out.is_dir():
        raise UnsupportedConfiguration(f"--out ({out}) must be a file in a folder that exists; make the folder first")
    restored = _restore(run_dir, which, overrides)
    samples = load_object(source, "--source", [Path.cwd(), *restored.folders])
    try:
        inspect.signature(samples).bind()
    except TypeError as error:
        raise TaskError(
            f"--source ({source}) is {samples!r}; it must be a function without arguments that returns the samples"
        ) from error
    outputs = _predict(restored, samples())
    _write_outputs(out, outputs)
    kinds = [
        f"{name} ({'x'.join(map(str, tensor.shape))}, {str(tensor.dtype).removeprefix('torch.')})"
        for name, tensor in outputs.items()
    ]
    return f"{out}: {', '.join(kinds)}, by {restored.checkpoint.path.name}"


def _predict(restored: _Restored, samples: Any) -> dict[str, Tensor]:
    import torch

    from paramserver.parameters.model import autocast
    from trainers.validation import eval_mode, make_input_mover

    task, config, placement = restored.task, restored.config, restored.placement
    size = config.training.validation_batch_size or config.training.batch_size
    move = make_input_mover(placement)
    found: list[dict[str, Tensor]] = []
    with eval_mode(restored.model), autocast(placement.device, config.training.precision):
        for batch_idx, batch in enumerate(_batches(task, samples, size)):
            outputs = _named_tensors(task.predict_step(restored.model, move(batch), batch_idx))
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

    from paramserver.sources.data_loader import is_map_style

    if isinstance(samples, DataLoader):
        yield from samples
        return
    if not is_map_style(samples) and not isinstance(samples, Iterable):
        raise TaskError(f"--source returned {type(samples).__name__}; it must return a data set or an iterable")
    one_by_one = (samples[i] for i in range(len(samples))) if is_map_style(samples) else iter(samples)
    while group := list(islice(one_by_one, size)):
        yield task.collate([task.process_sample(sample) for sample in group])


def _named_tensors(value: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors of an output, on the CPU, by their place in it."""
    from torch import Tensor

    if isinstance(value, Tensor):
        if value.dim() == 0:
            raise TaskError(f"predict_step: {name or 'the output'} must have a first dimension, that of the samples")
        return {name or "output": value.detach().cpu()}
    if not isinstance(value, (Mapping, list, tuple)):
        raise TaskError(
            f"predict_step: {name or 'the output'} is {type(value).__name__}; return tensors, or dictionaries, lists "
            "and tuples of them"
        )
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {
        key: tensor
        for place, item in items
        if item is not None
        for key, tensor in _named_tensors(item, f"{name}.{place}" if name else str(place)).items()
    }


def _write_outputs(out: Path, outputs: Mapping[str, Tensor]) -> None:
    import numpy as np
    import torch

    temporary = out.with_name(f".{out.name}.{os.getpid()}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            if out.suffix == ".pt":
                torch.save(dict(outputs) if set(outputs) != {"output"} else outputs["output"], file)
            else:
                with zipfile.ZipFile(file, "w") as archive:  # not numpy.savez, whose arguments are names too
                    for name, tensor in outputs.items():
                        # numpy has no bfloat16; float32 holds each of its values.
                        array = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                            np.lib.format.write_array(entry, array, allow_pickle=False)
        atomic_rename(temporary, out)
    except OSError as error:
        raise UnsupportedConfiguration(f"--out ({out}) cannot be written ({error}); choose another file") from error
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))

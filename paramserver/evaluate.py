"""Validates the model of a checkpoint, without training: ``paramserver evaluate RUN_DIR``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.checkpoint import Checkpoint, load_chosen
from paramserver.checkpoint.format import LATEST, step_of
from paramserver.checkpoint.load import ObjectMissingError
from paramserver.config import Config, load_config
from paramserver.errors import CheckpointError, NoSuchMember, TaskError
from paramserver.fileio import json_text
from paramserver.importing import code_folders, name_user_error
from paramserver.launch import CommandParser, add_overrides, run_command
from paramserver.process_utils import exit_process, print_output
from paramserver.runs.resume import find_config_file, open_run

if TYPE_CHECKING:
    from torch import nn

    from paramserver.devices import Placement
    from paramserver.task import Task


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="the folder of a run, or of one of its checkpoints")
    parser.add_argument(
        "--checkpoint", default=LATEST, metavar="WHICH", help="latest (default), best, or a step such as 1200"
    )


class EvaluationTrainer:
    """What ``task.trainer`` is during an evaluation or prediction: ``validation`` is first that of the run."""

    trainer_index = 0
    is_evaluation = True  # for the error of an attribute that only training makes

    def __init__(self, validation: Mapping[str, float]) -> None:
        self.logged: dict[str, float] = {}
        self.validation = validation

    def __getattr__(self, name: str) -> Any:
        raise NoSuchMember(
            f"self.trainer has no {name} in an evaluation or prediction; it has trainer_index, validation, log, "
            "all_gather and stop"
        )

    def log(self, name: str, value: Any, reduce: str = "mean") -> None:
        from paramserver.parameters.numerics import to_number

        cure = "it must be one number: log .mean() or .norm(), or each element by a name of its own"
        self.logged[name] = to_number(value, f"self.log({name!r}, value): the value", cure)

    def all_gather(self, value: Any) -> list[Any]:
        from paramserver.checkpoint import stage_copy

        return [stage_copy(value)]

    def stop(self, reason: str) -> None:
        """There is no training that ends."""


@dataclass(frozen=True)
class Restored:
    """The model of a checkpoint, with the task as it was then."""

    config: Config
    folders: Sequence[Path]
    checkpoint: Checkpoint
    task: Task
    model: nn.Module
    placement: Placement
    batch_idx: int


def restore(
    run_dir: Path, which: str, overrides: Sequence[str], create_task: Callable[..., Task] | None = None
) -> Restored:
    """Load the model of a checkpoint on the first device of the config.

    ``which`` is ``latest``, ``best``, or the number of a step; ``run_dir`` the folder of the run, or of one of its
    checkpoints; ``create_task`` as for ``make_task``.

    Raises:
        CheckpointError: there is no such checkpoint, or it was removed meanwhile, or it is damaged.
        SourceError: ``on_resume`` of the task fails.
    """
    from paramserver.devices import place_trainer
    from paramserver.parameters.model import build_model, load_weights
    from paramserver.task import make_task, restore_task

    run = open_run(run_dir)
    config = load_config(find_config_file(run), overrides=overrides)
    if run.chosen is not None and which == LATEST:
        which = str(step_of(run.chosen.name))
    # Everything is read at once: a run in progress may remove the checkpoint while the model is built.
    name = "model" if config.training.ema_decay is None else "ema"
    try:
        checkpoint, (weights, part, state) = load_chosen(run.path, which, name, "trainer-0", "run")
    except ObjectMissingError as error:
        if error.name != "ema":
            raise
        raise CheckpointError(
            f"checkpoint {error.path} has no averages, as it was made without training.ema_decay; add "
            "--set training.ema_decay=null"
        ) from error
    folders = code_folders(overrides=overrides, recorded=run.task_folders())
    task = make_task(config, folders, create_task)
    placement, task.trainer = place_trainer(config, 0, 1), EvaluationTrainer(part.get("validation") or {})
    task.devices, task.config = placement.devices, config
    model = build_model(task, config.seed, placement)
    load_weights(model, weights, str(checkpoint.path), state.get("late_buffers", ()))
    with name_user_error("on_resume"):
        restore_task(task, part, {})
    return Restored(config, folders, checkpoint, task, model, placement, part["counters"]["batch_idx"])


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


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="paramserver evaluate",
        description="Validate the model of a run's checkpoint with the run's own task and data. Trains and changes "
        "nothing; the run may still be in progress.",
        epilog="Exit codes: 0 done, 1 the validation failed, 2 the input is wrong.",
    )
    add_checkpoint_arguments(parser)
    add_overrides(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)

    def evaluate() -> None:
        found = evaluate_run(arguments.run, arguments.checkpoint, arguments.overrides)
        print_output(json_text(asdict(found)) if arguments.json else _text(found))

    return run_command(evaluate)


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
    from paramserver.rng import validation_generators
    from paramserver.sources import Partition
    from paramserver.trainers.validation import evaluate, make_input_mover, validation_batches

    restored = restore(run_dir, which, overrides)
    config, task, model, placement = restored.config, restored.task, restored.model, restored.placement
    batches = validation_batches(task, Partition(0, 1), config)
    if batches is None:
        raise TaskError(f"{type(task).__name__}.validation_source gives nothing to validate; write one")
    batch_idx, checkpoint = restored.batch_idx, restored.checkpoint
    # The random numbers of trainer 0 in the validation of the run at this step.
    with validation_generators(config.seed, checkpoint.step, 0, placement.devices):
        with name_user_error("on_validation_start"):
            task.on_validation_start(batch_idx)
        sums = evaluate(
            task, model, batches, batch_idx, make_input_mover(placement), config.training.precision, placement.device
        )
        task.trainer.validation = sums.means()
        with name_user_error("on_validation_end"):
            task.on_validation_end(batch_idx)
    trainer = task.trainer
    return Evaluation(checkpoint.path.name, checkpoint.step, sums.samples, dict(trainer.validation), trainer.logged)


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))

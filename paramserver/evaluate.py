"""Validates the model of a checkpoint, without training: ``paramserver evaluate RUN_DIR``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paramserver.errors import TaskError
from paramserver.launch import add_overrides, run_command
from paramserver.process_utils import exit_process, print_output
from paramserver.runtime.restored import add_checkpoint_arguments, restore


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
    parser = argparse.ArgumentParser(
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
        print_output(json.dumps(asdict(found)) if arguments.json else _text(found))

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
        task.on_validation_start(batch_idx)
        sums = evaluate(
            task, model, batches, batch_idx, make_input_mover(placement), config.training.precision, placement.device
        )
        task.on_validation_end(batch_idx)
    return Evaluation(checkpoint.path.name, checkpoint.step, sums.samples, sums.means(), task.trainer.logged)


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))

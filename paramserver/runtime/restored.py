"""The model of a checkpoint with its task, for commands that train nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.checkpoint import Checkpoint, load_chosen
from paramserver.checkpoint.format import LATEST, step_of
from paramserver.config import Config, load_config
from paramserver.importing import code_folders
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
    """What ``task.trainer`` is during an evaluation or prediction: it only has ``log`` and ``all_gather``."""

    trainer_index = 0

    def __init__(self) -> None:
        self.logged: dict[str, float] = {}

    def log(self, name: str, value: Any, reduce: str = "mean") -> None:
        from paramserver.parameters.numerics import to_number

        cure = "it must be one number: log .mean() or .norm(), or each element by a name of its own"
        self.logged[name] = to_number(value, f"self.log({name!r}, value): the value", cure)

    def all_gather(self, value: Any) -> list[Any]:
        from paramserver.checkpoint import stage_copy

        return [stage_copy(value)]


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


def restore(run_dir: Path, which: str, overrides: Sequence[str]) -> Restored:
    """Load the model of a checkpoint on the first device of the config.

    ``which`` is ``latest``, ``best``, or the number of a step; ``run_dir`` the folder of the run, or of one of its
    checkpoints.

    Raises:
        CheckpointError: there is no such checkpoint, or it was removed meanwhile, or it is damaged.
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
    checkpoint, (weights, part, state) = load_chosen(run.path, which, name, "trainer-0", "run")
    folders = code_folders(overrides=overrides, recorded=run.task_folders())
    task = make_task(config, folders)
    placement, task.trainer = place_trainer(config, 0, 1), EvaluationTrainer()
    task.devices, task.config = placement.devices, config
    model = build_model(task, config.seed, placement)
    load_weights(model, weights, str(checkpoint.path), state.get("late_buffers", ()))
    restore_task(task, part["task"], {})
    return Restored(config, folders, checkpoint, task, model, placement, part["counters"]["batch_idx"])

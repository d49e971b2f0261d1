"""Going on with a stored run: where its config is, and what a person is told of the way it goes on."""

from __future__ import annotations

import shlex
from pathlib import Path

from paramserver.checkpoint import find_checkpoint, passed_over
from paramserver.config import Config, differences, load_config, num_trainers_of
from paramserver.errors import CheckpointError
from paramserver.rundir import RunDir

__all__ = ["changes", "config_file_of"]


def config_file_of(run: RunDir, given: Path | None = None) -> Path:
    """The file with the config that holds: the run's own, or ``given`` where the run has lost it.

    Raises:
        CheckpointError: there is neither, or the run never began.
    """
    if run.config_file.is_file():
        return run.config_file
    _refuse_empty(run)
    if given is None:
        raise CheckpointError(
            f"{run.path} holds checkpoints and no config.yaml; give the config that they were made with: python -m "
            f"paramserver.launch --config FILE --resume {shlex.quote(str(run.chosen or run.path))}"
        )
    return given


def _refuse_empty(run: RunDir) -> None:
    try:
        find_checkpoint(run.path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{run.path} holds no config.yaml and no checkpoint: that run never began; start it anew"
        ) from error


def changes(run: RunDir, config: Config) -> list[str]:
    """From where and in which ways the run goes on, as lines.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    checkpoint = run.chosen or find_checkpoint(run.path)
    lines = [f"resuming {run.path} from {checkpoint.name}"]
    lines += [f"  passed over: {wrong}" for wrong in (() if run.chosen else passed_over(checkpoint))]
    if not run.config_file.is_file():
        return [*lines, "  note: the run holds no config.yaml, so the given one holds"]
    stored = load_config(run.config_file)
    lines += [f"  changed: {line}" for line in differences(stored, config)]
    before, now = _samples_of_a_step(stored), _samples_of_a_step(config)
    return lines if before == now else [*lines, f"  note: a step takes {now} samples in place of {before}"]


def _samples_of_a_step(config: Config) -> str:
    return f"{num_trainers_of(config)} x {config.training.batch_size * config.training.accumulate_batches}"

"""Runs from Python: ``paramserver.run``, for scripts and notebooks."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.cluster import SUPERVISED, process_environ
from paramserver.config import Config, is_plain, load_config, mode_of, without_old_defaults
from paramserver.config.parsing import read_file
from paramserver.errors import UnsupportedConfiguration
from paramserver.launch import Result, launch_local
from paramserver.process_utils import LOADER_NAME
from paramserver.runs.attempt import recover
from paramserver.runs.resume import find_config_file, open_run
from paramserver.runs.rundir import RunDir

if TYPE_CHECKING:
    from paramserver.task import Task


def run(
    task: type[Task] | Task | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | Config | None = None,
    *,
    overrides: Sequence[str] = (),
    resume: str | os.PathLike[str] | None = None,
) -> Result:
    """Train a task with all ranks on this machine, and wait for the end of the run.

    Call it in a script under ``if __name__ == "__main__":``, or in a notebook. With ``mode="local"`` the run happens
    in this process; in the other modes each rank is a separate process that imports the task.

    Args:
        task: a class derived from Task, or an instance of one (each process creates its own from the same arguments,
            which are plain values; with ``mode="local"`` they may be any objects, which the stored config leaves out,
            so that a resume needs them again); None = the config names it.
        config: a mapping with the structure of the YAML file, the path of one, or a Config.
        overrides: ``section.key=value``, as after ``--set``.
        resume: the folder of a run to continue. ``config`` overrides its stored config, and ``overrides`` both.

    Returns:
        The folder of the run, and its summary.

    Raises:
        ParamserverError: what ended the run; Interrupted after a signal.

    Example::

        >>> import tempfile
        >>> import torch
        >>> from paramserver import Task
        >>> class Line(Task):
        ...     def build_model(self):
        ...         return torch.nn.Linear(1, 1)
        ...     def build_optimizer(self, model):
        ...         return torch.optim.SGD(model.parameters(), lr=0.1)
        ...     def train_source(self, partition):
        ...         x = torch.linspace(-1, 1, 32).unsqueeze(1)
        ...         return torch.utils.data.TensorDataset(x, 2 * x)
        ...     def training_step(self, model, batch, batch_idx):
        ...         return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     logging = {"run_dir": folder, "progress": "off", "tensorboard": False}
        ...     result = run(Line, {"mode": "local", "training": {"max_steps": 4, "batch_size": 8}, "logging": logging})
        >>> result.status, result.summary["samples"]
        ('completed', 32)
    """
    from paramserver.importing import class_reference, code_folders, script_folders
    from paramserver.task import Task, check_task_class

    if SUPERVISED in process_environ() or multiprocessing.current_process().name == LOADER_NAME:
        raise UnsupportedConfiguration(
            "paramserver.run was called while a process of a run imported this file to find its task or data set; "
            'put the call under if __name__ == "__main__":'
        )
    task_class = type(task) if isinstance(task, Task) else task
    given, config_file = _values(config)
    values = dict(given)
    recorded: list[Path] = [] if task_class is None else script_folders(task_class)
    opened = None if resume is None else open_run(Path(resume))
    if opened is not None:
        recover(opened)
        if config is None:
            find_config_file(opened)  # raises if the folder has none
        values = _merge(without_old_defaults(_stored(opened)), values)
        recorded += opened.task_folders()
    # Of a new run all is given, the task and its arguments too.
    given_now: Mapping[str, Any] | None = values if opened is None else given or None
    if task_class is not None:
        check_task_class(task_class, getattr(task_class, "__qualname__", repr(task_class)))
        values["task"] = f"{task_class.__module__}:{task_class.__name__}"
        single = mode_of(load_config(None, base=values, overrides=overrides, given=given_now)).single_process
        if not single:
            values["task"] = class_reference(task_class)
    create_task: Callable[..., Task] | None = task_class
    if isinstance(task, Task):
        arguments = task.keyword_arguments()
        objects = {name: value for name, value in arguments.items() if not is_plain(value)}
        if objects and not single:
            name, value = next(iter(objects.items()))
            raise UnsupportedConfiguration(
                f"task: {name} ({type(value).__name__}) of {type(task).__name__} must be a plain value (text, numbers, "
                "lists, mappings), as each process creates its own task; create the object in the task's methods, or "
                "run in mode local"
            )
        plain = {name: value for name, value in arguments.items() if name not in objects}
        values["task_args"] = {**values.get("task_args", {}), **plain}
        create_task = partial(type(task), **objects)
    effective = load_config(None, base=values, overrides=overrides, given=given_now)
    folders = code_folders(config_file, overrides, recorded)
    return launch_local(effective, opened, folders, command=[sys.executable, *sys.argv], create_task=create_task)


def _values(config: Mapping[str, Any] | str | os.PathLike[str] | Config | None) -> tuple[dict[str, Any], Path | None]:
    if config is None:
        return {}, None
    if isinstance(config, Config):
        return config.given_mapping(), None
    if isinstance(config, Mapping):
        return dict(config), None
    path = Path(config)
    return load_config(path).given_mapping(), path


def _stored(run: RunDir) -> dict[str, Any]:
    """Return the stored config of a run; nothing where it has lost it.

    Raises:
        UnsupportedConfiguration: it is damaged.
    """
    return dict(read_file(run.config_file).value) if run.config_file.is_file() else {}


def _merge(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored config, overridden by the given one section by section."""
    merged = dict(stored)
    for key, value in given.items():
        old = merged.get(key)
        merged[key] = {**old, **value} if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return merged

"""Runs from Python: ``paramserver.run``, for scripts and notebooks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from paramserver.cluster import is_supervised, process_environ
from paramserver.config import MODES, Config, load_config
from paramserver.errors import UnsupportedConfiguration
from paramserver.launch import Result, launch_local
from paramserver.runs.attempt import recover
from paramserver.runs.resume import find_config_file, open_run
from paramserver.runs.rundir import read_mapping

if TYPE_CHECKING:
    from paramserver.task import Task


def run(
    task: type[Task] | Task | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | Config | None = None,
    *,
    overrides: Sequence[str] = (),
    resume: str | os.PathLike[str] | None = None,
) -> Result:
    """Train ``task`` as ``config`` says, with all ranks on this machine.

    Args:
        task: a class derived from Task, or an instance of one (its arguments are taken over; each process makes its
            own); None where the config names it.
        config: a mapping like the YAML file, the path of one, or a Config.
        overrides: as after ``--set``.
        resume: the folder of a run to go on with; its stored config holds, then ``config``, then ``overrides``.

    Raises:
        ParamserverError: as the command line would end.
    """
    from paramserver.importing import class_reference
    from paramserver.task import Task, check_task_class

    if is_supervised(process_environ()):
        raise UnsupportedConfiguration(
            "paramserver.run was called while a rank of a run imported this file to find its task; "
            'put the call under if __name__ == "__main__":'
        )
    task_class = type(task) if isinstance(task, Task) else task
    values, folders = _values(config)
    if task_class is not None:
        check_task_class(task_class, getattr(task_class, "__qualname__", repr(task_class)))
        single = MODES[str(values.get("mode", "rpc"))].single_process if values.get("mode", "rpc") in MODES else False
        values["task"] = f"{task_class.__module__}:{task_class.__name__}" if single else class_reference(task_class)
    if isinstance(task, Task):
        values["task_args"] = {**values.get("task_args", {}), **task.keyword_arguments()}
    opened = None if resume is None else open_run(Path(resume))
    if opened is not None:
        recover(opened)
        if config is None:
            find_config_file(opened)  # refuses a folder that has none
        values = _over(read_mapping(opened.config_file, yaml.safe_load), values)
        folders = [*folders, *opened.task_folders()]
    effective = load_config(None, base=values, overrides=overrides)
    return launch_local(effective, opened, folders, command=sys.argv, task_class=task_class)


def _values(config: Mapping[str, Any] | str | os.PathLike[str] | Config | None) -> tuple[dict[str, Any], list[Path]]:
    if config is None:
        return {}, [Path.cwd()]
    if isinstance(config, Config):
        return config.to_mapping(), [Path.cwd()]
    if isinstance(config, Mapping):
        return dict(config), [Path.cwd()]
    path = Path(config)
    return load_config(path).to_mapping(), [Path.cwd(), path.resolve().parent]


def _over(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The stored config, with what is given now in place of it, section by section."""
    merged = dict(stored)
    for key, value in given.items():
        old = merged.get(key)
        merged[key] = {**old, **value} if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return merged

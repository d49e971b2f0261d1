"""Runs from Python: ``paramserver.run``, for scripts and notebooks."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.cluster import SUPERVISED, one_of_several, process_environ
from paramserver.config import Config, config_from_mapping, is_plain, load_config, mode_of, without_old_defaults
from paramserver.config.layers import SECTIONS, Settings, own_name
from paramserver.config.parsing import read_file
from paramserver.config.schema import format_value
from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.launch import launch_local
from paramserver.process_utils import LOADER_NAME
from paramserver.runs.attempt import recover
from paramserver.runs.resume import find_config_file, open_run
from paramserver.runs.rundir import RunDir

if TYPE_CHECKING:
    from torch import nn

    from paramserver.task import Task

# There only commands that continue or evaluate the run need it, and it has what the class uses of a notebook's data.
_MOST_PICKLED_IN_LOCAL = 64 * 2**20


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        run_dir: folder of the run.
        summary: content of its summary.json.

    Example::

        >>> result = Result(Path("runs/digits-1"), {"status": "completed", "validation": {"accuracy": 0.97}})
        >>> result.status, result.validation
        ('completed', {'accuracy': 0.97})
        >>> result
        Result('runs/digits-1', completed, accuracy 0.97)
        >>> Result(Path("runs/digits-2"), {"status": "completed", "validation": {"loss": None, "loss_text": "nan"}})
        Result('runs/digits-2', completed, loss nan)
    """

    run_dir: Path
    summary: dict[str, Any]
    _create_task: Callable[..., Task] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        found = self.summary.get("validation") or {}
        # A number that is not finite is None, and another field has its text.
        texts = {
            n.removesuffix("_text"): v if isinstance(v, str) else f"{v:.4g}" for n, v in found.items() if v is not None
        }
        means = ", ".join(f"{name} {text}" for name, text in texts.items())
        return f"Result({str(self.run_dir)!r}, {self.summary.get('status')}{f', {means}' if means else ''})"

    @property
    def status(self) -> str:
        """``completed``; a run that fails or is interrupted raises an error."""
        return str(self.summary["status"])

    @property
    def validation(self) -> dict[str, float]:
        """Means of the last validation, by name."""
        return dict(self.summary["validation"])

    @property
    def checkpoint(self) -> Path | None:
        """Folder of the newest checkpoint; None if none was written."""
        name = self.summary["checkpoint"]
        return None if name is None else RunDir(self.run_dir).checkpoints_dir / name

    def model(self, which: str | int = "latest") -> nn.Module:
        """Return the model of a checkpoint, in ``eval()``, on the first device of the run's config.

        With ``training.ema_decay`` it has the averages of the parameters, as in validations.

        Args:
            which: ``latest``, ``best``, or the number of a step.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged.
        """
        from paramserver.evaluate import restore

        return restore(self.run_dir, str(which), (), self._create_task).model.eval()

    def metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the curves of the run, a row for each record: its kind, step and time, and each value by name.

        The names are those of TensorBoard, such as ``train/loss`` and ``valid/accuracy``. The rows are always plain
        dictionaries, whatever is installed; ``pandas.DataFrame(result.metrics())`` makes a table of them.

        Args:
            kind: of the records, such as ``train`` or ``validation``; None = all that have values.
        """
        from paramserver.metrics import scalars
        from paramserver.metrics.sinks import read_records

        made = read_records(RunDir(self.run_dir).metrics_file)
        records = [record for record in made if kind in (None, record["kind"])]
        rows = [({name: record[name] for name in ("kind", "step", "time")}, scalars(record)) for record in records]
        return [{**row, **dict(values)} for row, values in rows if values]


def run(
    task: type[Task] | Task | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | Config | None = None,
    *,
    mode: str | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    resume: str | os.PathLike[str] | None = None,
    **sections: Any,
) -> Result:
    """Train a task with all ranks on this machine, and wait for the end of the run.

    Call it in a script under ``if __name__ == "__main__":``, or in a notebook. With ``mode="local"`` the run happens
    in this process; in the other modes each rank is a separate process that imports the task, or is sent it where it
    is a class of a notebook's cell (extra ``notebook``).

    Args:
        task: a class derived from Task, or an instance of one (each process creates its own from the same arguments,
            which are plain values; with ``mode="local"`` they may be any objects, which the stored config leaves out,
            so that a resume needs them again); None = the config names it.
        config: a mapping with the structure of the YAML file, the path of one, or a Config.
        mode: in place of the config's.
        overrides: ``{"section.key": value}``, or a list of ``section.key=value``, as after ``--set``.
        resume: the folder of a run to continue. ``config`` overrides its stored config.
        sections: sections of the config, such as ``training={"max_epochs": 3}``, and its other keys, such as
            ``seed=1``. They override ``config`` key by key, and ``overrides`` overrides all.

    Returns:
        The folder of the run, its summary, model, checkpoint and metrics.

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
        ...     result = run(Line, mode="local", training={"max_steps": 4, "batch_size": 8}, logging=logging)
        ...     weight = result.model().weight.item()
        >>> result.status, result.summary["samples"], 0 < weight < 2
        ('completed', 32, True)
    """
    from paramserver.importing import PICKLED_TASK, class_reference, code_folders, pickle_class
    from paramserver.task import Task, check_task_class

    _check_call(task, overrides)
    task_class = type(task) if isinstance(task, Task) else task
    # 1. The values of the config: those of this call override those of a run that continues.
    given, config_file = _values(config)
    given = _merge(given, {**sections, **({} if mode is None else {"mode": mode})})
    values, folders = dict(given), list[Path]()
    opened = None if resume is None else open_run(Path(resume))
    if opened is not None:
        values = _merge(_stored_values(opened, is_required=config is None), values)
        folders = opened.task_folders()
    names = list(overrides)
    if isinstance(overrides, Mapping):
        for name, value in overrides.items():
            _assign(given, name, value)
            _assign(values, name, value)
        overrides = ()
    # Of a new run all is given, the task and its arguments too.
    given_now: Mapping[str, Any] | None = values if opened is None else given or None
    # 2. How each process finds the task, and the arguments with which it creates it.
    create_task: Callable[..., Task] | None = task_class
    pickled: bytes | None = None
    if task_class is not None:
        check_task_class(task_class, getattr(task_class, "__qualname__", repr(task_class)))
        values["task"] = f"{task_class.__module__}:{task_class.__name__}"
        single = mode_of(load_config(None, base=values, overrides=overrides, given=given_now)).single_process
        try:
            reference, found_in = class_reference(task_class)
            most = _MOST_PICKLED_IN_LOCAL if single else math.inf
            pickled = pickle_class(task_class, most) if reference is None else None
            values["task"], folders = reference or f"{PICKLED_TASK}:{task_class.__name__}", [*found_in, *folders]
        except TaskError:
            if not single:
                raise  # in one process only commands that continue or evaluate the run need it
        if isinstance(task, Task):
            plain, objects = _split_arguments(task, single)
            values["task_args"] = {**values.get("task_args", {}), **plain}
            create_task = partial(task_class, **objects)
    # 3. The run.
    effective = load_config(None, base=values, overrides=overrides, given=given_now)
    if not mode_of(effective).single_process and (known_by := one_of_several(process_environ())):
        raise UnsupportedConfiguration(
            f"paramserver.run starts all ranks of a run itself, and this process is one of several ({known_by}); start "
            "the program with python, or the ranks with torchrun -m paramserver.launch --config FILE"
        )
    if isinstance(task, Task):
        asked = config_from_mapping({"task": values["task"], "task_args": dict(given.get("task_args") or {})}).task_args
        _check_arguments(task, [*asked.items(), *effective.task_args.items()])
    started, summary = launch_local(
        effective,
        opened,
        code_folders(config_file, names, folders),
        command=[sys.executable, *sys.argv],
        create_task=create_task,
        pickled_task=pickled,
    )
    return Result(started.path, summary, create_task)


def _check_call(task: object, overrides: object) -> None:
    """Refuse a call of ``run`` that can have no run.

    Raises:
        UnsupportedConfiguration: it is made while a task is imported, or an argument is of another type.
    """
    from paramserver.importing import references_in_import
    from paramserver.task import Task

    is_import = SUPERVISED in process_environ() or multiprocessing.current_process().name == LOADER_NAME
    if is_import or references_in_import:
        raise UnsupportedConfiguration(
            "paramserver.run was called while this file was imported to find its task or data set; "
            'put the call under if __name__ == "__main__":'
        )
    if not (task is None or isinstance(task, (type, Task))):
        raise UnsupportedConfiguration(
            f"task ({task!r}) must be a class derived from paramserver.Task, or an instance of one; a name of one is "
            'given as config={"task": ...}'
        )
    if isinstance(overrides, str):
        raise UnsupportedConfiguration(
            f"overrides ({overrides!r}) must be a list of section.key=value, or a dictionary; put it in a list"
        )


def _stored_values(opened: RunDir, is_required: bool) -> dict[str, Any]:
    """Return the values of the stored config of a run that continues, which may have none unless it ``is_required``."""
    recover(opened)
    if is_required:
        find_config_file(opened)  # raises if the folder has none
    return without_old_defaults(read_file(opened.config_file).value) if opened.config_file.is_file() else {}


def _split_arguments(task: Task, single_process: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of an instance of a task that a config can have, and the others.

    Raises:
        UnsupportedConfiguration: there are others, and the run has several processes.
    """
    arguments = task.keyword_arguments()
    plain = {name: value for name, value in arguments.items() if is_plain(value)}
    objects = {name: value for name, value in arguments.items() if name not in plain}
    if objects and not single_process:
        name, value = next(iter(objects.items()))
        raise UnsupportedConfiguration(
            f"task: {name} ({type(value).__name__}) of {type(task).__name__} must be a plain value (text, numbers, "
            "lists, mappings), as each process creates its own task; create the object in the task's methods, or "
            "run in mode local"
        )
    return plain, objects


def _check_arguments(task: Task, task_args: Iterable[tuple[str, Any]]) -> None:
    """Refuse values of ``task_args`` that an instance of a task was not created with.

    Raises:
        UnsupportedConfiguration: one differs.
    """
    arguments = task.keyword_arguments()
    plain = {name: value for name, value in arguments.items() if is_plain(value)}
    # As the config has them: a tuple is a list there.
    own = config_from_mapping({"task": "instance:Task", "task_args": plain}).task_args
    for name, value in task_args:
        if name in arguments and (name not in own or value != own[name]):
            raise UnsupportedConfiguration(
                f"task_args.{name} ({format_value(value, 60)}) must be what the instance of {type(task).__name__} was "
                "created with; give the class in place of an instance, or create it with that value"
            )


def _values(config: Mapping[str, Any] | str | os.PathLike[str] | Config | None) -> tuple[dict[str, Any], Path | None]:
    if config is None:
        return {}, None
    if isinstance(config, Config):
        return config.given_mapping(), None
    if isinstance(config, Mapping):
        return dict(config), None
    path = Path(config)
    document = read_file(path)
    # Keys and values only: what contradicts each other may be mended by other arguments of the call.
    Settings().assign((), document.value, lambda key: f"{path}:{document.lines.get(key, 1)}")
    return document.value, path


def _assign(values: dict[str, Any], name: str, value: Any) -> None:
    """Set a key by its dotted name. Mappings of the caller are copied, not changed."""
    *parents, key = name.split(".")
    for parent in parents:
        parent = own_name(values, parent)
        inner = values.get(parent)
        values[parent] = dict(inner) if isinstance(inner, Mapping) else {}
        values = values[parent]
    key, section = own_name(values, key), SECTIONS.get(name)
    # As --set has it: a section that may be null is one value.
    values.update({key: value} if section is None or section.nullable else _merge(values, {key: value}))


def _merge(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored config, overridden by the given one section by section."""
    merged = dict(stored)
    for key, value in given.items():
        old = merged.get(key)
        merged[key] = {**old, **value} if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return merged

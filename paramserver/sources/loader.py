"""Reads a data set in worker processes: those of torch's DataLoader, in a process of their own.

The rank has threads and sockets by the time it reads data, so it cannot fork workers. It starts the *loader*, a fresh
interpreter that inherits none of its descriptors, and sends it the data set. The loader forks the workers of an
ordinary DataLoader, which read whole groups in the order of the rank, and sends the rank what they read.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from paramserver.buffers.storage import stack_samples
from paramserver.errors import (
    SourceError,
    TaskError,
    TrainingError,
    UnsupportedConfiguration,
    kind_and_message,
    message_of,
)
from paramserver.process_utils import LOADER_NAME, STOP_SIGNALS, describe_exit, die_with_parent, flush_output
from paramserver.sources.reader import SampleReader

Request: TypeAlias = tuple[int, Sequence[int], int]
"""Arguments of ``SampleReader.read``."""

# A pipe takes so many at once, so that the loader ends before the rank reads them.
_ERROR_CHARACTERS = 10_000


@dataclass(frozen=True)
class WorkerOptions:
    """The workers of one trainer.

    Each calls ``init_fn`` with its number, as ``worker_init_fn`` of a DataLoader. ``trainer_index`` is for messages,
    and the seeds of workers.
    """

    count: int
    init_fn: Callable[[int], None] | None = None
    trainer_index: int = 0


class Workers:
    """The worker processes of one source, which read ``dataset``: at each call of ``results``, in new processes.

    They end when the thread that calls ``results`` does, or with that generator.

    Raises:
        TaskError: the data set, its sampler or ``worker_init_fn`` cannot be pickled.
    """

    def __init__(self, dataset: Any, options: WorkerOptions, seed: int, sampler: Any = None) -> None:
        self.options = options
        self._seed = seed
        self._dataset, self._sampler = dataset, sampler
        # Here, not when the feeder thread reads it: the user learns of an error before any process waits.
        self._pickled: bytes | None = self._pickle()
        self._loader: SpawnProcess | None = None

    def _pickle(self) -> bytes:
        try:
            return pickle.dumps((self._dataset, self.options.init_fn, self._sampler), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # pickle calls methods of the user's classes
            kind = type(self._dataset)
            raise TaskError(
                f"the training data set ({kind.__module__}.{kind.__qualname__}) and worker_init_fn must be picklable "
                f"to be sent to worker processes ({kind_and_message(error)}); define what they consist of at the top "
                "of a module and open files in __getitem__ or __iter__, or use training.loader_workers: 0, not "
                f"{self.options.count}"
            ) from error

    def results(self, requests: Any) -> Generator[Any, None, None]:
        """Yield what the workers read; the last entry of each result is the error of a read that failed, or None.

        ``requests`` is pickled: its ``items`` returns what the workers read, each item a pickled result, and the order
        of a map-style one.

        Raises:
            SourceError: the loader or a worker ended, or could not start.
        """
        pickled, self._pickled = self._pickled or self._pickle(), None
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        # Errors have a pipe of their own: a signal may interrupt the loader while it sends samples.
        errors, their_errors = context.Pipe(duplex=False)
        with connection, errors:
            with theirs, their_errors:
                loader = context.Process(target=_run, args=(theirs, their_errors), name=LOADER_NAME)
                loader.start()
            self._loader = loader
            try:
                connection.send_bytes(pickled)
                connection.send((self.options.count, self.options.trainer_index, self._seed, requests))
                del pickled
                while (result := pickle.loads(connection.recv_bytes())) is not None:
                    yield result
            except (EOFError, OSError):
                ended = SourceError(f"trainer {self.options.trainer_index}: {self._why_ended(loader, errors)}")
                ended.self_explanatory = True  # that the pipe was closed adds nothing
                raise ended from None
            finally:
                loader.kill()
                loader.join()
                self._loader = None

    def _why_ended(self, loader: SpawnProcess, errors: Connection) -> str:
        try:
            if errors.poll(0):
                return str(errors.recv())
        except (EOFError, OSError):
            pass
        loader.join()
        code = loader.exitcode or 0
        how = f"was {describe_exit(code)}" if code < 0 else describe_exit(code)
        return (
            f"the process that reads its data set (pid {loader.pid}) {how}; if the machine ran out of memory, "
            f"use fewer training.loader_workers ({self.options.count})"
        )

    def kill(self) -> None:
        """End the processes, if there are any; any thread may call this."""
        if (loader := self._loader) is not None:
            loader.kill()


# In the loader.


def _run(connection: Connection, errors: Connection) -> None:
    """Read what the rank asks for, until the end. Does not return."""
    rank = multiprocessing.parent_process()
    assert rank is not None
    assert rank.pid is not None
    try:
        die_with_parent(rank.pid, signal.SIGKILL)
        _ignore_signals()
        data = connection.recv_bytes()
        for payload in _payloads(data, *connection.recv()):
            connection.send_bytes(payload)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the rank needs no more
    except BaseException as error:  # noqa: BLE001 - raised in the rank
        errors.send(_explain(error)[-_ERROR_CHARACTERS:])
    finally:
        flush_output()
        # At once: the kernel ends the workers, whatever they are doing.
        os._exit(0)


def _ignore_signals() -> None:
    """Ignore those that ask a rank to stop. It still needs samples then, and ends the loader itself."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _payloads(data: bytes, workers: int, trainer_index: int, seed: int, requests: Any) -> Iterator[bytes]:
    try:
        dataset, init_fn, sampler = pickle.loads(data)
    except Exception as error:
        raise TrainingError(
            f"the training data set cannot be unpickled in another process ({kind_and_message(error)}); define "
            "its class at the top of a module that can be imported, or use training.loader_workers: 0"
        ) from error
    items, order = requests.items(dataset, sampler, seed)
    try:
        batches = iter(
            DataLoader(
                items,
                batch_size=None,  # an item is a group already
                sampler=order,
                num_workers=workers,
                collate_fn=bytes,
                worker_init_fn=partial(_init_worker, init_fn),
                multiprocessing_context="fork",
                # Of the seeds that ``get_worker_info`` shows.
                generator=torch.Generator().manual_seed((seed + trainer_index) % 2**63),
            )
        )
    except OSError as error:
        cure = (
            "give the container a larger /dev/shm (docker run --shm-size) and more processes, or use fewer workers"
            if error.errno in (errno.ENOSPC, errno.EAGAIN, errno.ENOMEM)
            else "make /dev/shm a tmpfs that this user can write to, or use 0 workers"
        )
        raise TrainingError(f"training.loader_workers ({workers}) could not be started ({error}); {cure}") from error
    yield from batches
    yield pickle.dumps(None)


def _explain(error: BaseException) -> str:
    if isinstance(error, (TrainingError, UnsupportedConfiguration)):
        return str(error)
    if isinstance(error, RuntimeError) and message_of(error).startswith("DataLoader worker"):
        # The cause names the signal that ended the worker.
        text = str(error.__cause__ if isinstance(error.__cause__, RuntimeError) else error).strip().rstrip(".")
        return f"{text}; if the machine ran out of memory, use fewer training.loader_workers"
    return f"{message_of(error)}\n{traceback.format_exc()}"


class IndexedReads(Dataset[bytes]):
    """What the workers read: one item is the pickled samples of a request, and the failure that ended it."""

    def __init__(self, dataset: Any, seed: int, wraps: bool) -> None:
        self.dataset = dataset
        self.reader = SampleReader(dataset, seed, wraps)

    def __getitem__(self, request: Request) -> bytes:
        samples, error = self.reader.read(*request)
        keys, failure = request[1][request[2] :], None
        if error is not None:
            failure = explain_read(error, self.reader.failed_at)
        return pickle_result((keys, samples, failure), (keys, []))


def explain_read(error: BaseException, failed_at: str) -> str:
    """Return the failure of a read in this worker, as the rank appends it to the position of the sample."""
    info = get_worker_info()
    where = f"{failed_at} in DataLoader worker process {info.id if info else 0}"
    return f", {where}: {kind_and_message(error)}\n{''.join(traceback.format_exception(error))}"


def pickle_result(result: tuple[Any, ...], without_samples: tuple[Any, ...]) -> bytes:
    """Return a result of ``Workers.results``, with samples in second place; if they cannot be sent, the reason."""
    try:
        return pickle.dumps((result[0], stack_samples(result[1]), *result[2:]), pickle.HIGHEST_PROTOCOL)
    except Exception as reason:  # noqa: BLE001 - pickle calls methods of the user's classes
        failure = (
            f": {kind_and_message(reason)}; samples must be picklable to be sent by a worker process; return "
            "tensors, arrays and numbers, or use training.loader_workers: 0"
        )
        return pickle.dumps((*without_samples, failure))


def _init_worker(init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    loader = multiprocessing.parent_process()
    assert loader is not None
    assert loader.pid is not None
    try:
        die_with_parent(loader.pid, signal.SIGKILL)
    except TrainingError:
        os._exit(1)
    _ignore_signals()
    info = get_worker_info()
    assert info is not None
    # What users find there is their data set. torch forbids to assign attributes, so that users do not lose theirs.
    object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
    if init_fn is not None:
        init_fn(worker_id)

"""Samples that other programs send during the run."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paramserver.buffers.positions import Key
from paramserver.config import SimulationsConfig
from paramserver.errors import CheckpointError, UnsupportedConfiguration
from paramserver.online.received_log import ReceivedLog
from paramserver.online.spec import COLUMNS, OPTIONAL, RESERVED, VERSION_COLUMN, ReceiverSpec
from paramserver.online.weights import SampleVersions
from paramserver.sources.base import KeyedSamples, ResumePosition, Source

if TYPE_CHECKING:
    from paramserver.online.receiver import SampleReceiver


class Stream(Source):
    """Samples from clients outside the run (``paramserver.client``), as the config's section ``simulations`` declares.

    A sample is a dictionary of ``simulation`` and ``step`` (numbers), ``parameters`` (an array of float64) and the
    fields (an array each); its key is (simulation, step). The order is that of arrival; the end is that of the last
    simulation. A task returns ``Stream()`` from ``train_source``; the run calls ``connect``.

    Example::

        >>> class Surrogate:  # a paramserver.Task
        ...     def train_source(self, partition):
        ...         return Stream()
        >>> source = Surrogate().train_source(None)
        >>> source.refetchable, source.total  # a sample is received once, and their number is not known
        (False, None)
    """

    starts_simulations = False
    repeatable = False
    acknowledges = True

    def __init__(self) -> None:
        self.received_log = ReceivedLog()
        self._lock = threading.Lock()
        self._spec: ReceiverSpec | None = None
        self._receiver: SampleReceiver | None = None
        self._closed = False
        self._inherited = 0
        self.versions: SampleVersions | None = None

    @classmethod
    def check(cls, config: SimulationsConfig | None) -> None:
        """Check the section ``simulations`` of the config for this kind of source.

        Raises:
            UnsupportedConfiguration: there is none, or it starts simulations for Stream or none for Simulations.
        """
        if config is None:
            raise UnsupportedConfiguration(
                f"train_source gives {cls.__name__}, so the config must have the section simulations, with the fields "
                "of a sample; add it, or give a data set or an iterable"
            )
        starts = config.command is not None or config.function is not None
        if starts and not cls.starts_simulations:
            raise UnsupportedConfiguration(
                "train_source gives Stream, whose samples come from outside, but simulations.command or function "
                "starts some; give paramserver.sources.Simulations, or leave it out"
            )
        if cls.starts_simulations and not starts:
            raise UnsupportedConfiguration(
                "train_source gives Simulations, so simulations.command or function must say how one is started; add "
                "it, or give paramserver.sources.Stream, whose samples come from outside"
            )

    def connect(self, receiver_spec: ReceiverSpec) -> None:
        self.check(receiver_spec.ingest.config)
        # A trainer that joins its run again starts anew, with the source that the task gave before.
        self.received_log = ReceivedLog()
        self._receiver, self._closed = None, False
        # Here, not when the feeder thread reads it: the import fails with the cure if pyzmq is missing.
        import paramserver.online.receiver  # noqa: F401

        self._spec, ingest = receiver_spec, receiver_spec.ingest
        has_versions = VERSION_COLUMN in ingest.columns
        self.versions = SampleVersions(receiver_spec.starts, ingest.max_staleness) if has_versions else None

    def samples(self, position: int) -> Iterator[tuple[Any, Any]]:
        for pair in (pair for group in self.groups(position) for pair in group):
            yield pair
            self.mark_stored(1)

    def groups(self, position: int) -> Iterator[Sequence[tuple[Any, Any]]]:
        if (receiver := self._start_receiver(position)) is None:
            return
        while (group := receiver.get()) is not None:
            keys = [accepted.key for accepted in group]
            self.received_log.extend(keys)
            yield KeyedSamples(keys, [accepted.sample for accepted in group])

    def mark_stored(self, count: int) -> None:
        # Only now are these samples acknowledged to their clients.
        assert self._receiver is not None
        self._receiver.mark_stored(count)

    def _start_receiver(self, position: int) -> SampleReceiver | None:
        """Start to receive; None if the source was stopped before."""
        from paramserver.online.receiver import SampleReceiver

        with self._lock:
            if self._spec is None:
                raise UnsupportedConfiguration(
                    f"{type(self).__name__} must be connected before it is read; call connect first"
                )
            if self._closed:
                return None
            self.received_log.truncate(position)
            self._inherited = self.received_log.num_inherited_for(self._spec.trainer_index, self._spec.num_trainers)
            self._receiver = SampleReceiver(self._spec, self.received_log, self.versions)
            self._receiver.start()
            return self._receiver

    def stop(self) -> None:
        with self._lock:
            self._closed = True
        if self._receiver is not None:
            self._receiver.stop()

    def close(self) -> None:
        # Without OVER to the clients, unless ``stop`` was called: another process or session may continue.
        with self._lock:
            self._closed = True
        if self._receiver is not None:
            self._receiver.close()

    @property
    def expected(self) -> int | None:
        if self._spec is None:
            return None
        index, trainers = self._spec.trainer_index, self._spec.num_trainers
        planned = self._spec.ingest.expected_for(index, trainers)
        if planned is None:
            return None
        return planned + self.received_log.num_unplanned(index, trainers)

    def figures(self) -> dict[str, Any]:
        """Return the counters of ``SampleReceiver``, plus this trainer's share of ``inherited`` samples.

        Inherited samples were received by the trainers of an earlier run, of another number: those that its buffer was
        given, and a share of those that are in no buffer. So the figures of all trainers add up to those of the run.
        """
        if self._receiver is None or self._spec is None:
            return {}
        counters, ingest = self._receiver.counters(), self._spec.ingest
        return {
            **counters,
            "received": counters["received"] + self._inherited,
            "bytes": counters["bytes"] + self._inherited * ingest.sample_bytes,
            "inherited": self._inherited + self.received_log.num_held,
            "expected": ingest.expected_for(self._spec.trainer_index, self._spec.num_trainers),
        }

    @property
    def needs_losses(self) -> bool:
        """Whether the simulations that follow are chosen by the loss of each sample."""
        return self._spec is not None and self._spec.learns

    def report_losses(self, simulations: Sequence[int], losses: Sequence[float]) -> None:
        """Report the loss of each sample of a batch, which came from these simulations, if they are needed."""
        if self._receiver is not None and self.needs_losses:
            self._receiver.stats.report_losses(simulations, losses)

    def statistics(self) -> dict[str, dict[str, float]]:
        return {} if self._receiver is None else self._receiver.field_statistics.read_and_reset()

    def report_starvation(self, text: str) -> None:
        """Inform the user that samples arrive and none can be used."""
        if self._receiver is not None:
            self._receiver.stats.report_starvation(text)

    # Checkpoints.

    def with_columns(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sample of a checkpoint with the columns of this run, which may have others than when it was made."""
        assert self._spec is not None
        columns = {column.name: np.array(COLUMNS[column], column.dtype) for column in self._spec.ingest.columns}
        others = {column.name for column in COLUMNS} - columns.keys() - {one.name for one in self._spec.ingest.fields}
        return {
            **{name: value for name, value in sample.items() if name not in others},
            **{name: sample.get(name, value) for name, value in columns.items()},
        }

    def check_fields(self, sample: Mapping[str, Any]) -> None:
        """Check that a sample of a checkpoint has the fields of this run.

        Raises:
            CheckpointError: it has others, or of another shape or dtype.
        """
        assert self._spec is not None
        declared = {one.name: (np.dtype(one.dtype), one.shape) for one in self._spec.ingest.fields}
        others = {*RESERVED, *OPTIONAL, *(column.name for column in COLUMNS)} - declared.keys()
        arrays = {name: np.asarray(value) for name, value in sample.items() if name not in others}
        held = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        if held != declared:
            raise CheckpointError(
                f"simulations.fields ({_describe_fields(declared)}) must be those of the samples that the checkpoint "
                f"holds ({_describe_fields(held)}); resume with them"
            )

    def state_dict(self) -> dict[str, Any]:
        # All of the log: the reader of the checkpoint knows the position of the buffer and truncates it. As tensors,
        # because a checkpoint cannot store arrays.
        state = self.received_log.state_dict()
        return {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in state.items()
        }

    def load_state_dict(self, state: Mapping[str, Any], mark: Any = None) -> None:
        self.received_log.load_state_dict(state)

    def keys_without(self, held: Set[Key]) -> Iterator[Key]:
        """The keys of the samples that were put into the buffer, without those in ``held``."""
        keys = ((simulation, step) for simulation, step in self.received_log.keys().tolist())
        return (key for key in keys if key not in held)

    def continue_after(self, applied: Iterable[Key]) -> int:
        """Continue in place of a trainer that was lost, of whose samples these were applied.

        They count as received. What else its buffer had is lost, until a client that still has it sends it again.
        """
        self.received_log.restart(applied)
        return len(self.received_log)

    def reshard(self, leftovers: Sequence[ResumePosition], held: Sequence[Any]) -> None:
        states, positions = [one.state for one in leftovers], [one.position for one in leftovers]
        self.received_log.reshard(states, positions, held, [key for one in leftovers for key in one.kept])


def _describe_fields(fields: Mapping[str, tuple[Any, Sequence[int]]]) -> str:
    return ", ".join(f"{name}: {dtype} {list(shape)}" for name, (dtype, shape) in fields.items())


class Simulations(Stream):
    """Samples of simulations that the run starts, as many and in the way that the section ``simulations`` declares.

    Example::

        >>> from paramserver.config import SimulationsConfig
        >>> Simulations.check(SimulationsConfig(command="./solve --x {x}", fields={"u": [64]}, count=100))
    """

    starts_simulations = True

"""Samples that other programs send while the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paramserver.config import SimulationsConfig
from paramserver.errors import UnsupportedConfiguration
from paramserver.online.received_log import ReceivedLog
from paramserver.online.spec import ReceiverSpec
from paramserver.sources.base import ResumePosition, Source

if TYPE_CHECKING:
    from paramserver.online.receiver import SampleReceiver


class Stream(Source):
    """What clients outside the run send (``paramserver.client``), as the config's section ``simulations`` describes it.

    A sample is a dictionary of ``simulation`` and ``step`` (numbers), ``parameters`` (an array of float64) and the
    fields, arrays each; its key is (simulation, step). Its order is that of arrival, and its end the last simulation's.
    A task returns ``Stream()`` from ``train_source``; the run tells it the rest.
    """

    started_here = False

    def __init__(self) -> None:
        self.received_log = ReceivedLog()
        self._lock = threading.Lock()
        self._post: ReceiverSpec | None = None
        self._reception: SampleReceiver | None = None
        self._closed = False
        self._inherited = 0

    @classmethod
    def check(cls, config: SimulationsConfig | None) -> None:
        """Refuse a section that does not suit this kind of source.

        Raises:
            UnsupportedConfiguration: there is none, or it starts simulations where it should not, or the reverse.
        """
        if config is None:
            raise UnsupportedConfiguration(
                f"train_source gives {cls.__name__}, so the config must have the section simulations, with the fields "
                "of a sample; add it, or give a data set or an iterable"
            )
        starts = config.command is not None or config.function is not None
        if starts and not cls.started_here:
            raise UnsupportedConfiguration(
                "train_source gives Stream, whose samples come from outside, but simulations.command or function "
                "starts some; give paramserver.sources.Simulations, or leave it out"
            )
        if cls.started_here and not starts:
            raise UnsupportedConfiguration(
                "train_source gives Simulations, so simulations.command or function must say how one is started; add "
                "it, or give paramserver.sources.Stream, whose samples come from outside"
            )

    def connect(self, post: ReceiverSpec) -> None:
        self.check(post.plan.config)
        # Here, and not when it is read: where pyzmq is missing, this says so.
        import paramserver.online.receiver  # noqa: F401

        self._post = post

    def samples(self, position: int) -> Iterator[tuple[Any, Any]]:
        return (pair for group in self.groups(position) for pair in group)

    def groups(self, position: int) -> Iterator[Sequence[tuple[Any, Any]]]:
        if (reception := self._receive(position)) is None:
            return
        while (group := reception.take()) is not None:
            self.received_log.extend(accepted.key for accepted in group)
            yield [(accepted.key, accepted.sample) for accepted in group]
            # Asked for more: the buffer has got these.
            reception.taken(len(group))

    def _receive(self, position: int) -> SampleReceiver | None:
        """Begin, once; None where it was closed already."""
        from paramserver.online.receiver import SampleReceiver

        with self._lock:
            if self._post is None:
                raise UnsupportedConfiguration(
                    f"{type(self).__name__} must be told where to receive before it is read; call connect first"
                )
            if self._closed:
                return None
            self.received_log.truncate(position)
            self._inherited = self.received_log.inherited_for(self._post.trainer_index, self._post.trainers)
            self._reception = SampleReceiver(self._post, self.received_log)
            self._reception.start()
            return self._reception

    def stop(self) -> None:
        with self._lock:
            self._closed = True
        if self._reception is not None:
            self._reception.leave()

    def close(self) -> None:
        self.stop()
        if self._reception is not None:
            self._reception.close()

    @property
    def expected(self) -> int | None:
        if self._post is None:
            return None
        index, trainers = self._post.trainer_index, self._post.trainers
        planned = self._post.plan.expected_for(index, trainers)
        if planned is None:
            return None
        return planned - self.received_log.inherited_for(index, trainers) + self.received_log.held

    def figures(self) -> dict[str, Any]:
        """As of ``Handshake``; with this trainer's share of what other trainers had got before, which is ``inherited``.

        So the figures of all trainers add up to those of the whole run.
        """
        if self._reception is None or self._post is None:
            return {}
        figures, plan = self._reception.figures(), self._post.plan
        return {
            **figures,
            "received": figures["received"] + self._inherited,
            "bytes": figures["bytes"] + self._inherited * plan.sample_bytes,
            "inherited": self._inherited,
            "expected": plan.expected_for(self._post.trainer_index, self._post.trainers),
        }

    def statistics(self) -> dict[str, dict[str, float]]:
        return {} if self._reception is None else self._reception.statistics()

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        # All of the log: how far the buffer had come is known to who reads it. As tensors, for what stores them refuses
        # an empty array.
        state = self.received_log.state()
        return {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in state.items()
        }

    def load_state_dict(self, state: Mapping[str, Any], mark: Any = None) -> None:
        self.received_log.restore(state)

    def reshard(self, leftovers: Sequence[ResumePosition], held: Sequence[Any]) -> None:
        states, positions = [one.state for one in leftovers], [one.position for one in leftovers]
        self.received_log.take_over(states, positions, held)


class Simulations(Stream):
    """The same, of simulations that the run starts itself, as many and as ``simulations`` says."""

    started_here = True

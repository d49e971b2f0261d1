"""What a trainer has received, counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paramserver.online.messages import Report
from paramserver.online.verdicts import REASONS, Accepted, Duplicate, Reason, Refused, Verdict, named

_log = logging.getLogger("paramserver")

# Kinds of refusals that are told to the log, each with its source; those beyond are only counted.
_MOST_TOLD = 1000


class Tally:
    """Counts of one thread; ``figures`` is for any thread, and may be one message behind.

    Args:
        counts: simulation -> samples that the buffer has got already.
        sample_bytes: of the fields of one sample.
        trainer_index: for the log.
    """

    def __init__(self, counts: Mapping[int, int], sample_bytes: int, trainer_index: int) -> None:
        self.counts = Counter(counts)
        self.received = sum(counts.values())
        self.duplicated = 0
        self.refused: Counter[Reason] = Counter(dict.fromkeys(REASONS, 0))
        self._sample_bytes = sample_bytes
        self._trainer_index = trainer_index
        self._told: set[tuple[Reason, str]] = set()
        self._changed: set[int] = set()
        self._heard: set[tuple[int, int]] = set()

    def note(self, verdict: Verdict, host: str) -> None:
        """Count one message; of a refused one the first of its kind and source, with its host, goes to the log."""
        if isinstance(verdict, Refused):
            self._note_refused(verdict, host)
        elif verdict.visitor is not None:
            header = verdict.visitor.header
            self._heard.add((header.simulation, header.member))
            self.duplicated += isinstance(verdict, Duplicate)

    def _note_refused(self, verdict: Refused, host: str) -> None:
        self.refused[verdict.reason] += 1
        source = _source(verdict, host)
        if (verdict.reason, source) in self._told or len(self._told) >= _MOST_TOLD:
            return
        self._told.add((verdict.reason, source))
        _log.warning(
            "trainer %d refused a message of %s: %s; more of this kind (%s) are counted and not told",
            self._trainer_index,
            source,
            verdict.sentence,
            verdict.reason,
        )

    def settle(self, accepted: Sequence[Accepted]) -> set[int]:
        """The buffer has got these samples; of which simulations they are."""
        simulations = [one.key[0] for one in accepted]
        self.counts.update(simulations)
        self.received += len(simulations)
        self._changed.update(simulations)
        return set(simulations)

    def figures(self) -> dict[str, Any]:
        """Samples that the buffer has got since the start of the run, and their bytes; messages since it was resumed.

        ``refusals`` is {reason: messages}, of the reasons that came up, and ``refused`` their sum.
        """
        refusals = {reason: n for reason, n in self.refused.copy().items() if n}
        return {
            "received": self.received,
            "bytes": self.received * self._sample_bytes,
            "duplicated": self.duplicated,
            "refused": sum(refusals.values()),
            "refusals": refusals,
        }

    def report(self, waiting: Sequence[int]) -> Report:
        """What is new for the desk since the last report, the figures, and what is ``waiting``."""
        received = {simulation: self.counts[simulation] for simulation in sorted(self._changed)}
        report = Report(received, sorted(self._heard), self.figures(), waiting)
        self._changed, self._heard = set(), set()
        return report


def _source(verdict: Refused, host: str) -> str:
    header = verdict.header if verdict.visitor is None else verdict.visitor.header
    return f"a client on {host}" if header is None else named(header)

"""Who may go on, and when a gradient is applied: pure rules, without a process or a clock. Names load on first use."""

from typing import TYPE_CHECKING

from paramserver.first_use import on_first_use

if TYPE_CHECKING:
    from paramserver.consistency.backup import BackupSync
    from paramserver.consistency.base import Consistency, Terms, Update
    from paramserver.consistency.factory import make_consistency
    from paramserver.consistency.stale import Async, Bounded
    from paramserver.consistency.staleness import Staleness, scale
    from paramserver.consistency.sync import Sync
    from paramserver.consistency.together import buffer_source, decide
    from paramserver.consistency.words import Announcement, Decision, Readiness, Stop, Verdict

_HOMES = {
    "Announcement": "words",
    "Async": "stale",
    "BackupSync": "backup",
    "Bounded": "stale",
    "Consistency": "base",
    "Decision": "words",
    "Readiness": "words",
    "Staleness": "staleness",
    "Stop": "words",
    "Sync": "sync",
    "Terms": "base",
    "Update": "base",
    "Verdict": "words",
    "buffer_source": "together",
    "decide": "together",
    "make_consistency": "factory",
    "scale": "staleness",
}

__all__ = [
    "Announcement",
    "Async",
    "BackupSync",
    "Bounded",
    "Consistency",
    "Decision",
    "Readiness",
    "Staleness",
    "Stop",
    "Sync",
    "Terms",
    "Update",
    "Verdict",
    "buffer_source",
    "decide",
    "make_consistency",
    "scale",
]

__getattr__ = on_first_use(__name__, _HOMES)

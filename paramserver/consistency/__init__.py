"""Who may go on, and when a gradient is applied: pure rules, without a process or a clock. Names load on first use."""

from typing import TYPE_CHECKING

from paramserver._lazy import attach

if TYPE_CHECKING:
    from paramserver.consistency.asynchronous import (
        Async as Async,
        Bounded as Bounded,
    )
    from paramserver.consistency.backup import (
        BackupSync as BackupSync,
    )
    from paramserver.consistency.base import (
        Announcement as Announcement,
        Consistency as Consistency,
        Decision as Decision,
        Readiness as Readiness,
        Stop as Stop,
        Terms as Terms,
        Update as Update,
        Verdict as Verdict,
    )
    from paramserver.consistency.factory import (
        make_consistency as make_consistency,
    )
    from paramserver.consistency.lockstep import (
        Sync as Sync,
        buffer_source as buffer_source,
        decide as decide,
    )
    from paramserver.consistency.staleness import (
        Staleness as Staleness,
        scale as scale,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)

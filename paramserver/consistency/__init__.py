"""Consistency models: which trainer continues and which gradients make an update. Pure rules, no process, no clock."""

from typing import TYPE_CHECKING

from paramserver._lazy import attach

if TYPE_CHECKING:
    from paramserver.consistency.base import (
        Announcement as Announcement,
        Consistency as Consistency,
        Decision as Decision,
        Readiness as Readiness,
        RunTerms as RunTerms,
        Stop as Stop,
        Update as Update,
        Verdict as Verdict,
    )
    from paramserver.consistency.dynamic_steps import DynamicSteps as DynamicSteps
    from paramserver.consistency.factory import make_consistency as make_consistency
    from paramserver.consistency.free_running import (
        Async as Async,
        Bounded as Bounded,
    )
    from paramserver.consistency.ledger import (
        Ledger as Ledger,
        PushId as PushId,
        PushState as PushState,
        TrainerId as TrainerId,
    )
    from paramserver.consistency.lockstep import (
        Sync as Sync,
        decide as decide,
        module_buffer_owner as module_buffer_owner,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)

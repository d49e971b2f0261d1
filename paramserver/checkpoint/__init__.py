"""Atomic checkpoints: format, staging, serialization, background writing, loading, retention."""

from typing import TYPE_CHECKING

from paramserver._lazy import attach

if TYPE_CHECKING:
    from paramserver.checkpoint.load import (
        Checkpoint as Checkpoint,
        find_checkpoint as find_checkpoint,
        load_chosen as load_chosen,
        read_checkpoint as read_checkpoint,
        skipped_checkpoints as skipped_checkpoints,
    )
    from paramserver.checkpoint.save import (
        BestMetric as BestMetric,
        ChunkedFile as ChunkedFile,
        remove_leftovers as remove_leftovers,
    )
    from paramserver.checkpoint.serialization import (
        check_storable as check_storable,
        pack as pack,
        unpack as unpack,
        without_values as without_values,
        write_chunks as write_chunks,
    )
    from paramserver.checkpoint.staging import StagingPool as StagingPool, stage_copy as stage_copy
    from paramserver.checkpoint.writer import (
        CheckpointWriter as CheckpointWriter,
        WrittenCheckpoint as WrittenCheckpoint,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)

"""Atomic checkpoints: what is in one, how it is written, found, checked and thrown away. Names load on first use."""

from typing import TYPE_CHECKING

from paramserver.first_use import on_first_use

if TYPE_CHECKING:
    from paramserver.checkpoint.archive import send_archive
    from paramserver.checkpoint.best import Best
    from paramserver.checkpoint.copies import private_copy
    from paramserver.checkpoint.manifest import FORMAT_VERSION, Manifest
    from paramserver.checkpoint.memory import CopyMemory
    from paramserver.checkpoint.pieces import Pieces
    from paramserver.checkpoint.read import (
        Checkpoint,
        choose_checkpoint,
        find_checkpoint,
        load_chosen,
        passed_over,
        read_checkpoint,
    )
    from paramserver.checkpoint.retention import clean, mark_best, retain
    from paramserver.checkpoint.storable import check_storable, pack, unpack
    from paramserver.checkpoint.store import write_checkpoint
    from paramserver.checkpoint.writer import CheckpointWriter, Written

_HOMES = {
    "check_storable": "storable",
    "pack": "storable",
    "unpack": "storable",
    "Best": "best",
    "private_copy": "copies",
    "FORMAT_VERSION": "manifest",
    "Manifest": "manifest",
    "CopyMemory": "memory",
    "Pieces": "pieces",
    "send_archive": "archive",
    "Checkpoint": "read",
    "choose_checkpoint": "read",
    "find_checkpoint": "read",
    "load_chosen": "read",
    "passed_over": "read",
    "read_checkpoint": "read",
    "clean": "retention",
    "mark_best": "retention",
    "retain": "retention",
    "write_checkpoint": "store",
    "CheckpointWriter": "writer",
    "Written": "writer",
}

__all__ = [
    "check_storable",
    "pack",
    "unpack",
    "Best",
    "Checkpoint",
    "CheckpointWriter",
    "CopyMemory",
    "FORMAT_VERSION",
    "Manifest",
    "Pieces",
    "Written",
    "choose_checkpoint",
    "clean",
    "find_checkpoint",
    "load_chosen",
    "mark_best",
    "passed_over",
    "private_copy",
    "read_checkpoint",
    "retain",
    "send_archive",
    "write_checkpoint",
]

__getattr__ = on_first_use(__name__, _HOMES)

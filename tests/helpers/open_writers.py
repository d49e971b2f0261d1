"""A writer of checkpoints that is closed at the end of a block."""

from contextlib import contextmanager

from paramserver.checkpoint import CheckpointWriter


@contextmanager
def open_writer(*arguments, **options):
    writer = CheckpointWriter(*arguments, **options)
    try:
        yield writer
    finally:
        writer.close(60)

"""Takes the wait for the disk out of tests: each ``os.fsync`` takes milliseconds, and a short run makes thirty of them.

Only a machine that loses its power shows what a file that was not flushed has lost: files that killed processes have
written are complete without. tests/unit/checkpoint traces what is flushed in which order, test_checkpoint_crash.py ends
a process of its own at each of these calls, and runs in fresh interpreters flush their files.
"""

import os


def no_fsync(descriptor):
    """In place of ``os.fsync``: raises OSError for what is no open file."""
    os.fstat(descriptor)


def install():
    """In this process, and in those that are forked from it."""
    os.fsync = no_fsync

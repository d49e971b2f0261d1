"""Fixtures of the tests of whole runs."""

from stored_run import original, run_dir

__all__ = ["original", "run_dir"]

"""Processes of a run: the supervisor and the ranks that it starts."""

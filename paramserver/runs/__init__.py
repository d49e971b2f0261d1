"""The folder of a run: attempts, resume and checkpoint management."""

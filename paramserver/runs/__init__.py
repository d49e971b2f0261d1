"""The folder of a run: attempts, resume, and rank 0's checkpoint manager."""

"""Faults of ``paramserver chaos``: their plan, what injects them into a run, and the end of it in each rank."""

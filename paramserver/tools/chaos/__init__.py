"""``paramserver chaos``: the plan of faults, what injects them into a run, and the end of it in each rank."""

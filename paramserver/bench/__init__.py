"""The running half of the benchmark: cases, how each is measured, and what theory says of it."""

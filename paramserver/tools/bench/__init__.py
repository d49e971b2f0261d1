"""Benchmark: cases of a command line, one measured run of each, link probe and predicted communication cost."""

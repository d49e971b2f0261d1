"""Optimizer steps on the server and its shards, and the DistributedOptimizer of the trainers."""

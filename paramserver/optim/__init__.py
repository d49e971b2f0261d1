"""Optimizer steps: on the server, on one shard, and the DistributedOptimizer that trainers step."""

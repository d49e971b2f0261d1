"""Transports of tensors between servers and trainers: RPC messages or shared memory."""

"""Transports of tensors between servers and trainers: messages or shared memory."""

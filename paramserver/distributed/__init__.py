"""Connections between the processes of a run: rendezvous, RPC agents and calls, membership, control channel."""

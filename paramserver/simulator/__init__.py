"""A run on a virtual clock: the engine of the tests of the protocol, and of the prediction of throughput at scale."""

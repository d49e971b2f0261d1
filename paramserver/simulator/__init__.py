"""A run on a virtual clock: the engine of the tests of the protocol, and the prediction of throughput at scale."""

"""Online training: samples of running simulations over ZeroMQ, and the coordinator that tracks simulations."""

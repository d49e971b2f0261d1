"""Parameters as views of flat tensors, their sharding, and the model that they belong to."""

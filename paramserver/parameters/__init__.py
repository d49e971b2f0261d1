"""Parameters as views of flat tensors, their shards, and the model that they belong to."""

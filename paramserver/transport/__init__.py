"""How tensors travel between trainers and servers."""

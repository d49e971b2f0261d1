"""How samples of running simulations reach the trainers: the words, the trainer's ear, the desk of rank 0."""

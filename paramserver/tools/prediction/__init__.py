"""Prediction of larger runs, ``paramserver benchmark predict``: a network model fitted to benchmarks of small ones."""

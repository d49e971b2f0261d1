"""Benchmark, report, prediction, doctor and chaos: no part of training. The core imports nothing from here."""

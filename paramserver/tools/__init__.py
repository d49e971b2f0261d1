"""What is run in addition to training: benchmark, report, prediction, doctor and chaos. The core imports nothing from here."""

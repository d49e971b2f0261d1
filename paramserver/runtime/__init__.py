"""The processes of a run: supervisor, rank, dry run and the start of online training."""

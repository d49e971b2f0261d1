"""``python -m paramserver.benchmark``: the command ``paramserver benchmark``."""

from paramserver.process_utils import exit_process
from paramserver.tools.bench.command import main as main

if __name__ == "__main__":
    exit_process(main())

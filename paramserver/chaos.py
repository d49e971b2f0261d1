"""``python -m paramserver.chaos``: the command ``paramserver chaos``."""

from paramserver.process_utils import exit_process
from paramserver.tools.chaos.command import main as main

if __name__ == "__main__":
    exit_process(main())

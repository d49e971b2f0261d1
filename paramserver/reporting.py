"""``python -m paramserver.reporting``: the command ``paramserver report``."""

from paramserver.process_utils import exit_process
from paramserver.tools.report.command import main as main

if __name__ == "__main__":
    exit_process(main())

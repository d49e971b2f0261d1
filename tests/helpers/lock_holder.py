"""A subprocess that holds a context manager, such as the lock of a run's folder, until a test ends it."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def hold_in_subprocess(imports, context, folder):
    """Start a process inside ``context``, an expression over ``folder`` (a Path), until its standard input closes."""
    program = (
        f"import sys; from pathlib import Path; {imports}; folder = Path(sys.argv[1])\n"
        f"with {context}:\n    print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert holder.stdout.readline() == "held\n"
    return holder

"""Runs one simulation: ``python -m paramserver.run_simulation module:function [--folder F ...]``.

The function is called with the vector of its parameters and an open client, which is closed when it returns. The run
starts this program for ``simulations.function``. It exits with code 0 also if the run needs no more samples. What the
client refuses ends it with one sentence, another exception of the function with a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from paramserver.client import Client
from paramserver.errors import ClientError, RunOver, UnsupportedConfiguration
from paramserver.importing import describe_user_error, load_object


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="paramserver.run_simulation")
    parser.add_argument("function")
    parser.add_argument("--folder", action="append", default=[], type=Path)
    options = parser.parse_args(arguments)
    try:
        function = load_object(options.function, "simulations.function", options.folder)
        with Client().open() as client:
            function(client.parameters, client)
    except RunOver as over:
        print(f"ended early: {over}", flush=True)
    except ClientError as error:
        print(f"error: {describe_user_error(error)}", file=sys.stderr)
        return error.exit_code
    except UnsupportedConfiguration as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

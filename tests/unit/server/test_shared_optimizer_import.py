"""What the import of ``SharedOptimizer`` costs, and what it leaves."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys

from paramserver.server.shared_optimizer import SharedOptimizer

optim = "torch.distributed.optim"
heavy = ("sympy", "torch.distributed.fsdp", optim, f"{optim}.utils", f"{optim}.functional_sgd")
loaded = [name for name in heavy if name in sys.modules]
assert not loaded, loaded

from torch.distributed.optim import DistributedOptimizer, ZeroRedundancyOptimizer
import torch.distributed.optim.optimizer as module

assert issubclass(SharedOptimizer, DistributedOptimizer)
assert module.DistributedOptimizer is DistributedOptimizer

import torch
from torch.distributed.optim.utils import functional_optim_map

assert dict(module.functional_optim_map) == functional_optim_map
assert torch.optim.SGD in module.functional_optim_map
"""


BEFORE = "import torch.distributed.optim as package\n"
AFTER = "assert sys.modules['torch.distributed.optim'] is package\n"
IS_THERE = BEFORE + PROGRAM.replace("loaded = ", "assert 'sympy' in sys.modules\nloaded = [] and ") + AFTER

FORKS = """
import os
import sys

import torch  # which each of the programs begins with

for program in sys.argv[1:]:
    if (child := os.fork()) == 0:
        exec(program, {})
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def ended():
    """The exit codes of both programs, and what they wrote."""
    words = [sys.executable, "-c", FORKS, PROGRAM, IS_THERE]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.splitlines()], done.stderr


def test_the_package_around_the_class_and_its_table_are_not_imported_until_they_are_used(ended):
    codes, errors = ended
    assert codes[0] == 0, errors


def test_a_package_that_is_there_already_is_used(ended):
    codes, errors = ended
    assert codes[1] == 0, errors

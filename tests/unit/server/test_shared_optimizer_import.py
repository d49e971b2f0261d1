"""What the import of ``SharedOptimizer`` costs, and what it leaves."""

import subprocess
import sys

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


def test_the_package_around_the_class_and_its_table_are_not_imported_until_they_are_used():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_a_package_that_is_there_already_is_used():
    before = "import torch.distributed.optim as package\n"
    after = "assert sys.modules['torch.distributed.optim'] is package\n"
    program = before + PROGRAM.replace("loaded = ", "assert 'sympy' in sys.modules\nloaded = [] and ") + after
    subprocess.run([sys.executable, "-c", program], check=True)

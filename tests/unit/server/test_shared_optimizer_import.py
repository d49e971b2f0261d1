"""What the import of ``SharedOptimizer`` costs, and what it leaves."""

import subprocess
import sys

PROGRAM = """
import sys

from paramserver.server.shared_optimizer import SharedOptimizer

loaded = [name for name in ("sympy", "torch.distributed.fsdp", "torch.distributed.optim") if name in sys.modules]
assert not loaded, loaded

from torch.distributed.optim import DistributedOptimizer, ZeroRedundancyOptimizer
import torch.distributed.optim.optimizer as module

assert issubclass(SharedOptimizer, DistributedOptimizer)
assert module.DistributedOptimizer is DistributedOptimizer
"""


def test_the_package_around_the_class_is_not_imported_until_somebody_needs_it():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_a_package_that_is_there_already_is_used():
    before = "import torch.distributed.optim as package\n"
    after = "assert sys.modules['torch.distributed.optim'] is package\n"
    program = before + PROGRAM.replace("loaded = ", "assert 'sympy' in sys.modules\nloaded = [] and ") + after
    subprocess.run([sys.executable, "-c", program], check=True)

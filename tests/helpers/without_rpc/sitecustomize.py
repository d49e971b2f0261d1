"""With this folder first in PYTHONPATH, torch has neither RPC nor distributed autograd, in every process of a run."""

import sys

NAMES = ("torch.distributed.rpc", "torch.distributed.autograd")


class WithoutRpc:
    """Finds no module. Before torch imports its RPC, it removes what that is built on; afterwards nothing imports it.

    torch itself asks ``torch.distributed.rpc.is_available()``, so that the module is there until torch is imported.
    """

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == NAMES[0]:
            from torch import _C

            for start in ("_rpc_init", "_dist_autograd_init"):
                delattr(_C, start)
        elif name.startswith("paramserver.") and sys.modules.get(NAMES[0]) is not None:
            sys.modules.update(dict.fromkeys(NAMES))


sys.meta_path.insert(0, WithoutRpc)

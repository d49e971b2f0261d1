"""The rank from environment variables: those of torchrun, or the same ones set by hand (``init_method="env://"``).

Names: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables.
"""

import json
import time
from pathlib import Path

from paramserver.cluster.base import (
    Environ,
    RankFlags,
    VariableEnvironment,
    infer_placement,
    read_number,
    read_variable,
)
from paramserver.cluster.network import DEFAULT_PORT
from paramserver.config import Config

VARIABLES = {
    "global_rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "run_id": "TORCHELASTIC_RUN_ID",
    # Optional.
    "restart_count": "TORCHELASTIC_RESTART_COUNT",
    "store_is_hosted": "TORCHELASTIC_USE_AGENT_STORE",
    "error_file": "TORCHELASTIC_ERROR_FILE",
    "max_restarts": "TORCHELASTIC_MAX_RESTARTS",
}

# What torchrun sets where the user gave no --rdzv-id.
_NO_RUN_ID = "none"


class _TorchVariables(VariableEnvironment):
    """The variables that torchrun and ``init_method="env://"`` have in common."""

    set_by = "torchrun"
    variables = VARIABLES

    @property
    def local_world_size(self) -> int:
        return self._number("local_world_size", minimum=1)

    @property
    def master_port(self) -> int:
        return self._number("master_port", minimum=1, below=65536)


class TorchrunEnvironment(_TorchVariables):
    """A worker of torchrun, whose agent may serve the store already."""

    source = "torchrun"
    known_by = "TORCHELASTIC_RUN_ID is set"
    ends_all_ranks = True

    @classmethod
    def detect(cls, environ: Environ, flags: RankFlags) -> bool:
        return VARIABLES["run_id"] in environ

    @classmethod
    def job_id(cls, environ: Environ) -> str | None:
        run_id = environ.get(VARIABLES["run_id"], _NO_RUN_ID)
        return None if run_id == _NO_RUN_ID else f"torchrun/{run_id}"

    @property
    def master_addr(self) -> str:
        return read_variable(self.environ, self.variables["master_addr"], "torchrun")

    @property
    def store_is_hosted(self) -> bool:
        return self.environ.get(self.variables["store_is_hosted"]) == str(True)  # torchrun writes str(bool)

    @property
    def job(self) -> str:
        return read_variable(self.environ, self.variables["run_id"], "torchrun")

    @property
    def launch(self) -> str:
        return self.job if self.store_is_hosted else ""

    @property
    def restarts_all(self) -> bool:
        name = self.variables["max_restarts"]
        return read_number({name: "0", **self.environ}, name, "torchrun") > 0


class EnvVarEnvironment(_TorchVariables):
    """RANK and WORLD_SIZE set by hand or by a job script. Variables that are not set come from the config."""

    source = "environment"
    known_by = "RANK and WORLD_SIZE are set"

    def __init__(self, environ: Environ, config: Config, flags: RankFlags) -> None:
        super().__init__(environ, config, flags)
        place = infer_placement(self.global_rank, self.world_size, self.master_addr)
        defaults = dict(zip(("local_rank", "local_world_size", "node_rank"), place, strict=True))
        # A further rank of a host contradicts the assumption of one for each, and how many there are is not known.
        if place[1] == 1 and environ.get(VARIABLES["local_rank"], "0").strip() != "0":
            del defaults["local_world_size"]
        defaults["master_port"] = config.cluster.master_port or DEFAULT_PORT
        self.environ = {**{VARIABLES[key]: str(value) for key, value in defaults.items()}, **environ}

    @classmethod
    def detect(cls, environ: Environ, flags: RankFlags) -> bool:
        return VARIABLES["global_rank"] in environ and VARIABLES["world_size"] in environ

    @classmethod
    def num_restarts(cls, environ: Environ) -> int:
        return 0  # those of torchrun are counted by its own class

    @property
    def master_addr(self) -> str:
        return self.environ.get(self.variables["master_addr"]) or self.config.cluster.master_addr


def write_error_file(environ: Environ, message: str) -> None:
    """Report an error to the agent of torchrun, which shows the first one of all ranks; nothing if there is none.

    The format is that of torch.distributed.elastic.multiprocessing.errors.ErrorHandler, which needs torch. torchrun
    shows ``py_callstack``.

    Raises:
        OSError: the file cannot be written.
    """
    if file := environ.get(VARIABLES["error_file"]):
        about = {"py_callstack": message, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": about}}))

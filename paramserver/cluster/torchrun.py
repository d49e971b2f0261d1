"""The rank from variables: those of torchrun, or the same ones set by hand (``init_method="env://"``).

The names are those of https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables.
"""

from paramserver.cluster.base import Environ, ProcessIdentity, assumed_place, read_number, read_text
from paramserver.cluster.network import DEFAULT_PORT
from paramserver.config import Config

GLOBAL_RANK = "RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_RANK = "LOCAL_RANK"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
NODE_RANK = "GROUP_RANK"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
RUN_ID = "TORCHELASTIC_RUN_ID"
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"

VARIABLES = (
    GLOBAL_RANK,
    WORLD_SIZE,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    NODE_RANK,
    MASTER_ADDR,
    MASTER_PORT,
    RUN_ID,
    RESTART_COUNT,
    USE_AGENT_STORE,
)


class TorchrunEnvironment:
    """A worker of torchrun. All variables but the last two are required; its agent may already serve the store."""

    _NAME = "torchrun"

    def detect(self, environ: Environ) -> bool:
        return RUN_ID in environ

    def identity(self, environ: Environ, config: Config) -> ProcessIdentity:
        world_size = read_number(environ, WORLD_SIZE, self._NAME, minimum=1)
        local_world_size = read_number(environ, LOCAL_WORLD_SIZE, self._NAME, minimum=1)
        restarts = read_number({RESTART_COUNT: "0", **environ}, RESTART_COUNT, self._NAME)
        return ProcessIdentity(
            global_rank=read_number(environ, GLOBAL_RANK, self._NAME, below=world_size),
            world_size=world_size,
            local_rank=read_number(environ, LOCAL_RANK, self._NAME, below=local_world_size),
            local_world_size=local_world_size,
            node_rank=read_number(environ, NODE_RANK, self._NAME),
            master_addr=read_text(environ, MASTER_ADDR, self._NAME),
            master_port=read_number(environ, MASTER_PORT, self._NAME, minimum=1, below=65536),
            # torch writes str(bool).
            store_is_hosted=environ.get(USE_AGENT_STORE) == str(True),
            job=f"{read_text(environ, RUN_ID, self._NAME)}-{restarts}",
            source="torchrun",
        )


class EnvVarEnvironment:
    """RANK and WORLD_SIZE set by hand or by a job script; what else is not set comes from the config."""

    _NAME = "torchrun"

    def detect(self, environ: Environ) -> bool:
        return GLOBAL_RANK in environ and WORLD_SIZE in environ

    def identity(self, environ: Environ, config: Config) -> ProcessIdentity:
        world_size = read_number(environ, WORLD_SIZE, self._NAME, minimum=1)
        global_rank = read_number(environ, GLOBAL_RANK, self._NAME, below=world_size)
        master_addr = environ.get(MASTER_ADDR) or config.cluster.master_addr
        place = assumed_place(global_rank, world_size, master_addr)
        defaults = dict(zip((LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK), map(str, place), strict=True))
        port = str(config.cluster.master_port or DEFAULT_PORT)
        complete = {**defaults, MASTER_PORT: port, **environ}
        local_world_size = read_number(complete, LOCAL_WORLD_SIZE, self._NAME, minimum=1)
        return ProcessIdentity(
            global_rank=global_rank,
            world_size=world_size,
            local_rank=read_number(complete, LOCAL_RANK, self._NAME, below=local_world_size),
            local_world_size=local_world_size,
            node_rank=read_number(complete, NODE_RANK, self._NAME),
            master_addr=master_addr,
            master_port=read_number(complete, MASTER_PORT, self._NAME, minimum=1, below=65536),
            store_is_hosted=False,
            job="environment",
            source="environment",
        )

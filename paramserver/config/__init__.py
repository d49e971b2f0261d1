"""The config of a run: keys, reading, checks, and what a mode is. Pure; nothing here imports torch."""

from typing import TYPE_CHECKING

from paramserver.first_use import on_first_use

if TYPE_CHECKING:
    from paramserver.config.checks import NOT_IN_THIS_VERSION, value_of
    from paramserver.config.loading import config_from_mapping, load_config
    from paramserver.config.modes import MODES, Mode
    from paramserver.config.printing import describe_keys, differences, dump_yaml
    from paramserver.config.schema import (
        BestConfig,
        BufferConfig,
        CheckpointConfig,
        ClusterConfig,
        Config,
        DdpConfig,
        DeviceConfig,
        LoggingConfig,
        ServerConfig,
        SimulationsConfig,
        TrainingConfig,
    )
    from paramserver.config.table import KEYS, SECTIONS, Key, Section
    from paramserver.config.world import (
        Role,
        mode_of,
        num_servers_of,
        num_trainers_of,
        roles,
        server_computes,
        trainer_of,
        with_world_size,
        world_size_of,
    )

__all__ = [
    "BestConfig",
    "BufferConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DdpConfig",
    "DeviceConfig",
    "KEYS",
    "Key",
    "LoggingConfig",
    "MODES",
    "Mode",
    "NOT_IN_THIS_VERSION",
    "Role",
    "SECTIONS",
    "Section",
    "ServerConfig",
    "SimulationsConfig",
    "TrainingConfig",
    "config_from_mapping",
    "describe_keys",
    "differences",
    "dump_yaml",
    "load_config",
    "mode_of",
    "num_servers_of",
    "num_trainers_of",
    "roles",
    "server_computes",
    "trainer_of",
    "value_of",
    "with_world_size",
    "world_size_of",
]

_HOMES = {
    "checks": ("NOT_IN_THIS_VERSION", "value_of"),
    "loading": ("config_from_mapping", "load_config"),
    "modes": ("MODES", "Mode"),
    "printing": ("describe_keys", "differences", "dump_yaml"),
    "table": ("KEYS", "SECTIONS", "Key", "Section"),
    "world": (
        "Role",
        "mode_of",
        "num_servers_of",
        "num_trainers_of",
        "roles",
        "server_computes",
        "trainer_of",
        "with_world_size",
        "world_size_of",
    ),
}

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__getattr__ = on_first_use(__name__, {name: _HOME_OF.get(name, "schema") for name in __all__})

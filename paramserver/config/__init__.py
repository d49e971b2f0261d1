"""Configuration of a run: schema, parsing, layers, checks and modes. Imports no torch."""

from typing import TYPE_CHECKING

from paramserver._lazy import attach

if TYPE_CHECKING:
    from paramserver.config.deadlines import Deadlines as Deadlines
    from paramserver.config.io import (
        config_from_mapping as config_from_mapping,
        differences as differences,
        dump_yaml as dump_yaml,
        load_config as load_config,
        without_old_defaults as without_old_defaults,
    )
    from paramserver.config.layers import KEYS as KEYS, SECTIONS as SECTIONS
    from paramserver.config.modes import MODES as MODES, Mode as Mode
    from paramserver.config.parsing import is_plain as is_plain, read_dumped as read_dumped
    from paramserver.config.schema import (
        CheckpointConfig as CheckpointConfig,
        ClusterConfig as ClusterConfig,
        Config as Config,
        DeviceConfig as DeviceConfig,
        LoggingConfig as LoggingConfig,
        OuterConfig as OuterConfig,
        ProfileConfig as ProfileConfig,
        PublishConfig as PublishConfig,
        ServerConfig as ServerConfig,
        SimulationsConfig as SimulationsConfig,
        TrainingConfig as TrainingConfig,
    )
    from paramserver.config.world import (
        Role as Role,
        check_servers as check_servers,
        is_colocated as is_colocated,
        mode_of as mode_of,
        num_commands_of as num_commands_of,
        num_ranks_started as num_ranks_started,
        num_servers_of as num_servers_of,
        num_trainers_of as num_trainers_of,
        roles as roles,
        server_computes as server_computes,
        trainer_of as trainer_of,
        with_trainers as with_trainers,
        with_world_size as with_world_size,
        world_size_of as world_size_of,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)

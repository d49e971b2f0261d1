"""Identity of this process (rank, world size, address) and the environment of child processes. Imports no torch."""

from typing import TYPE_CHECKING

from paramserver._lazy import attach

if TYPE_CHECKING:
    from paramserver.cluster.base import (
        ProcessIdentity as ProcessIdentity,
        RankFlags as RankFlags,
        process_environ as process_environ,
    )
    from paramserver.cluster.network import (
        LOOPBACK as LOOPBACK,
        RANK_PLUGIN as RANK_PLUGIN,
        SUPERVISED as SUPERVISED,
        bind_interface as bind_interface,
        bind_listener as bind_listener,
        child_environment as child_environment,
        choose_interface as choose_interface,
        chosen_interface as chosen_interface,
        host_and_port as host_and_port,
        is_loopback as is_loopback,
        own_address as own_address,
        quiet_torch_log as quiet_torch_log,
    )
    from paramserver.cluster.resolve import (
        Job as Job,
        allocated_gpus as allocated_gpus,
        find_job as find_job,
        one_of_several as one_of_several,
        resolve_identity as resolve_identity,
        unused_tasks as unused_tasks,
    )
    from paramserver.cluster.torchrun import write_error_file as write_error_file
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)

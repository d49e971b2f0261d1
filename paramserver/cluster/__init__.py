"""Which process am I, and what the processes that this one starts must know. Pure; nothing here imports torch."""

from typing import TYPE_CHECKING

from paramserver.first_use import on_first_use

if TYPE_CHECKING:
    from paramserver.cluster.base import Environment, Identity, process_environ
    from paramserver.cluster.flags import FlagEnvironment, RankFlags
    from paramserver.cluster.listener import bind_listener
    from paramserver.cluster.network import (
        DEFAULT_PORT,
        bind_interface,
        child_environment,
        cores_here,
        interface_towards,
        is_loopback,
        is_supervised,
        loopback_interface,
        mark_supervised,
        own_address,
        quiet_agent,
    )
    from paramserver.cluster.resolve import resolve_identity
    from paramserver.cluster.torchrun import HandSet, Torchrun

__all__ = [
    "DEFAULT_PORT",
    "Environment",
    "FlagEnvironment",
    "HandSet",
    "Identity",
    "RankFlags",
    "Torchrun",
    "bind_interface",
    "bind_listener",
    "child_environment",
    "cores_here",
    "interface_towards",
    "is_loopback",
    "is_supervised",
    "loopback_interface",
    "mark_supervised",
    "own_address",
    "process_environ",
    "quiet_agent",
    "resolve_identity",
]

_HOMES = {
    "base": ("Environment", "Identity", "process_environ"),
    "flags": ("FlagEnvironment", "RankFlags"),
    "listener": ("bind_listener",),
    "network": (
        "DEFAULT_PORT",
        "bind_interface",
        "child_environment",
        "cores_here",
        "interface_towards",
        "is_loopback",
        "is_supervised",
        "loopback_interface",
        "mark_supervised",
        "own_address",
        "quiet_agent",
    ),
    "resolve": ("resolve_identity",),
    "torchrun": ("HandSet", "Torchrun"),
}

__getattr__ = on_first_use(__name__, {name: module for module, names in _HOMES.items() for name in names})

"""Addresses, interfaces, and the variables that a started process needs.

The socket on which rank 0's store will answer.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from paramserver.errors import UnsupportedConfiguration

DEFAULT_PORT = 29500
"""Where ranks that were started apart meet unless they are told; the port of torch's own launchers."""

_SUPERVISED = "PARAMSERVER_SUPERVISED"
_CHOSEN = "PARAMSERVER_CHOSEN"  # names of variables that the launch set for the ranks, and not the user
_INTERFACE_VARIABLES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

# torch's RPC agent warns of every connection that a peer closes, which is how each run ends; a peer that is lost is
# reported by this package itself. torch's C++ log has one threshold and no filter per message.
_LOG_LEVEL = {"TORCH_CPP_LOG_LEVEL": "ERROR"}

# One arena that keeps what it got: tensors of several MB per step are then reused instead of mapped anew each time.
_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. No name is looked up; localhost counts by its name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() in ("localhost", "localhost.localdomain", "ip6-localhost")


def loopback_interface() -> str:
    return "lo"


def bind_interface(environ: MutableMapping[str, str], name: str) -> None:
    """Make TensorPipe and gloo listen on this interface only, if called before either starts. Writes ``environ``.

    Raises:
        UnsupportedConfiguration: this machine has no such interface.
    """
    known = [interface for _, interface in socket.if_nameindex()]
    if name not in known:
        raise UnsupportedConfiguration(
            f"cluster.interface ({name}) must be a network interface of this machine ({', '.join(known)}); choose one, "
            "or leave it out"
        )
    for variable in _INTERFACE_VARIABLES:
        environ[variable] = name


def cores_here() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def child_environment(
    environ: Mapping[str, str],
    *,
    sharers: int,
    config_folder: Path | None = None,
    current_folder: Path | None = None,
    cores: int | None = None,
) -> dict[str, str]:
    """Copy ``environ`` for a rank that this process starts. What the user set stands.

    The cores are shared out evenly among the trainers (OMP_NUM_THREADS), the allocator is tuned for large tensors,
    output is not buffered, and the current folder and the config's are importable.

    Args:
        environ: of the starting process.
        sharers: trainers on this machine, at least 1; a server works while they wait, with as many threads as one.
        config_folder: folder of the config file, if there is one.
        current_folder: None = this process's.
        cores: cores to share out; None = those that this process may use.
    """
    available = cores_here() if cores is None else cores
    threads = max(1, available // sharers)
    defaults = {**_ALLOCATOR, **_LOG_LEVEL, "OMP_NUM_THREADS": str(threads)}
    folders = [Path.cwd() if current_folder is None else current_folder]
    if config_folder is not None:
        folders.append(config_folder)
    # Without repeats; an empty entry would mean the folder that the child runs in.
    path = [str(folder.absolute()) for folder in folders] + environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = os.pathsep.join(dict.fromkeys(entry for entry in path if entry))
    chosen = {_CHOSEN: ",".join(name for name in defaults if name not in environ)}
    return {**defaults, **environ, **chosen, "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}


def producer_environment(environ: Mapping[str, str], told: Mapping[str, str]) -> dict[str, str]:
    """Copy ``environ`` for a program that is no rank; one thread unless the user set another number.

    Args:
        environ: of a rank; what the launch chose for ranks is left out.
        told: variables of the program's own.
    """
    ours = {_SUPERVISED, _CHOSEN, *environ.get(_CHOSEN, "").split(",")}
    users = {name: value for name, value in environ.items() if name not in ours}
    return {"OMP_NUM_THREADS": "1", **users, "PYTHONUNBUFFERED": "1", **told}


def mark_supervised(environ: MutableMapping[str, str]) -> None:
    """Make a process that gets this environment know that a supervisor started it."""
    environ[_SUPERVISED] = "1"


def is_supervised(environ: Mapping[str, str]) -> bool:
    """Whether a supervisor started this process as one of its ranks."""
    return _SUPERVISED in environ


def quiet_agent(environ: MutableMapping[str, str]) -> None:
    """The same threshold for torch's log in a process that somebody else started; before torch is imported."""
    for name, value in _LOG_LEVEL.items():
        environ.setdefault(name, value)


def interface_towards(host: str) -> str | None:
    """The interface over which this machine reaches ``host``; None where that cannot be told (torch then chooses).

    A datagram socket that is connected sends nothing, but the kernel chooses its own address.
    """
    if is_loopback(host):
        return loopback_interface()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        own = probe.getsockname()[0]
        names = [name for _, name in socket.if_nameindex()]
        return next((name for name in names if _address_of(probe, name) == own), None)


def own_address(host: str, interface: str | None = None) -> str:
    """The address of this machine where others reach it as they reach ``host``; that of ``interface`` if it has one.

    Raises:
        UnsupportedConfiguration: there is no way to ``host``.
    """
    if interface is not None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            if (address := _address_of(any_socket, interface)) is not None:
                return address
    try:
        found = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)
        family, kind, _, _, target = min(found, key=lambda one: one[0] != socket.AF_INET)
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UnsupportedConfiguration(
            f"cluster.master_addr ({host}) must be an address that this machine reaches ({error.strerror or error}); "
            "correct it, or name cluster.interface"
        ) from error


_SIOCGIFADDR = 0x8915


def _address_of(any_socket: socket.socket, name: str) -> str | None:
    """The IPv4 address of an interface (netdevice(7)); None where it has none."""
    request = struct.pack("256s", name.encode()[:15])
    try:
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def bind_listener(host: str, port: int) -> socket.socket:
    """A socket that listens on ``host:port`` alone; port 0 takes a free one.

    Raises:
        UnsupportedConfiguration: the address is not this machine's, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise UnsupportedConfiguration(
            f"cluster.master_port ({port}) on cluster.master_addr ({host}) cannot be opened: "
            f"{error.strerror or error}; choose a free port, and for rank 0 an address of its own host"
        ) from error
    return listener

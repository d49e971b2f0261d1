"""Addresses and interfaces of this machine, the listener of rank 0's store, and the environment of child processes."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

from paramserver.cluster.control_groups import read_text
from paramserver.cluster.job_token import TOKEN_VARIABLE
from paramserver.errors import UnsupportedConfiguration

DEFAULT_PORT = 29500
"""Port of rank 0 for ranks that were started separately; the default of torch's own launchers."""

_SUPERVISED = "PARAMSERVER_SUPERVISED"
FAULT_ADDRESS = "PARAMSERVER_FAULTS"
"""Set by ``paramserver chaos`` for the processes of its run: the socket from which a rank receives faults."""
_CHOSEN = "PARAMSERVER_CHOSEN"  # names of the variables that the launcher set for the ranks, not the user
_INTERFACE_VARIABLES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

# torch's RPC agent logs a warning for every connection that a peer closes, which happens at the end of each run; this
# package reports lost peers. torch's C++ log has one threshold and no filter per message.
_LOG_LEVEL = {"TORCH_CPP_LOG_LEVEL": "ERROR"}

# One arena that keeps its memory: tensors of several MB per step are reused instead of mapped again each time.
_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``. Names are not resolved; localhost is known by its name.

    Example::

        >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("10.0.0.1")
        (True, True, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() in ("localhost", "localhost.localdomain", "ip6-localhost")


def loopback_interface() -> str:
    """Return the name of the loopback interface.

    Example::

        >>> loopback_interface()
        'lo'
    """
    return "lo"


def bind_interface(environ: MutableMapping[str, str], name: str) -> None:
    """Make TensorPipe and gloo listen on this interface only. Call it before either starts.

    Args:
        environ: of this process; written.
        name: of the interface.

    Raises:
        UnsupportedConfiguration: this machine has no such interface.

    Example::

        >>> variables = {}
        >>> bind_interface(variables, "lo")
        >>> variables["GLOO_SOCKET_IFNAME"]
        'lo'
    """
    known = [interface for _, interface in socket.if_nameindex()]
    if name not in known:
        raise UnsupportedConfiguration(
            f"cluster.interface ({name}) must be a network interface of this machine ({', '.join(known)}); choose one, "
            "or leave it out"
        )
    for variable in _INTERFACE_VARIABLES:
        environ[variable] = name


def num_usable_cores() -> int:
    """Return the number of cores that this process may use.

    Example::

        >>> num_usable_cores() >= 1
        True
    """
    return len(os.sched_getaffinity(0))


def child_environment(
    environ: Mapping[str, str],
    *,
    num_trainers: int,
    folders: Sequence[Path] | None = None,
    cores: int | None = None,
) -> dict[str, str]:
    """Return a copy of ``environ`` for a rank that this process starts. Variables that the user set are kept.

    The cores are divided evenly among the trainers (OMP_NUM_THREADS), the allocator is tuned for large tensors,
    output is not buffered, and modules in ``folders`` can be imported.

    Args:
        environ: of the starting process.
        num_trainers: on this machine, at least 1. A server works while they wait, with as many threads as a trainer.
        folders: searched for modules before those of PYTHONPATH, in this order; None = the current folder.
        cores: cores to divide; None = those that this process may use.

    Example::

        >>> child_environment({"MALLOC_ARENA_MAX": "4"}, num_trainers=2, cores=8)["OMP_NUM_THREADS"]
        '4'
    """
    available = num_usable_cores() if cores is None else cores
    threads = max(1, available // num_trainers)
    defaults = {**_ALLOCATOR, **_LOG_LEVEL, "OMP_NUM_THREADS": str(threads)}
    searched = [Path.cwd()] if folders is None else folders
    # Without repeats, and without empty entries, which would mean the current folder of the child.
    path = [str(folder.absolute()) for folder in searched] + environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = os.pathsep.join(dict.fromkeys(entry for entry in path if entry))
    chosen = {_CHOSEN: ",".join(name for name in defaults if name not in environ)}
    return {**defaults, **environ, **chosen, "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}


def producer_environment(environ: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of ``environ`` for a program that is no rank; with one thread unless the user set another number.

    Args:
        environ: of a rank; variables that the launcher set for ranks are left out.
        variables: of the program itself.
    """
    ours = {_SUPERVISED, _CHOSEN, TOKEN_VARIABLE, *environ.get(_CHOSEN, "").split(",")}
    users = {name: value for name, value in environ.items() if name not in ours}
    return {"OMP_NUM_THREADS": "1", **users, "PYTHONUNBUFFERED": "1", **variables}


def mark_supervised(environ: MutableMapping[str, str]) -> None:
    """Mark the environment of a process that a supervisor starts.

    Example::

        >>> variables = {}
        >>> mark_supervised(variables)
        >>> is_supervised(variables)
        True
    """
    environ[_SUPERVISED] = "1"


def is_supervised(environ: Mapping[str, str]) -> bool:
    """Return whether a supervisor started this process as one of its ranks.

    Example::

        >>> is_supervised({})
        False
    """
    return _SUPERVISED in environ


def fault_address(environ: Mapping[str, str]) -> str | None:
    """Return where this process receives faults; None outside of ``paramserver chaos``.

    Example::

        >>> fault_address({}) is None
        True
    """
    return environ.get(FAULT_ADDRESS)


def quiet_torch_log(environ: MutableMapping[str, str]) -> None:
    """Set the threshold of torch's log in a process that no supervisor started. Call it before torch is imported.

    Example::

        >>> variables = {}
        >>> quiet_torch_log(variables)
        >>> variables
        {'TORCH_CPP_LOG_LEVEL': 'ERROR'}
    """
    for name, value in _LOG_LEVEL.items():
        environ.setdefault(name, value)


def interface_to(host: str) -> str | None:
    """Return the interface over which this machine reaches ``host``; None if it is unknown (torch then chooses).

    Example::

        >>> interface_to("127.0.0.1")
        'lo'
    """
    if is_loopback(host):
        return loopback_interface()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing: the kernel only chooses a route, and with it the own address
        except OSError:
            return None
        own = probe.getsockname()[0]
        names = [name for _, name in socket.if_nameindex()]
        return next((name for name in names if _address_of(probe, name) == own), None)


def choose_interface(configured: str | None, host: str) -> str | None:
    """Return the interface on which a rank listens; None if torch chooses it.

    Args:
        configured: ``cluster.interface``, which takes precedence.
        host: that of rank 0.

    Example::

        >>> choose_interface(None, "127.0.0.1"), choose_interface("eth0", "10.0.0.1")
        ('lo', 'eth0')
    """
    return configured or interface_to(host)


def own_address(host: str, interface: str | None = None) -> str:
    """Return the address at which other machines that reach ``host`` reach this one.

    Args:
        host: for example that of rank 0.
        interface: if it has an IPv4 address, that one is returned, and ``host`` is not resolved.

    Raises:
        UnsupportedConfiguration: this machine does not reach ``host``.

    Example::

        >>> own_address("127.0.0.1")
        '127.0.0.1'
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


class Interface(NamedTuple):
    """A network interface of this machine."""

    name: str
    addresses: tuple[str, ...]
    mtu: int
    is_up: bool


def list_interfaces() -> list[Interface]:
    """Return the network interfaces of this machine, each with its IPv4 address and its IPv6 addresses.

    Example::

        >>> next(one.addresses[0] for one in list_interfaces() if one.name == "lo")
        '127.0.0.1'
    """
    ipv6: dict[str, list[str]] = {}
    for line in read_text(Path("/proc/net/if_inet6")).splitlines():
        digits, *_, name = line.split()
        ipv6.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            ipv4 = _address_of(any_socket, name)
            folder = Path("/sys/class/net") / name
            flags, mtu = (int(read_text(folder / file).strip() or "0", 0) for file in ("flags", "mtu"))
            addresses = (*([] if ipv4 is None else [ipv4]), *ipv6.get(name, ()))
            found.append(Interface(name, addresses, mtu, bool(flags & _IFF_UP)))
    return found


_IFF_UP = 1
_SIOCGIFADDR = 0x8915


def _address_of(any_socket: socket.socket, name: str) -> str | None:
    """Return the IPv4 address of an interface (netdevice(7)); None if it has none."""
    request = struct.pack("256s", name.encode()[:15])
    try:
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def bind_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``host:port`` only.

    Args:
        host: address of this machine.
        port: 0 = a free one.

    Raises:
        UnsupportedConfiguration: the address is not this machine's, or the port is taken.

    Example::

        >>> with bind_listener("127.0.0.1", 0) as listener:
        ...     listener.getsockname()[0]
        '127.0.0.1'
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

"""Addresses and interfaces of this machine, the listener of rank 0's store, and the environment of child processes."""

from __future__ import annotations

import array
import errno
import fcntl
import hashlib
import hmac
import ipaddress
import logging
import os
import socket
import stat
import struct
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paramserver.errors import UnsupportedConfiguration
from paramserver.platform import num_usable_cores, read_text

_log = logging.getLogger("paramserver")

DEFAULT_PORT = 29500
"""Port of rank 0 for ranks that were started separately; the default of torch's own launchers."""

SUPERVISED = "PARAMSERVER_SUPERVISED"
"""Set by a supervisor for the ranks that it starts."""
RANK_PLUGIN = "PARAMSERVER_RANK_PLUGIN"
"""Names a function, ``module:function``, that each rank of a supervisor calls with its global rank before it imports
torch. It returns what the rank calls with its role and its task before it joins the run."""
_CHOSEN = "PARAMSERVER_CHOSEN"  # names of the variables that the launcher set for the ranks, not the user
_INTERFACE_VARIABLES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
LOOPBACK = "lo"
"""The loopback interface."""

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
    """Return whether only this machine can reach ``host``. Names are not resolved; localhost is known by its name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() in ("localhost", "localhost.localdomain", "ip6-localhost")


def check_master_addr(host: str) -> None:
    """Check the address of rank 0, before any rank uses it. Names are not resolved.

    Raises:
        UnsupportedConfiguration: it is an address of IPv6 that is valid on one link only.
    """
    with suppress(ValueError):  # a name
        address = ipaddress.ip_address(host.strip("[]"))
        if address.version == 6 and address.is_link_local:
            raise UnsupportedConfiguration(
                f"cluster.master_addr ({host}) must be valid on more than one link; give another address of rank 0's "
                "host, or its name"
            )


def bind_interface(environ: MutableMapping[str, str], name: str) -> None:
    """Make TensorPipe and gloo listen on this interface only. Call it before either starts."""
    environ.update(dict.fromkeys(_INTERFACE_VARIABLES, name))


def choose_interface(environ: MutableMapping[str, str], configured: str | None, master_addr: str) -> None:
    """Make TensorPipe and gloo listen on one interface. Call it before either starts; again if it chose none.

    That is the configured one; else loopback, where rank 0 is at a loopback address; else what the user's variables
    TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name, each also for the other if that is not set; else the one over which
    this machine reaches rank 0. None is chosen while the name of rank 0 cannot be resolved.

    Raises:
        UnsupportedConfiguration: this machine has no such interface, or it has no address.
    """
    given = {name: environ[name] for name in _INTERFACE_VARIABLES if environ.get(name)}
    if configured is not None:
        _check_interface("cluster.interface", configured)
        bind_interface(environ, configured)
    elif is_loopback(master_addr):
        bind_interface(environ, LOOPBACK)
    elif given:
        for variable, names in given.items():
            for name in names.split(","):  # gloo accepts several
                _check_interface(variable, name)
        first = next(iter(given.values())).split(",")[0]
        environ.update({name: first for name in _INTERFACE_VARIABLES if name not in given})
    elif (interface := interface_to(master_addr)) is not None:
        if interface == LOOPBACK:
            _log.warning(
                "cluster.master_addr (%s) is a loopback address on this host, so ranks on other hosts do not reach "
                "this one; correct /etc/hosts, or give cluster.interface",
                master_addr,
            )
        bind_interface(environ, interface)


def chosen_interface(environ: Mapping[str, str]) -> str | None:
    """Return the interface on which gloo listens, the first of several; None before ``choose_interface``."""
    return environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] or None


def _check_interface(key: str, name: str) -> None:
    known = [interface for _, interface in socket.if_nameindex()]
    if name not in known:
        raise UnsupportedConfiguration(
            f"{key} ({name}) must be a network interface of this machine ({', '.join(known)}); choose one, or leave it "
            "out"
        )
    # torch would then listen on loopback, without an error.
    if not any(interface == name for interface, _ in _interface_addresses()):
        raise UnsupportedConfiguration(
            f"{key} ({name}) must be an interface with an address, and has none; give it one, or choose another"
        )


def child_environment(
    environ: Mapping[str, str], *, num_trainers: int, folders: Sequence[Path] | None = None
) -> dict[str, str]:
    """Return a copy of ``environ`` for a rank that this process starts. Variables that the user set are kept.

    The cores that this process may use are divided evenly among the trainers (OMP_NUM_THREADS), the allocator is tuned
    for large tensors, output is not buffered, and modules in ``folders`` can be imported.

    Args:
        num_trainers: on this machine, at least 1. A server works while they wait, with as many threads as a trainer.
        folders: searched for modules before those of PYTHONPATH, in this order; None = the current folder.
    """
    threads = max(1, num_usable_cores() // num_trainers)
    defaults = {**_ALLOCATOR, **_LOG_LEVEL, "OMP_NUM_THREADS": str(threads)}
    searched = [Path.cwd()] if folders is None else folders
    # Without repeats, and without empty entries, which would mean the current folder of the child.
    path = [str(folder.absolute()) for folder in searched] + environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = os.pathsep.join(dict.fromkeys(entry for entry in path if entry))
    chosen = {_CHOSEN: ",".join(name for name in defaults if name not in environ)}
    return {**defaults, **environ, **chosen, "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}


def producer_environment(environ: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of ``environ`` for a program that is no rank; with one thread unless the user set another number.

    Variables that the launcher set for ranks are left out.
    """
    ours = {SUPERVISED, _CHOSEN, TOKEN_VARIABLE, *environ.get(_CHOSEN, "").split(",")}
    users = {name: value for name, value in environ.items() if name not in ours}
    return {"OMP_NUM_THREADS": "1", **users, "PYTHONUNBUFFERED": "1", **variables}


def quiet_torch_log(environ: MutableMapping[str, str]) -> None:
    """Set the threshold of torch's log in a process that no supervisor started. Call it before torch is imported."""
    for name, value in _LOG_LEVEL.items():
        environ.setdefault(name, value)


def interface_to(host: str) -> str | None:
    """Return the interface over which this machine reaches ``host``; None if it does not, or the name is unknown."""
    if is_loopback(host):
        return LOOPBACK
    try:
        own = _route_to(host)
    except OSError:
        return None
    return next((interface for interface, address in _interface_addresses() if address == own), None)


def own_address(host: str, interface: str | None = None) -> str:
    """Return the address at which machines that reach ``host`` reach this one: that of ``interface``, if it has one.

    Raises:
        UnsupportedConfiguration: this machine does not reach ``host``.
    """
    found = [address for name, address in _interface_addresses() if name == interface]
    if found:
        # Of the family of the host where that is known, otherwise IPv4.
        return min(found, key=lambda address: (":" in address) != (":" in host))
    try:
        return _route_to(host)
    except OSError as error:
        raise UnsupportedConfiguration(
            f"cluster.master_addr ({host}) must be an address that this machine reaches ({error.strerror or error}); "
            "correct it, or name cluster.interface"
        ) from error


def resolve(host: str, port: int) -> list[tuple[Any, ...]]:
    """Return family and socket address of all addresses of ``host``; those of IPv4 first."""
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    return [(one[0], one[4]) for one in sorted(found, key=lambda one: one[0] != socket.AF_INET)]


class NetworkInterface(NamedTuple):
    """A network interface of this machine."""

    name: str
    addresses: tuple[str, ...]
    mtu: int
    is_up: bool


_IFF_UP = 1


def list_interfaces() -> list[NetworkInterface]:
    """Return the network interfaces of this machine, each with its addresses, those of a link only left out."""
    addresses = _interface_addresses()
    found = []
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net") / name
        flags, mtu = (int(read_text(folder / file).strip() or "0", 0) for file in ("flags", "mtu"))
        own = tuple(address for interface, address in addresses if interface == name)
        found.append(NetworkInterface(name, own, mtu, bool(flags & _IFF_UP)))
    return found


def _route_to(host: str) -> str:
    """Return the own address from which this machine sends to ``host``."""
    failure = OSError(f"{host} has no address")
    for family, target in resolve(host, 9):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(target)  # sends nothing: the kernel only chooses a route, and with it the own address
                return str(probe.getsockname()[0])
            except OSError as error:
                failure = error
    raise failure


_SIOCGIFCONF = 0x8912
_IFCONF, _IFREQ_BYTES = struct.Struct("iP"), 40
_MAX_ADDRESSES = 4096
_LINK_LOCAL_SCOPE = 0x20


def _interface_addresses() -> list[tuple[str, str]]:
    """Return interface and address of all addresses of this machine, without those of a link only; IPv4 first."""
    answer = array.array("B", bytes(_MAX_ADDRESSES * _IFREQ_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = _IFCONF.pack(len(answer), answer.buffer_info()[0])
        size, _ = _IFCONF.unpack(fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, request))  # netdevice(7)
    found = []
    for start in range(0, size, _IFREQ_BYTES):
        label = answer[start : start + 16].tobytes().partition(b"\0")[0].decode()
        address = socket.inet_ntoa(answer[start + 20 : start + 24].tobytes())
        found.append((label.partition(":")[0], address))  # a further address may have a label such as eth0:1
    with suppress(FileNotFoundError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, name = line.split()
            if int(scope, 16) != _LINK_LOCAL_SCOPE:
                found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found


def host_and_port(host: str, port: int) -> str:
    """Return an address as messages and URLs have it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_loopback(address: str) -> None:
    """Refuse a loopback address that this machine does not reach: one can listen there, and none connect."""
    try:
        _route_to(address)
    except OSError as error:
        if error.errno == errno.ENETUNREACH:  # another error, as of a sandbox without UDP, shows nothing
            raise UnsupportedConfiguration(
                f"the interface {LOOPBACK} must be up, as the ranks connect to cluster.master_addr ({address}) over "
                f"it; bring it up (ip link set {LOOPBACK} up)"
            ) from error


def bind_listener(
    host: str, port: int, interface: str | None = None, key: str = "cluster.master_port"
) -> socket.socket:
    """Return a socket that listens on ``host:port`` only, where ``host`` is ``cluster.master_addr``.

    Where that is the name of a loopback address on this machine, which other machines resolve to another one, it
    listens on all interfaces if ``interface`` is another one than loopback. Port 0 is a free one, and ``key`` its name
    in the config.

    Raises:
        UnsupportedConfiguration: the address is not this machine's or of one link only, or the port is taken, or
            loopback is down.
    """
    check_master_addr(host)
    try:
        family, address = resolve(host, port)[0]
        if not is_loopback(host) and is_loopback(address[0]) and interface not in (None, LOOPBACK):
            address = ("", port)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(512)
            if is_loopback(address[0]):
                _check_loopback(address[0])
        except BaseException:
            listener.close()
            raise
    except (socket.gaierror, UnicodeError) as error:  # a name in a form that none has
        reason = getattr(error, "strerror", error)
        raise UnsupportedConfiguration(
            f"cluster.master_addr ({host}) has no address: {reason}; give the name or address of rank 0's host"
        ) from error
    except OSError as error:
        raise UnsupportedConfiguration(
            f"{key} ({port}) on cluster.master_addr ({host}) cannot be opened: "
            f"{error.strerror or error}; choose a free port, and for rank 0 an address of its own host"
        ) from error
    return listener


# The job token, which ranks that connect to rank 0 prove: a file, or an environment variable of this process.


TOKEN_VARIABLE = "PARAMSERVER_TOKEN"

# Fewer can be guessed from a recorded proof.
_MIN_BYTES = 16
_MAX_BYTES = 4096
_MAKE = "make one with: (umask 077; openssl rand -hex 32 > FILE)"


@dataclass(frozen=True)
class JobToken:
    """A secret of all ranks of a run. Its text form does not show it."""

    source: str
    secret: bytes = field(repr=False)

    def sign(self, purpose: str, data: bytes) -> bytes:
        """Return the HMAC-SHA256 of ``data`` for one purpose. That of another purpose is not valid for it."""
        return hmac.digest(self.secret, f"paramserver {purpose}\0".encode() + data, hashlib.sha256)


def read_token(token_file: str | None, environ: Mapping[str, str]) -> JobToken | None:
    """Return the token of the environment, else that of ``cluster.token_file``; None if neither is given.

    Raises:
        UnsupportedConfiguration: the token is too short or too long, or other users can read or replace its file.
    """
    if TOKEN_VARIABLE in environ:
        source, secret = TOKEN_VARIABLE, os.fsencode(environ[TOKEN_VARIABLE]).strip()
    elif token_file is not None:
        source, secret = f"cluster.token_file ({token_file})", _read_private(Path(token_file)).strip()
    else:
        return None
    if not _MIN_BYTES <= len(secret) <= _MAX_BYTES:
        raise UnsupportedConfiguration(f"{source} must hold a token of {_MIN_BYTES} to {_MAX_BYTES} bytes; {_MAKE}")
    return JobToken(source, secret)


def hide_token(environ: MutableMapping[str, str]) -> None:
    """Remove the token from the environment of a rank that has read it: processes that it starts do not need it."""
    environ.pop(TOKEN_VARIABLE, None)


def _read_private(file: Path) -> bytes:
    name = f"cluster.token_file ({file})"
    try:
        # O_NONBLOCK: opening a FIFO does not wait. The open file is checked: the path may be replaced meanwhile.
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UnsupportedConfiguration(f"{name} must be a regular file; {_MAKE}")
            if status.st_uid != os.geteuid():
                raise UnsupportedConfiguration(
                    f"{name} must belong to the user of this process (uid {os.geteuid()}, not {status.st_uid}); make "
                    "a copy of your own, with mode 600"
                )
            if mode := stat.S_IMODE(status.st_mode) & 0o077:
                raise UnsupportedConfiguration(
                    f"{name} must be closed to other users (mode 600, without {mode:03o}); run: chmod 600 {file}"
                )
            return opened.read(_MAX_BYTES + 2)
    except OSError as error:
        raise UnsupportedConfiguration(f"{name} cannot be read ({error.strerror or error}); {_MAKE}") from error

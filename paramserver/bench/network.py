"""Hosts of one machine: network namespaces with an interface each, of a bandwidth that somebody chose.

Everything is made in namespaces of its own, and ends with them: nothing of the machine's network is touched. A switch
in the middle joins the hosts; what a host sends is limited at its own end, what it gets at the switch's, so that both
ways have the bandwidth at the same time, as on a real interface.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from paramserver.errors import UnsupportedConfiguration

INTERFACE = "eth0"
PORT = 29500
_TIMEOUT_S = 30.0
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# What may pass at once after a pause: little, or a small model would pass between two steps without being limited; and
# as much as comes between two ticks of a kernel timer, or a fast link would be slower than it says (tc-tbf(8)).
_BURST_S, _LEAST_BURST_BYTES = 0.004, 16 * 2**10
_QUEUE = "100ms"


def parse_bandwidth(text: str) -> float:
    """Read ``100mbit``; bytes per second.

    Raises:
        UnsupportedConfiguration: it is no number with a unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    if match is None or not float(match[1]):
        raise UnsupportedConfiguration(
            f"--bandwidth {text}: must be a number above 0 and one of {', '.join(_UNITS)}; write for example 100mbit"
        )
    return float(match[1]) * _UNITS[match[2]] / 8


class Hosts:
    """Namespaces as hosts; a context manager.

    Args:
        count: how many.
        bandwidth: of each, in bytes per second, in each direction.

    Raises:
        UnsupportedConfiguration: this user may not make them, or a tool is missing.
    """

    def __init__(self, count: int, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self._switch = f"bench{os.getpid()}-switch"
        self._names = [f"bench{os.getpid()}-{i}" for i in range(count)]

    def __enter__(self) -> Hosts:
        check_may_make_hosts()
        try:
            _ip("netns", "add", self._switch)
            _in(self._switch, "ip", "link", "add", "bridge", "type", "bridge")
            _in(self._switch, "ip", "link", "set", "bridge", "up")
            for i, name in enumerate(self._names):
                self._add(i, name)
        except BaseException:
            self.close()
            raise
        return self

    def _add(self, number: int, name: str) -> None:
        port = f"port{number}"
        _ip("netns", "add", name)
        _in(self._switch, "ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _in(self._switch, "ip", "link", "set", port, "master", "bridge", "up")
        _in(name, "ip", "address", "add", f"{address(number)}/16", "dev", INTERFACE)
        _in(name, "ip", "link", "set", INTERFACE, "up")
        _in(name, "ip", "link", "set", "lo", "up")
        burst = max(round(self.bandwidth * _BURST_S), _LEAST_BURST_BYTES)
        rate = f"{round(self.bandwidth * 8)}bit"
        for namespace, device in ((name, INTERFACE), (self._switch, port)):
            words = f"tc qdisc add dev {device} root tbf rate {rate} burst {burst}b latency {_QUEUE}"
            _in(namespace, *words.split())

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove them; what runs in one keeps running, without a name for its namespace."""
        there = {path.name for path in Path("/run/netns").glob("*")}
        for name in [*self._names, self._switch]:
            if name in there:
                _ip("netns", "delete", name)

    def on(self, number: int, command: Sequence[str]) -> list[str]:
        """The words that run a command on host ``number``; the process is the same one."""
        return ["ip", "netns", "exec", self._names[number], *command]

    def moved_bytes(self, number: int) -> int:
        """What the kernel counted on the interface of a host: sent and received."""
        names = ("tx_bytes", "rx_bytes")
        counters = [f"/sys/class/net/{INTERFACE}/statistics/{name}" for name in names]
        return sum(map(int, _in(self._names[number], "cat", *counters).split()))


def address(number: int) -> str:
    """Where the others reach host ``number``."""
    return f"10.99.{number // 250}.{number % 250 + 1}"


def check_may_make_hosts() -> None:
    """Refuse where namespaces cannot be made.

    Raises:
        UnsupportedConfiguration: with the reason and the cure.
    """
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        reason = f"{missing[0]} of iproute2 is missing" if missing else "this user is not root"
        raise UnsupportedConfiguration(
            f"--bandwidth makes network namespaces, for which it needs root and the tools ip and tc ({reason}); run it "
            "as root, or leave it out"
        )


def _ip(*words: str) -> str:
    return _run(["ip", *words])


def _in(namespace: str, *words: str) -> str:
    return _run(["ip", "netns", "exec", namespace, *words])


def _run(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise UnsupportedConfiguration(
            f"--bandwidth: {' '.join(words)} failed ({said[-1] if said else done.returncode}); leave it out where "
            "network namespaces are not allowed"
        )
    return done.stdout

"""What a benchmark starts: a group of processes that end together, and simulated hosts in which they run.

The hosts are on one machine: network namespaces, each with an interface of a limited bandwidth. They have no names and
do not change the network of the machine. Each is held by a process that ends with its standard input, so at the latest
with this process, also when this process is killed; the kernel removes a namespace when no process is left in it
(network_namespaces(7)).

A bridge in a further namespace connects the hosts. What a host sends is limited at its own interface, what it receives
at the port of the bridge, so that both directions have the bandwidth at the same time, as on a real interface.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paramserver.errors import Interrupted, TrainingError, UnsupportedConfiguration

_POLL_INTERVAL_S = 0.1
_ERROR = "error: "


class ProcessGroup:
    """A context manager that starts processes, and kills them and their children at its end.

    Each process leads its own session, so that a Ctrl-C reaches the benchmark only. The output of process ``i`` is
    written to ``output-<i>.txt``. The event ``stop`` interrupts ``wait``.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environ: Mapping[str, str],
        folder: Path,
        stop: threading.Event | None = None,
    ) -> None:
        self._commands, self._environ, self._stop = commands, dict(environ), stop
        self._outputs = [folder / f"output-{i}.txt" for i in range(len(commands))]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> ProcessGroup:
        try:
            for command, output in zip(self._commands, self._outputs, strict=True):
                with output.open("wb") as file:
                    self._processes.append(
                        subprocess.Popen(
                            list(command),
                            stdin=subprocess.DEVNULL,
                            stdout=file,
                            stderr=subprocess.STDOUT,
                            env=self._environ,
                            start_new_session=True,
                        )
                    )
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill the processes that are alive, and their children."""
        for process in self._processes:
            if process.poll() is None:
                # The process leads its session and group, so that this reaches its children too.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()  # also reaps one that has ended

    def wait(self, timeout_s: float, sample: Callable[[], None]) -> None:
        """Block until all processes have ended without an error.

        ``sample`` is called several times a second meanwhile. ``timeout_s`` is for all of them together.

        Raises:
            TrainingError: a process failed, with its own error message, or the time is over.
            Interrupted: ``stop`` was set.
        """
        deadline = time.monotonic() + timeout_s
        while running := [process for process in self._processes if process.poll() is None]:
            # The first failure ends the wait: the other processes may wait for the one that failed.
            self._check()
            if self._stop is not None and self._stop.is_set():
                raise Interrupted("interrupted by a signal")
            if time.monotonic() > deadline:
                raise TrainingError(f"it did not end within {timeout_s:.0f} s and was killed{self._last_line()}")
            sample()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(_POLL_INTERVAL_S)
        self._check()

    def _check(self) -> None:
        for process, output in zip(self._processes, self._outputs, strict=True):
            if process.returncode not in (None, 0):
                raise TrainingError(last_error(output) or f"it ended with exit code {process.returncode}")

    def _last_line(self) -> str:
        lines = [line for output in self._outputs for line in _lines(output)]
        return f"; its last line: {lines[-1]}" if lines else ""


def last_error(output: Path) -> str | None:
    """The first line of the error that a process printed before it ended; None without one."""
    errors = [line.partition(_ERROR)[2] for line in _lines(output) if line.startswith(_ERROR)]
    return errors[-1].strip() if errors else None


def _lines(output: Path) -> list[str]:
    return [line for line in output.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]


# Simulated hosts.

INTERFACE = "eth0"
PORT = 29500
_TIMEOUT_S = 30.0
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# The burst after a pause must be small, or the gradients of a small model pass without a limit, but must last for a
# tick of the kernel's timer, or a fast link does not reach its rate (tc-tbf(8)).
_BURST_S, _LEAST_BURST_BYTES = 0.004, 16 * 2**10
# How long a packet waits at most. In a longer queue, acknowledgements wait behind the tensors of the other direction; a
# shorter one drops packets when several servers send to a trainer. Measured with 100, 50 and 25 ms at 50 Mbit/s: 43, 52
# and 55 samples/s in ``async`` with 8 trainers and 2 servers; 56, 51 and 50 in ``sync`` with 8 trainers and 4 servers.
_QUEUE = "50ms"
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}


def parse_bandwidth(text: str) -> float:
    """Parse ``100mbit`` to bytes per second.

    Raises:
        UnsupportedConfiguration: ``text`` is not a positive number with a unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    if match is None or not float(match[1]):
        raise UnsupportedConfiguration(
            f"--bandwidth {text}: must be a number above 0 and one of {', '.join(_UNITS)}; write for example 100mbit"
        )
    return float(match[1]) * _UNITS[match[2]] / 8


class NetworkHosts:
    """A context manager that makes namespaces as hosts.

    ``bandwidth`` is that of each, in bytes per second, in each direction; math.inf = no limit.

    Raises:
        UnsupportedConfiguration: this user may not make namespaces, or a tool is missing.
    """

    def __init__(self, count: int, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self._count = count
        self._switch: Namespace | None = None
        self._hosts: list[Namespace] = []

    def __enter__(self) -> NetworkHosts:
        require_network_namespaces()
        try:
            self._switch = Namespace()
            self._switch.run("ip", "link", "add", "bridge", "type", "bridge")
            self._switch.run("ip", "link", "set", "bridge", "up")
            for number in range(self._count):
                self._hosts.append(self._make_host(number))
                self._join(number, self._hosts[number], self._switch)
        except BaseException:
            # Also after a Ctrl-C: ``__exit__`` is not called when ``__enter__`` raises.
            self.close()
            raise
        return self

    def _make_host(self, number: int) -> Namespace:
        return Namespace()

    def _join(self, number: int, host: Namespace, switch: Namespace) -> None:
        port = f"port{number}"
        # Made directly in the namespace of the host: no interface appears in the machine's own network.
        switch.run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", str(host.pid))
        switch.run("ip", "link", "set", port, "master", "bridge", "up")
        host.run("ip", "address", "add", f"{host_address(number)}/16", "dev", INTERFACE)
        host.run("ip", "link", "set", INTERFACE, "up")
        host.run("ip", "link", "set", "lo", "up")
        if math.isinf(self.bandwidth):
            return
        burst = max(round(self.bandwidth * _BURST_S), _LEAST_BURST_BYTES)
        rate = f"{round(self.bandwidth * 8)}bit"
        # tbf limits only what leaves an interface, so each direction is limited at the end that sends it.
        for namespace, device in ((host, INTERFACE), (switch, port)):
            words = f"tc qdisc add dev {device} root tbf rate {rate} burst {burst}b latency {_QUEUE}"
            namespace.run(*words.split())

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the namespaces; a process that still runs in one keeps it."""
        for namespace in (*self._hosts, *([] if self._switch is None else [self._switch])):
            namespace.close()
        self._hosts, self._switch = [], None

    def command_on(self, number: int, command: Sequence[str]) -> list[str]:
        """The command that runs ``command`` on host ``number``, in the same process."""
        return self._hosts[number].command_in(*command)

    def moved_bytes(self, number: int) -> int:
        return self._hosts[number].moved_bytes(INTERFACE)


class Namespace:
    """A network namespace and the process that holds it.

    It has namespaces of its own of these ``kinds``, as unshare(1) names them.

    Raises:
        UnsupportedConfiguration: the namespace cannot be made.
    """

    def __init__(self, kinds: Sequence[str] = ("net",)) -> None:
        self._kinds = [f"--{kind}" for kind in kinds]
        command = ["unshare", *self._kinds, "sh", "-c", "echo; exec cat"]
        pipe = subprocess.PIPE
        # A separate session: a Ctrl-C must not end it before the runs in it.
        self._holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self.pid = self._holder.pid
        assert self._holder.stdout is not None
        # A line arrives once the namespace exists: before that, ``nsenter`` would enter the network of the machine.
        ready = select.select([self._holder.stdout], [], [], _TIMEOUT_S)[0]
        if not ready or not self._holder.stdout.read(1):
            self._holder.kill()
            output = self._holder.communicate(timeout=_TIMEOUT_S)[1].decode(errors="replace")
            raise _failure(command, output or "no answer")

    def command_in(self, *command: str) -> list[str]:
        """The command that runs ``command`` in the namespace, in the same process."""
        # ``nsenter`` replaces itself by the command, so the process id stays and signals reach the command.
        return ["nsenter", f"--target={self.pid}", *self._kinds, *command]

    def run(self, *command: str) -> str:
        return _run(self.command_in(*command))

    def moved_bytes(self, interface: str) -> int:
        """Bytes that the interface sent and received (proc(5), net/dev)."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text(encoding="ascii").splitlines()
        counters = next(line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{interface}:"))
        return int(counters[0]) + int(counters[8])

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate(timeout=_TIMEOUT_S)


def host_address(number: int) -> str:
    return f"10.99.{number // 250}.{number % 250 + 1}"


def require_network_namespaces() -> None:
    """Check that this process can make network namespaces.

    Raises:
        UnsupportedConfiguration: it cannot, with the reason.
    """
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        reason = f"{missing[0]} of {_TOOLS[missing[0]]} is missing" if missing else "this user is not root"
        raise UnsupportedConfiguration(
            f"--bandwidth makes network namespaces, for which it needs root and the tools {', '.join(_TOOLS)} "
            f"({reason}); run it as root, or leave it out"
        )


def _run(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise _failure(words, done.stderr or str(done.returncode))
    return done.stdout


def _failure(words: Sequence[str], output: str) -> UnsupportedConfiguration:
    return UnsupportedConfiguration(
        f"--bandwidth: {' '.join(words)} failed ({output.strip().splitlines()[-1]}); leave it out where network "
        "namespaces are not allowed"
    )

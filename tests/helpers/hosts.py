"""Several hosts on this machine that share no file system: ``Hosts``, and ranks on them: ``start_ranks``.

A host has network interfaces and addresses, a host name, /etc/hosts, /tmp and /dev/shm of its own. What is installed
(the interpreter, this package, the tasks of the tests) is the same on all of them, as from one image.
"""

import itertools
import json
import math
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import FinishedRun, environment, fork_server, write_config

from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.bench.processes import INTERFACE, Namespace, NetworkHosts, host_address

FOLDER = Path("/tmp/work")  # of each host's own /tmp
PORT = 29500
_INSTALLED = (Path(__file__).parents[2], Path(sys.prefix))

# /tmp and /dev/shm become empty. What is installed below /tmp stays visible.
_MOUNTS = """
set -e
mount -t tmpfs none /dev/shm
for folder in {installed}; do
    mkdir -p "/dev/shm$folder"
    mount --bind "$folder" "/dev/shm$folder"
done
mount -t tmpfs none /tmp
for folder in {installed}; do
    mkdir -p "$folder"
    mount --bind "/dev/shm$folder" "$folder"
    umount "/dev/shm$folder"
done
mkdir {work}
printf '%s' {names} > /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
hostname {own_name}
"""


def name_of(number):
    """The name of a host, which all of them resolve."""
    return f"node{number}"


def ipv6_address(number):
    return f"fd00:99::{number + 1:x}"


class Hosts(NetworkHosts):
    """Hosts that are connected by a bridge. A context manager; skips the test where hosts cannot be made.

    Args:
        count: the number of hosts.
        ipv6: addresses of IPv6 only, in place of IPv4.
        names: content of /etc/hosts by host, in place of the addresses of all names.
    """

    def __init__(self, count, ipv6=False, names=None):
        super().__init__(count, math.inf)
        self.ipv6, self._names = ipv6, names or {}
        self._outputs = itertools.count()

    def __enter__(self):
        try:
            return super().__enter__()
        except UnsupportedConfiguration as error:
            pytest.skip(f"no hosts on this machine: {error}")

    def address(self, number):
        return ipv6_address(number) if self.ipv6 else host_address(number)

    def _make_host(self, number):
        host = Namespace(("net", "uts", "mount"))
        installed = " ".join(shlex.quote(str(folder)) for folder in _INSTALLED if folder.is_relative_to("/tmp"))
        known = "".join(f"{self.address(n)} {name_of(n)}\n" for n in range(self._count))
        names = self._names.get(number, f"127.0.0.1 localhost\n::1 localhost\n{known}")
        try:
            host.run(
                *("sh", "-c"),
                _MOUNTS.format(
                    installed=installed, work=FOLDER, names=shlex.quote(names), own_name=shlex.quote(name_of(number))
                ),
            )
        except BaseException:
            host.close()
            raise
        return host

    def _join(self, number, host, switch):
        super()._join(number, host, switch)
        # Used at once: nothing else in this network can have the address.
        host.run("ip", "address", "add", f"{ipv6_address(number)}/64", "dev", INTERFACE, "nodad")
        if self.ipv6:
            host.run("ip", "-4", "address", "flush", "dev", INTERFACE)

    def pid(self, number):
        """The process that holds the namespaces of a host."""
        return self._hosts[number].pid

    def run(self, number, *command):
        """Run a command on a host; return its output."""
        return self._hosts[number].run(*command)

    def start(self, number, command, environ):
        """Start a command on a host, in its folder; return the process, with its output as text."""
        words = self.command_on(number, ["env", "-C", str(FOLDER), *command])
        return subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def fork(self, number, words, program="launch", function="main", environ=None):
        """Start ``paramserver.<program>.<function>`` on a host, in its folder; return it, as a ``ForkedRun``."""
        output = self.path(number, FOLDER / f"output-{next(self._outputs)}")
        environ = {**environment(), **(environ or {})}
        return fork_server().start(words, FOLDER, environ, program, function, host=self.pid(number), output=output)

    def path(self, number, path=FOLDER):
        """Where this process finds what a host has at ``path``."""
        return Path(f"/proc/{self.pid(number)}/root") / Path(path).relative_to("/")

    def cut(self, number):
        """Cut the link of a host: it is still up, but nothing arrives at the other end."""
        self._switch.run("ip", "link", "set", f"port{number}", "nomaster")

    def restore(self, number):
        self._switch.run("ip", "link", "set", f"port{number}", "master", "bridge")


class Ranks:
    """Ranks of one run, each on its host. A context manager, which kills what is left of them.

    Attributes:
        runs: by rank.
        run_dir: as this process finds it; on the host of rank 0.
    """

    def __init__(self, hosts, placement, words, environ=None, name="run"):
        self.hosts, self.placement, self._words, self._environ = hosts, placement, words, environ or {}
        self.run_dir = hosts.path(placement[0], FOLDER / "runs" / name)
        self.runs = {}

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for run in self.runs.values():
            run.__exit__()

    def start(self, rank, *flags):
        words = ["--rank", rank, *self._words, *flags]
        self.runs[rank] = self.hosts.fork(self.placement[rank], words, environ=self._environ)

    def output(self, rank):
        return self.runs[rank].output.read_text()

    def wait(self, timeout_s=90):
        """The exit codes in the order of ranks, once all have ended."""
        deadline = time.monotonic() + timeout_s
        codes = [self.runs[rank].wait(max(deadline - time.monotonic(), 0.1)) for rank in sorted(self.runs)]
        for run in self.runs.values():
            run.join()
        return codes

    def finish(self, timeout_s=90):
        """Wait until all ranks have ended without an error; return the run."""
        codes = self.wait(timeout_s)
        assert codes == [0] * len(codes), [self.output(rank) for rank in sorted(self.runs)]
        return FinishedRun(0, self.output(0), self.run_dir)

    def wait_for(self, reached, timeout_s=150):
        """Wait until ``reached`` returns something true."""
        deadline = time.monotonic() + timeout_s
        while not (found := reached()):
            assert time.monotonic() < deadline, [self.output(rank) for rank in sorted(self.runs)]
            time.sleep(0.02)
        return found

    def step(self):
        """The last step of which rank 0 has a record."""
        file = self.run_dir / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        steps = [json.loads(line).get("step") for line in lines if line.endswith("\n")]
        return max((step for step in steps if step is not None), default=0)


def start_ranks(hosts, placement, *flags, master=None, environ=None, name="run", start=True, new=True, **config):
    """Start a rank on each host of ``placement``; return them, for ``with``.

    Args:
        hosts: see ``Hosts``.
        placement: host by rank.
        flags: in addition.
        master: address or name of rank 0; None = the address of its host.
        environ: in addition.
        name: of the run.
        start: false if the caller starts the ranks.
        new: false if the hosts have a config already.
        config: as for ``write_config``.
    """
    if new:
        write_configs(hosts, placement, **config)
    words = ["--config", FOLDER / "config.yaml", "--world_size", len(placement)]
    words += ["--master_addr", master or hosts.address(placement[0]), "--set", f"logging.name={name}", *flags]
    ranks = Ranks(hosts, placement, words, environ, name)
    try:
        for rank in range(len(placement) if start else 0):
            ranks.start(rank)
    except BaseException:
        ranks.__exit__()
        raise
    return ranks


def write_configs(hosts, placement, **config):
    """Write the config to each host. Runs are in a folder of the host's own."""
    for host in set(placement):
        write_config(hosts.path(host), **{**config, "logging": {"run_dir": "runs", **config.get("logging", {})}})

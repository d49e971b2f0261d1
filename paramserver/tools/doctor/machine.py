"""What this machine offers to a run, what a run of a config would choose on it and why, and the limits of its waits."""

from __future__ import annotations

import os
import platform
import re
import resource
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from paramserver import __version__
from paramserver.cluster import (
    ProcessIdentity,
    allocated_gpus,
    bind_listener,
    child_environment,
    choose_interface,
    chosen_interface,
    host_and_port,
    is_loopback,
    own_address,
    process_environ,
)
from paramserver.cluster.base import Environ
from paramserver.cluster.network import list_interfaces
from paramserver.cluster.resolve import ENVIRONMENTS, environment_class
from paramserver.config import (
    Config,
    Deadlines,
    is_colocated,
    mode_of,
    num_servers_of,
    num_trainers_of,
    roles,
    server_computes,
    world_size_of,
)
from paramserver.devices import num_gpus, place_server, place_trainer, require_visible_gpus
from paramserver.distributed.backends import available_backends
from paramserver.distributed.rendezvous import Rendezvous, host_identity, why_unknown
from paramserver.distributed.timeouts import call_with_timeout, poll_until
from paramserver.errors import DeadlineExceeded, UnsupportedConfiguration
from paramserver.fileio import atomic_write_text
from paramserver.importing import check_torch_version
from paramserver.platform import available_bytes, cpu_limit, num_usable_cores, read_text
from paramserver.runs.rundir import RunDir, package_version
from paramserver.runtime.dry_run import loss_lines
from paramserver.runtime.rank import place_rank
from paramserver.tools.doctor.diagnosis import Diagnosis, Subject
from paramserver.tools.report.formatting import plural

_GIB, _MIB = 2**30, 2**20
_AGENT_S = 20.0
_LOOKUP_S, _SLOW_LOOKUP_S = 5.0, 0.5
_LITTLE_DISK_BYTES = _GIB
_LITTLE_SHM_BYTES = 256 * _MIB
# Measured: rank 0 has 174 open files with two trainers and 12 more for each further one, a trainer has 135.
FILES_OF_A_PROCESS, FILES_OF_A_RANK = 256, 16
# Packages of the extras, by the extra that brings them.
_OPTIONAL = {
    "tensorboard": "",
    "tqdm": "progress",
    "pyzmq": "online",
    "matplotlib": "report",
    "lightning": "lightning",
}
# Reading the time from these takes a system call or more, in each step several times.
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")


def describe_machine(found: Diagnosis, config: Config, environ: Environ) -> None:
    """Add what this machine offers, and what a run of ``config`` lacks here."""
    subject = Subject("machine")
    found.subjects.append(subject)
    subject.add("host", f"{socket.gethostname()}, {platform.platform()}", socket.gethostname())
    _versions(found, subject)
    _communication(found, subject)
    _cores(found, subject)
    _memory(found, subject, config)
    _gpus(found, subject, config, environ)
    for one in (one for one in list_interfaces() if one.is_up or one.addresses):
        text = f"{', '.join(one.addresses) or 'no address'}; {'up' if one.is_up else 'down'}, MTU {one.mtu}"
        subject.add(f"interface {one.name}", text, one._asdict())
    _name_lookup(found, subject)
    _limits(found, subject, world_size_of(config))
    _clock(found, subject)
    _launcher(subject, environ)
    _folders(found, subject, config)


def _versions(found: Diagnosis, subject: Subject) -> None:
    subject.add("python", platform.python_version())
    subject.add("paramserver", f"{__version__}, {Path(__file__).parents[2]}", __version__)
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
    # The version is of a class that is text with methods of its own.
    subject.add("torch", f"{torch.__version__}, for {cuda}", str(torch.__version__))
    try:
        check_torch_version()
    except UnsupportedConfiguration as error:
        found.refusal(error)
    versions = {package: package_version(package) for package in _OPTIONAL}
    for package in (package for package, extra in _OPTIONAL.items() if not extra and versions[package] is None):
        found.problem(f"{package} is not installed", f"python -m pip install {package}")
    texts = [
        f"{name} {version}" if version else f"no {name} (extra {_OPTIONAL[name]})" for name, version in versions.items()
    ]
    subject.add("packages", ", ".join(texts), versions)


def _communication(found: Diagnosis, subject: Subject) -> None:
    backends = available_backends()
    texts = [name if is_there else f"no {name}" for name, is_there in backends.items()]
    subject.add("torch.distributed", ", ".join(texts), backends)
    for name, mode in (("rpc", "rpc"), ("gloo", "ddp")):
        if not backends[name]:
            found.problem(
                f"this build of torch has no {name}, which mode {mode} needs",
                "install a build of torch for Linux from pytorch.org",
            )


def _cores(found: Diagnosis, subject: Subject) -> None:
    usable, limit = num_usable_cores(), cpu_limit()
    text = f"{usable} of {os.cpu_count()} usable"
    if limit is not None:
        text += f", the control group allows {limit:g}"
    subject.add("cores", text, {"usable": usable, "all": os.cpu_count(), "control_group": limit})
    if limit is not None and limit < usable:
        found.note(
            f"the control group of this process lets it use {limit:g} cores at a time, and {usable} are usable: ranks "
            "start threads for all of these",
            f"set OMP_NUM_THREADS to {max(1, int(limit))} divided by the trainers of this host",
        )


def _memory(found: Diagnosis, subject: Subject, config: Config) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = available_bytes()
    subject.add("memory", f"{left / _GIB:.1f} of {total / _GIB:.1f} GiB available", {"available": left, "all": total})
    subject.add("shared memory", f"up to {left / _GIB:.1f} GiB", left, "parameters and gradients: memfd, not /dev/shm")
    shm = Path("/dev/shm")
    status = os.statvfs(shm) if shm.is_dir() else None
    shm_bytes = 0 if status is None else status.f_bavail * status.f_frsize
    subject.add("/dev/shm", f"{shm_bytes / _MIB:.0f} MiB free", shm_bytes, "batches of workers of a validation")
    if shm_bytes < _LITTLE_SHM_BYTES:
        found.note(
            f"/dev/shm has {shm_bytes / _MIB:.0f} MiB, which is little for a DataLoader with workers in "
            "validation_source, and for checkpoint.memory_every; training.loader_workers needs little of it",
            "enlarge it (docker run --shm-size 1g, or an emptyDir of medium Memory)",
        )


def _gpus(found: Diagnosis, subject: Subject, config: Config, environ: Environ) -> None:
    names = [torch.cuda.get_device_name(i) for i in range(num_gpus())]
    subject.add("GPUs", ", ".join(f"{count} x {name}" for name, count in Counter(names).items()) or "none", names)
    given = allocated_gpus(environ)
    if given[0]:
        subject.add("GPUs of the job", str(given[0]), given[0])
    try:
        require_visible_gpus(config, given, len(names))
    except UnsupportedConfiguration as error:
        found.refusal(error)


def _name_lookup(found: Diagnosis, subject: Subject) -> None:
    # /etc/hosts rarely has a name for this form of the address.
    address = ("::ffff:127.0.0.1", 0)
    started = time.monotonic()
    with suppress(DeadlineExceeded, OSError):  # there is no name: what counts is how long it takes to learn that
        call_with_timeout(_LOOKUP_S, "the lookup", lambda: socket.getnameinfo(address, socket.NI_NUMERICSERV))
    took_s = time.monotonic() - started
    text = f"over {_LOOKUP_S:g} s" if took_s >= _LOOKUP_S else f"{took_s:.2g} s"
    subject.add("name of an address", text, took_s, "of a connection, asked of a name server")
    if took_s >= _SLOW_LOOKUP_S:
        found.note(
            f"a name server answers late or not at all: to look up the name of an address took {text}; a start waits "
            "for names of hosts that are not in /etc/hosts",
            "correct /etc/resolv.conf, or name rank 0 by its address",
        )


def _limits(found: Diagnosis, subject: Subject, world_size: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_OF_A_PROCESS + FILES_OF_A_RANK * world_size
    texts = [str(n) if n != resource.RLIM_INFINITY else "no limit" for n in (soft, hard)]
    subject.add("open files", f"{texts[0]} (ulimit -n), at most {texts[1]}", {"soft": soft, "hard": hard})
    if soft != resource.RLIM_INFINITY and soft < needed:
        found.problem(
            f"a process may open {soft} files, and rank 0 of {world_size} ranks opens up to about {needed}",
            f"ulimit -n {needed}, or LimitNOFILE of the service that starts the ranks",
        )


def _clock(found: Diagnosis, subject: Subject) -> None:
    source = read_text(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")).strip()
    subject.add("clock", source or "unknown")
    if source in _SLOW_CLOCKS:
        found.note(
            f"the kernel reads the time from {source}, which is slow; every step reads it several times",
            "select a faster source (clocksource=tsc), if the hardware has one",
        )


def _launcher(subject: Subject, environ: Environ) -> None:
    names = dict.fromkeys(name for environment in ENVIRONMENTS for name in environment.variables.values())
    variables = {name: environ[name] for name in names if name in environ}
    subject.add("launcher", ", ".join(f"{name}={text}" for name, text in variables.items()) or "none", variables)


def _folders(found: Diagnosis, subject: Subject, config: Config) -> None:
    run_dir = Path(config.logging.run_dir)
    for name, folder in (("run folder", run_dir), ("temporary files", Path(tempfile.gettempdir()))):
        # A file in the place of a folder, or a link to nothing, is there too: no folder can be made in it.
        existing = next((one for one in (folder, *folder.absolute().parents) if os.path.lexists(one)), Path("/"))
        try:
            free = os.statvfs(existing)
            with tempfile.TemporaryDirectory(dir=existing, prefix=".doctor-") as probe:
                atomic_write_text(Path(probe) / "file", "written\n")
                with RunDir(Path(probe)).lock():  # as rank 0 does; some network file systems have no locks
                    pass
        except (OSError, UnsupportedConfiguration) as error:
            reason = str(getattr(error, "strerror", None) or error)
            subject.add(name, f"{folder}: {reason}", {"path": str(folder), "writable": False})
            found.problem(
                f"{folder} cannot be written to ({reason})",
                "set logging.run_dir to a folder of yours" if folder is run_dir else "set TMPDIR to a folder of yours",
            )
            continue
        free_bytes = free.f_bavail * free.f_frsize
        subject.add(
            name,
            f"{folder}: {'writable' if existing == folder else 'can be made'}, {free_bytes / _GIB:.1f} GiB free",
            {"path": str(folder), "writable": True, "free": free_bytes},
        )
        if free_bytes < _LITTLE_DISK_BYTES:
            found.note(f"{folder} has {free_bytes / _MIB:.0f} MiB free", "remove old runs, or choose another disk")


def check_rpc_agent(found: Diagnosis, config: Config) -> None:
    """Start an RPC agent as server 0 does, on the interface that was bound, if the mode has servers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # With too few open files, which is a problem by itself, TensorPipe aborts the process.
    too_few = soft != resource.RLIM_INFINITY and soft < FILES_OF_A_PROCESS
    if too_few or not mode_of(config).has_servers:
        return
    from paramserver.distributed.session import rpc_server

    identity = ProcessIdentity(0, 1, 0, 1, 0, "127.0.0.1", 0, False, "doctor", "flags")
    rendezvous = Rendezvous(HashStore(), identity, _AGENT_S, host_identity())

    def start() -> None:
        with rpc_server(rendezvous):
            pass

    try:
        call_with_timeout(_AGENT_S, "the start of an RPC agent", start)
    except (DeadlineExceeded, RuntimeError) as error:
        found.problem(
            f"an RPC agent does not start here: {str(error).splitlines()[0]}",
            "choose another cluster.interface; a sandbox must allow sockets",
        )


# What a config chooses.


_NAME_POLL_S = 0.2


def describe_choices(found: Diagnosis, config: Config, identity: ProcessIdentity | None, environ: Environ) -> str:
    """Add what would be chosen for a run of ``config``, and bind the interface that it would listen on.

    Return the address at which other hosts reach this one; empty if there is none. Without ``identity`` (None) one
    command starts all ranks on this machine.
    """
    subject = Subject("choices")
    found.subjects.append(subject)
    mode, servers, trainers = mode_of(config), num_servers_of(config), num_trainers_of(config)
    counts = plural(trainers, "trainer")
    counts = f"{plural(servers, 'server')} and {counts}" if servers else counts
    subject.add("mode", f"{config.mode}: {counts}", config.mode, mode.summary)
    if identity is None:
        subject.add(
            "started by", "one command, on this host", "supervisor", "neither a flag nor a launcher gives a rank"
        )
    else:
        where = (
            f"rank {identity.global_rank} of {identity.world_size}, {identity.local_world_size} of them on this host"
        )
        why = environment_class(identity.source).known_by
        subject.add("started by", f"{identity.source}: {where}", identity.source, why)
    address = "" if mode.single_process else _address(found, subject, config, identity)
    _devices(found, subject, config, identity)
    _transport(subject, config, identity)
    _threads(subject, config, identity, environ)
    for line in loss_lines(config, None if identity is None else identity.source):
        # What follows from a loss; the limits of the waits for one are in the subject "deadlines".
        if match := re.fullmatch(r"  a (lost \w+)(?: \((.+?)\))?: (.+)", line):
            subject.add(match[1], match[3], why=match[2] or "")
    return address


def _address(found: Diagnosis, subject: Subject, config: Config, identity: ProcessIdentity | None) -> str:
    host, port = _rank_0(subject, config, identity)
    if identity is not None and not _wait_for_name(found, config, identity):
        return ""
    try:
        address = _interface(subject, config, host)
    except UnsupportedConfiguration as error:
        found.refusal(error)
        return ""
    if identity is None:
        try:
            bind_listener(host, port).close()
        except UnsupportedConfiguration as error:
            found.refusal(error)
    is_open = identity is None or (identity.global_rank == 0 and identity.token is None)
    if is_open and not is_loopback(host):
        found.note(
            f"rank 0 at {host} answers every process that reaches it, as there is no job token",
            "set cluster.token_file, or PARAMSERVER_TOKEN",
        )
    return address


def _rank_0(subject: Subject, config: Config, identity: ProcessIdentity | None) -> tuple[str, int]:
    """Add where rank 0 is, and return its host and port."""
    if identity is None:
        host, port = config.cluster.master_addr, config.cluster.master_port
        why = "cluster.master_port is 0: a free port" if port == 0 else "cluster.master_port"
    else:
        host, port = identity.master_addr, identity.master_port
        why = f"from {identity.source} or the config; rank 0 serves the store there"
        if identity.store_is_hosted:
            why = f"{identity.source} serves the store there"
    subject.add("rank 0", f"{host}:{port or '<free>'}", {"host": host, "port": port}, why)
    return host, port


def _interface(subject: Subject, config: Config, host: str) -> str:
    """Choose the interface that reaches ``host``, add it, and return its address.

    Raises:
        UnsupportedConfiguration: ``cluster.interface`` is not one of this host, or has no address.
    """
    choose_interface(process_environ(), config.cluster.interface, host)
    interface = chosen_interface(process_environ())
    address = own_address(host, interface)
    if config.cluster.interface:
        why = "cluster.interface"
    elif is_loopback(host):
        why = "all ranks are on this host"
    else:
        why = f"this host reaches {host} over it" if interface else f"no route to {host} has a known interface"
    text = f"{interface or 'torch chooses'}, address {address}"
    subject.add("interface", text, {"name": interface, "address": address}, why)
    return address


def _wait_for_name(found: Diagnosis, config: Config, identity: ProcessIdentity) -> bool:
    """Wait for as long as a run does until the host of rank 0 is known here; return whether it is."""
    host, limit_s = identity.master_addr, config.cluster.timeout_s
    if not why_unknown(host):
        return True
    print(f"waiting up to {limit_s:g} s for the name {host}, as a run does", file=sys.stderr, flush=True)
    known = poll_until(
        time.monotonic() + limit_s, lambda: None if why_unknown(host) else True, threading.Event(), _NAME_POLL_S
    )
    if known is None:
        found.problem(
            f"{identity.name()} found no {identity.name(0)} at {host_and_port(host, identity.master_port)} within "
            f"cluster.timeout_s ({limit_s:g} s){why_unknown(host)}",
            f"start {identity.name(0)}, or correct --master_addr and --master_port",
        )
    return bool(known)


def _devices(found: Diagnosis, subject: Subject, config: Config, identity: ProcessIdentity | None) -> None:
    ranks = roles(config, world_size_of(config))
    try:
        if identity is not None:
            own = place_rank(identity, ranks, config)
            placements = {str(ranks[identity.global_rank]): own}
        else:
            trainers = sum(role.kind == "trainer" for role in ranks)
            placements = {
                str(role): place_server(config)
                if role.trainer_index is None
                else place_trainer(config, role.trainer_index, trainers)
                for role in ranks
            }
    except UnsupportedConfiguration as error:
        found.refusal(error)
        return
    texts = {name: ", ".join(map(str, placement.devices)) for name, placement in placements.items()}
    kinds = Counter(texts.values())
    text = f"all on {next(iter(kinds))}" if len(kinds) == 1 else ", ".join(f"{k} on {v}" for k, v in texts.items())
    subject.add("devices", text, texts, f"device.kind is {config.device.kind}, device.server {config.device.server}")
    backend = next(iter({placement.backend for placement in placements.values()} - {"gloo"}), "gloo")
    if mode_of(config).has_process_group:
        subject.add(
            "backend", backend, why=f"cluster.backend is {config.cluster.backend}; nccl needs a GPU per trainer"
        )


def _transport(subject: Subject, config: Config, identity: ProcessIdentity | None) -> None:
    """How parameters and gradients are exchanged."""
    mode, server = mode_of(config), config.server
    messages = f"{'TCP' if server.connects else 'RPC'}, in {server.wire_dtype or 'the type of the parameters'}"
    if not mode.has_servers:
        if mode.has_process_group:
            text = "shared memory where all ranks are on one host, else " if config.ddp.shared_memory == "auto" else ""
            subject.add("transport", f"{text}all-reduce by DistributedDataParallel", why=f"mode is {config.mode}")
        return
    if server_computes(config):
        text, why = "inputs and outputs over RPC", "server.compute is server"
    elif not server.shares_memory:
        text, why = messages, f"server.transport is {server.transport}"
    elif identity is None:
        text, why = "shared memory", f"server.transport is {server.transport}, and all ranks are on this host"
    else:
        text = "shared memory on the servers' host"
        text += "" if server.must_share_memory else f", elsewhere {messages}"
        why = f"server.transport is {server.transport}; the check between hosts shows which"
    subject.add("transport", text, why=why)


def _threads(subject: Subject, config: Config, identity: ProcessIdentity | None, environ: Environ) -> None:
    if identity is None:
        here = num_trainers_of(config)
    else:
        ranks = roles(config, world_size_of(config))
        here = sum(ranks[rank].kind == "trainer" for rank in identity.ranks_here)
    threads = child_environment(environ, num_trainers=max(1, here))["OMP_NUM_THREADS"]
    if "OMP_NUM_THREADS" in environ:
        subject.add(
            "threads", f"{threads} per rank", int(threads) if threads.isdecimal() else threads, "OMP_NUM_THREADS"
        )
    elif identity is None:
        subject.add("threads", f"{threads} per rank", int(threads), f"the cores divided by {plural(here, 'trainer')}")
    else:
        subject.add("threads", "torch's default", why=f"OMP_NUM_THREADS is not set; {threads} would divide the cores")
    if is_colocated(config):
        subject.add("co-location", "each server starts the trainer of its host", why="cluster.colocate")


def describe_deadlines(found: Diagnosis, config: Config) -> None:
    """Add the limits of the waits of a run of ``config``."""
    if mode_of(config).single_process:
        return
    subject = Subject("deadlines")
    found.subjects.append(subject)
    for name, (seconds, text) in Deadlines.of(config).texts().items():
        subject.add(f"{seconds:g} s", text, seconds, key=name)

"""What a run of a config would choose on this machine, and why; and the limits of its waits."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import Counter

from paramserver.cluster import (
    ProcessIdentity,
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
from paramserver.cluster.resolve import environment_class
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
from paramserver.devices import place_server, place_trainer
from paramserver.distributed.rendezvous import why_unknown
from paramserver.distributed.timeouts import poll_until
from paramserver.errors import UnsupportedConfiguration
from paramserver.runtime.dry_run import loss_lines
from paramserver.runtime.rank import place_rank
from paramserver.tools.doctor.diagnosis import Diagnosis, Section
from paramserver.tools.report.formatting import plural

_NAME_POLL_S = 0.2


def describe_choices(found: Diagnosis, config: Config, identity: ProcessIdentity | None, environ: Environ) -> str:
    """Add what would be chosen for a run of ``config``, and bind the interface that it would listen on.

    Return the address at which other hosts reach this one; empty if there is none. Without ``identity`` (None) one
    command starts all ranks on this machine.
    """
    section = Section("choices")
    found.sections.append(section)
    mode, servers, trainers = mode_of(config), num_servers_of(config), num_trainers_of(config)
    counts = plural(trainers, "trainer")
    counts = f"{plural(servers, 'server')} and {counts}" if servers else counts
    section.add("mode", f"{config.mode}: {counts}", config.mode, mode.summary)
    if identity is None:
        section.add(
            "started by", "one command, on this host", "supervisor", "neither a flag nor a launcher gives a rank"
        )
    else:
        where = (
            f"rank {identity.global_rank} of {identity.world_size}, {identity.local_world_size} of them on this host"
        )
        why = environment_class(identity.source).known_by
        section.add("started by", f"{identity.source}: {where}", identity.source, why)
    address = "" if mode.single_process else _address(found, section, config, identity)
    _devices(found, section, config, identity)
    _transport(section, config, identity)
    _threads(section, config, identity, environ)
    for line in loss_lines(config, None if identity is None else identity.source):
        # What follows from a loss; the limits of the waits for one are in the section "deadlines".
        if match := re.fullmatch(r"  a (lost \w+)(?: \((.+?)\))?: (.+)", line):
            section.add(match[1], match[3], why=match[2] or "")
    return address


def _address(found: Diagnosis, section: Section, config: Config, identity: ProcessIdentity | None) -> str:
    host, port = _rank_0(section, config, identity)
    if identity is not None and not _wait_for_name(found, config, identity):
        return ""
    try:
        address = _interface(section, config, host)
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


def _rank_0(section: Section, config: Config, identity: ProcessIdentity | None) -> tuple[str, int]:
    """Add where rank 0 is, and return its host and port."""
    if identity is None:
        host, port = config.cluster.master_addr, config.cluster.master_port
        why = "cluster.master_port is 0: a free port" if port == 0 else "cluster.master_port"
    else:
        host, port = identity.master_addr, identity.master_port
        why = f"from {identity.source} or the config; rank 0 serves the store there"
        if identity.store_is_hosted:
            why = f"{identity.source} serves the store there"
    section.add("rank 0", f"{host}:{port or '<free>'}", {"host": host, "port": port}, why)
    return host, port


def _interface(section: Section, config: Config, host: str) -> str:
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
    section.add("interface", text, {"name": interface, "address": address}, why)
    return address


def _wait_for_name(found: Diagnosis, config: Config, identity: ProcessIdentity) -> bool:
    """Wait for as long as a run does until the host of rank 0 is known here; return whether it is, or need not be."""
    host, limit_s = identity.master_addr, config.cluster.timeout_s
    if (identity.global_rank == 0 and not identity.store_is_hosted) or not why_unknown(host):
        return True  # rank 0 itself does not wait for its name
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


def _devices(found: Diagnosis, section: Section, config: Config, identity: ProcessIdentity | None) -> None:
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
    section.add("devices", text, texts, f"device.kind is {config.device.kind}, device.server {config.device.server}")
    backend = next(iter({placement.backend for placement in placements.values()} - {"gloo"}), "gloo")
    if mode_of(config).has_process_group:
        section.add(
            "backend", backend, why=f"cluster.backend is {config.cluster.backend}; nccl needs a GPU per trainer"
        )


def _transport(section: Section, config: Config, identity: ProcessIdentity | None) -> None:
    """How parameters and gradients are exchanged."""
    mode, server = mode_of(config), config.server
    wire = f"in {server.wire_dtype or 'the type of the parameters'}"
    if not mode.has_servers:
        if mode.has_process_group:
            text = "shared memory where all ranks are on one host, else " if config.ddp.shared_memory == "auto" else ""
            section.add("transport", f"{text}all-reduce by DistributedDataParallel", why=f"mode is {config.mode}")
        return
    if server_computes(config):
        text, why = "inputs and outputs over RPC", "server.compute is server"
    elif not server.shares_memory:
        text, why = f"RPC, {wire}", f"server.transport is {server.transport}"
    elif identity is None:
        text, why = "shared memory", f"server.transport is {server.transport}, and all ranks are on this host"
    else:
        text = "shared memory on the servers' host"
        text += "" if server.must_share_memory else f", elsewhere RPC, {wire}"
        why = f"server.transport is {server.transport}; the check between hosts shows which"
    section.add("transport", text, why=why)


def _threads(section: Section, config: Config, identity: ProcessIdentity | None, environ: Environ) -> None:
    if identity is None:
        here = num_trainers_of(config)
    else:
        first = identity.global_rank - identity.local_rank
        ranks = roles(config, world_size_of(config))[first : first + identity.local_world_size]
        here = sum(role.kind == "trainer" for role in ranks)
    threads = child_environment(environ, num_trainers=max(1, here))["OMP_NUM_THREADS"]
    if "OMP_NUM_THREADS" in environ:
        section.add(
            "threads", f"{threads} per rank", int(threads) if threads.isdecimal() else threads, "OMP_NUM_THREADS"
        )
    elif identity is None:
        section.add("threads", f"{threads} per rank", int(threads), f"the cores divided by {plural(here, 'trainer')}")
    else:
        section.add("threads", "torch's default", why=f"OMP_NUM_THREADS is not set; {threads} would divide the cores")
    if is_colocated(config):
        section.add("co-location", "each server starts the trainer of its host", why="cluster.colocate")


def describe_deadlines(found: Diagnosis, config: Config) -> None:
    """Add the limits of the waits of a run of ``config``."""
    if mode_of(config).single_process:
        return
    section = Section("deadlines")
    found.sections.append(section)
    for name, (seconds, text) in Deadlines.of(config).texts().items():
        section.add(f"{seconds:g} s", text, seconds, key=name)

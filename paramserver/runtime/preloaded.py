"""Processes that have imported what a rank needs, and the two ends of the socket that gives them its role."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from paramserver.importing import torch_import_without_gc
from paramserver.process_utils import OWN_GROUP, die_with_parent, show_arguments

MODULES = (
    "paramserver.runtime.rank",
    "paramserver.server.parameter_server",
    "paramserver.server.model_service",
    "paramserver.server.shard_process",
    "paramserver.transport.segments",
    "paramserver.trainers.ddp",
    "paramserver.trainers.ddp_control",
    "paramserver.trainers.local",
    "paramserver.trainers.rpc",
    "paramserver.trainers.server_forward",
    "numpy.random",
    "torch._dynamo",
    "torch.distributed.rpc.rref_proxy",
    "torch.nn.parallel",
    "torch.profiler",
    "encodings.idna",
)
"""What a rank imports until its first step. torch imports its compiler when the first optimizer is built."""

_COMMAND = (sys.executable, "-m", "paramserver.launch")

_MAX_MESSAGE_BYTES = 1 << 20
_MAX_DESCRIPTORS = 4


def start_importing(
    flag: str, environ: Mapping[str, str], log_file: Path
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start ``paramserver.launch FLAG DESCRIPTOR``; return the process, and the socket to it.

    Args:
        flag: with which the process calls ``import_modules`` and waits for roles.
        environ: of the process.
        log_file: receives its output until it has a role.
    """
    link, child_link = socket.socketpair()
    with child_link, log_file.open("ab") as output:
        try:
            process = subprocess.Popen(
                # Long enough for ``show_arguments`` to put a rank there.
                [*_COMMAND, flag, f"{child_link.fileno():010d}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[child_link.fileno()],
                env=dict(environ),
                **OWN_GROUP,
            )
        except BaseException:
            link.close()
            raise
    return process, link


def send_role(link: socket.socket, arguments: Sequence[str], descriptors: Sequence[int]) -> None:
    """Send what ``receive_role`` returns."""
    socket.send_fds(link, [json.dumps(list(arguments)).encode() + b"\n"], list(descriptors))


def role_arguments(config: int, pipe: int, listener: int | None = None) -> list[str]:
    """Return the arguments of ``paramserver.launch`` that name descriptors of the rank's process.

    Args:
        config: a file with the config.
        pipe: the writing end of the event pipe.
        listener: the socket of rank 0's store.
    """
    arguments = ["--config", f"/dev/fd/{config}", "--supervised", str(pipe)]
    return arguments if listener is None else [*arguments, "--listener", str(listener)]


def import_modules() -> None:
    """Import what a rank needs, and no module of the user's. The process ends with its parent from here on."""
    die_with_parent()
    with torch_import_without_gc():
        for name in MODULES:
            import_module(name)
        if find_spec("tensorboard") is not None:
            import_module("torch.utils.tensorboard")


def receive_role(link: socket.socket) -> tuple[list[str], list[int]] | None:
    """Wait for the arguments and descriptors of a role; None if the supervisor has closed the socket, or is gone."""
    message, descriptors, _, _ = socket.recv_fds(link, _MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    while not message.endswith(b"\n"):
        chunk = link.recv(_MAX_MESSAGE_BYTES) if message else b""
        if not chunk:
            return None
        message += chunk
    return json.loads(message), descriptors


def assume_role(arguments: Sequence[str], descriptors: Sequence[int]) -> list[str]:
    """Return the arguments of the rank to be. Standard output and error go to its log from here on."""
    output, *others = descriptors
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    show_arguments(arguments[:2])
    return [*arguments, *role_arguments(*others)]

"""Starts runs by fork instead of exec: real ranks, without the 3 to 4 seconds in which each imports torch.

The fork server is a process that has imported everything a rank needs and has used none of it. A run starts as under
``python -m paramserver.launch``: the fork server forks a supervisor, and the supervisor forks its ranks in place of
``subprocess.Popen``. Tests of the command line itself start fresh interpreters instead.
"""

import contextlib
import ctypes
import fcntl
import gc
import itertools
import json
import multiprocessing.util
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import fast_disk

from paramserver.config.modes import MODES
from paramserver.runtime.preloaded import MODULES

READY = b"ready"
SHORT_LIFE = "TEST_SHORT_LIFE_S"
"""Ranks that live for less than so many seconds start again with a delay; 0: all ranks start again at once."""
FORKED_LOADER = "TEST_FORKED_LOADER"
"""The first process that a rank of these runs spawns, the loader of its workers, is a fork too (``LoaderToBe``)."""
FORKED_TRAINER = "TEST_FORKED_TRAINER"
"""The first trainer that the server of a host starts (``cluster.colocate``) is a fork too (``TrainerToBe``)."""
PRELOADED = (
    "paramserver.tools.chaos.command",
    "paramserver.launch",
    "paramserver.evaluate",
    "paramserver.predict",
    "paramserver.runtime.supervisor",
    "paramserver.tools.bench.processes",
    "paramserver.metrics.console",
    *MODULES,
    *(name for mode in MODES.values() for name in mode.modules),
)


class ForkServer:
    """The process that runs are forked from, as the tests see it. A context manager.

    Args:
        environ: the environment in which torch is imported, and that of every run that names none.
        modules: to import in addition.
    """

    def __init__(self, environ, modules=()):
        self.environ = environ
        self.modules = modules
        self._numbers = itertools.count()

    def __enter__(self):
        self.socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_socket:
            command = [sys.executable, __file__, str(child_socket.fileno()), *self.modules]
            self.process = subprocess.Popen(command, pass_fds=[child_socket.fileno()], env=self.environ)
        self.socket.settimeout(150)
        assert self.socket.recv(100) == READY
        return self

    def __exit__(self, *exception):
        self.socket.close()
        self.process.wait(30)

    def start(self, arguments, folder, environ=None, program="launch", function="main", host=None, output=None):
        """Start ``paramserver.<program>.<function>`` with these arguments in ``folder``; any thread may call this.

        With ``host``, the process that holds one (see hosts.py), it runs there; ``output`` is a file as seen here.
        """
        reading, writing = os.pipe()
        output = output or folder / f"output-{next(self._numbers)}"
        request = {
            "program": program,
            "function": function,
            "arguments": [str(argument) for argument in arguments],
            "folder": str(folder),
            "output": str(output),
            "environ": self.environ if environ is None else environ,
            "host": host,
        }
        socket.send_fds(self.socket, [json.dumps(request).encode()], [writing])
        os.close(writing)
        return ForkedRun(reading, output)

    def run(self, arguments, folder, timeout_s=150, environ=None, program="launch"):
        """``start`` and wait for the end; return the exit code and the output."""
        with self.start(arguments, folder, environ, program) as run:
            return run.wait(timeout_s), run.output.read_text()


_lock = threading.Lock()
_shared = None


def shared_server(environ):
    """The fork server of this process, which the first call starts with ``environ``."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = ForkServer(environ).__enter__()
        return _shared


def close_shared_server():
    global _shared
    with _lock:
        if _shared is not None:
            _shared.__exit__()
            _shared = None


class ForkedRun:
    """A started run. A context manager, which kills what is left of the run.

    Attributes:
        pid: of the supervisor, which leads a session with all of its ranks.
        output: the file with what the supervisor prints.
    """

    def __init__(self, reading, output):
        self.output = output
        self._reading = reading
        self.pid = int(self._read_line(150))

    def _read_line(self, timeout_s):
        """The next line that the supervisor writes; an empty one if it died."""
        deadline, line = time.monotonic() + timeout_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._reading, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                assert selector.select(max(deadline - time.monotonic(), 0)), f"no end in {timeout_s} s: {self._text()}"
                if not (byte := os.read(self._reading, 1)):
                    break
                line += byte
        return line.decode().strip()

    def _text(self):
        return self.output.read_text() if self.output.exists() else "no output"

    def wait(self, timeout_s=150):
        """The exit code; None if the supervisor was killed."""
        line = self._read_line(timeout_s)
        return int(line) if line else None

    def join(self, timeout_s=150):
        """After ``wait``: wait until the process has ended, and so has closed its ports."""
        self._read_line(timeout_s)

    def kill(self):
        """Send SIGKILL to the supervisor and all ranks: to every process of its session."""
        for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == self.pid:
                    os.kill(pid, signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.kill()
        os.close(self._reading)


# Inside the fork server and its children.

# The interpreter's own: without this script's folder and PYTHONPATH.
_foreign = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
base_path = [folder for folder in sys.path if folder not in _foreign]


class NoForkServer:
    """In place of the supervisor's own fork server, which would import torch first."""

    failed = False

    def __init__(self, *arguments):
        pass

    def fork(self, *arguments):
        """Return None: the supervisor starts a process, by ``ForkedRank``."""

    def close(self):
        pass


class ForkedRank:
    """What the supervisor needs of ``subprocess.Popen``, for a rank that is a fork of it."""

    def __init__(self, command, *, stdin, stdout, stderr, pass_fds, env, **own_group):
        assert command[1:3] == ["-m", "paramserver.launch"]
        self.pid = os.fork()
        if self.pid == 0:
            run_rank(command[3:], stdout.fileno(), pass_fds, env)
        # A group of its own, but not a session: ``ForkedRun.kill`` finds all processes by that of the supervisor.
        os.setpgid(self.pid, self.pid)

    def wait(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class LoaderToBe:
    """In place of ``multiprocessing.util.spawnv_passfds``: the process that reads a data set for worker processes.

    It is forked while the rank has no threads, waits for what a new interpreter would be started with, and imports no
    torch. A second one of this rank is a new interpreter, as all are in tests/unit/sources.
    """

    def __init__(self):
        os.setpgid(0, 0)  # as the supervisor does, so that the loader is in the group of its rank
        rank = os.getpid()
        self._link, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._spawn, multiprocessing.util.spawnv_passfds = multiprocessing.util.spawnv_passfds, self
        self._pid = os.fork()
        if self._pid == 0:
            self._link.close()
            wait_to_be_loader(rank, link)
        link.close()

    def __call__(self, path, arguments, descriptors):
        if "--multiprocessing-fork" not in arguments:  # the process that tracks shared memory
            return self._spawn(path, arguments, descriptors)
        multiprocessing.util.spawnv_passfds = self._spawn
        numbers = sorted({int(number) for number in descriptors})
        message = json.dumps([[os.fsdecode(argument) for argument in arguments], numbers, dict(os.environ)])
        with self._link:
            socket.send_fds(self._link, [message.encode()], numbers)
        return self._pid


def wait_to_be_loader(rank, link):
    """Be what ``LoaderToBe`` forks until it ends. Does not return."""
    from paramserver import process_utils

    process_utils.die_with_parent(rank, signal.SIGKILL)
    close_descriptors({link.fileno()})
    message, received, _, _ = socket.recv_fds(link, 1 << 16, 16)
    if not message:
        os._exit(0)
    arguments, numbers, environ = json.loads(message)
    # A number may be that of another descriptor that has arrived: all are moved beyond them first.
    received = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 1000) for descriptor in received]
    for descriptor, number in zip(received, numbers, strict=True):
        os.dup2(descriptor, number)
    close_descriptors(set(numbers))
    adopt_environment(environ)
    sys.argv = ["-c", *arguments[arguments.index("-c") + 2 :]]
    try:
        exec(arguments[arguments.index("-c") + 1], {})  # calls multiprocessing.spawn.spawn_main
    finally:
        os._exit(1)


class TrainerToBe:
    """In place of the first ``subprocess.Popen`` of a server that starts the trainer of its host.

    As ``LoaderToBe``: it is forked while the server has no threads, and waits for the arguments. A trainer that is
    started again is a new interpreter.
    """

    def __init__(self):
        from paramserver.runtime import restarts

        self.returncode = None
        self._link, link = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._link.close()
            wait_to_be_trainer(link)
        link.close()
        restarts.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": self})

    def __call__(self, command, *, env, stdin):
        from paramserver.runtime import restarts

        assert command[1:3] == ["-m", "paramserver.launch"]
        restarts.subprocess = subprocess
        with self._link:
            self._link.sendall(json.dumps([command[3:], env]).encode())
        return self

    def poll(self):
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout_s=None):
        if self.poll() is None:
            with os.fdopen(os.pidfd_open(self.pid), "rb", buffering=0) as ends:
                if not select.select([ends], [], [], timeout_s)[0]:
                    raise subprocess.TimeoutExpired("paramserver.launch", timeout_s)
        return self.poll()

    def terminate(self):
        os.kill(self.pid, signal.SIGTERM)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)


def wait_to_be_trainer(link):
    """Be what ``TrainerToBe`` forks until it ends. Does not return."""
    from paramserver import launch, process_utils

    close_descriptors({link.fileno()})
    with link, link.makefile() as message:
        text = message.read()
    if not text:
        os._exit(0)
    arguments, environ = json.loads(text)
    adopt_environment(environ)
    sys.argv = ["paramserver.launch", *arguments]
    process_utils.exit_process(launch.main(arguments))


def close_descriptors(kept):
    """Close all but the standard streams and those ``kept``."""
    for descriptor in sorted(int(link.name) for link in Path("/proc/self/fd").iterdir()):
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def adopt_environment(environ):
    """Make this process see ``environ``, and import as ``python -m`` does: from the current folder and PYTHONPATH."""
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = [str(Path.cwd()), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *base_path]


def run_rank(arguments, output, kept, environ):
    """Be a rank until it ends. Does not return."""
    from paramserver import launch, process_utils

    os.dup2(output, 1)
    os.dup2(output, 2)
    # The supervisor's descriptors do not outlive an exec: no rank may hold the pipe of another one open.
    close_descriptors(kept)
    for number in process_utils.STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    adopt_environment(environ)
    if os.environ.get(FORKED_LOADER):
        LoaderToBe()
    sys.argv = ["paramserver.launch", *arguments]
    process_utils.exit_process(launch.main(arguments))


def enter_host(holder):
    """Move this process to the namespaces of the process ``holder``: network, host name and files."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptors = [os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt")]
    for descriptor in descriptors:
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.close(descriptor)


def run_supervisor(parent, request, status):
    """Be a supervisor until it ends, and write its pid and its exit code to ``status``. Does not return."""
    from paramserver import process_utils
    from paramserver.runtime import restarts, supervisor

    process_utils.die_with_parent(parent)
    os.setsid()
    if request["host"] is not None:
        enter_host(request["host"])
    os.chdir(request["folder"])
    adopt_environment(request["environ"])
    for number in (signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    restarts._SHORT_LIFE_S = float(os.environ.get(SHORT_LIFE, restarts._SHORT_LIFE_S))
    supervisor.subprocess = type("Forking", (), {"Popen": ForkedRank, "DEVNULL": subprocess.DEVNULL})
    supervisor.ForkServer = NoForkServer
    program = import_module(f"paramserver.{request['program']}")
    sys.argv = [program.__name__, *request["arguments"]]
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if os.environ.get(FORKED_TRAINER):
        TrainerToBe()
    os.write(status, f"{os.getpid()}\n".encode())
    code = 1
    try:
        code = getattr(program, request["function"])(request["arguments"])
    except SystemExit as error:  # argparse
        code = error.code
    finally:
        os.write(status, f"{code}\n".encode())
        process_utils.exit_process(code)


def main():
    for name in (*PRELOADED, *sys.argv[2:]):
        import_module(name)
    fast_disk.install()
    # As in a rank that imports torch itself. A collection would also copy every page that this process shares with it.
    gc.freeze()
    # A fork has only the thread that called it; whatever another thread holds stays locked in the child for ever.
    assert len(list(Path("/proc/self/task").iterdir())) == 1

    own, link = os.getpid(), socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(link.fileno(), False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors report their ends through their pipes
    link.send(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(link, 1 << 16, 1)
        if not message:
            return
        if os.fork() == 0:
            link.close()
            run_supervisor(own, json.loads(message), descriptors[0])
        os.close(descriptors[0])


if __name__ == "__main__":
    main()

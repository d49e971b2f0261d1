"""Runs whose processes are forked from one that has imported everything: real ranks, without their seconds of start.

A run is started as by ``python -m paramserver.launch``, supervisor and all; only its processes are made by fork in
place of exec. What is forked has imported torch and used nothing of it.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

READY = b"ready"


class Nest:
    """The process that runs are forked from, seen from the tests. A context manager."""

    def __init__(self, environ):
        self.environ = environ

    def __enter__(self):
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=self.environ)
        self.socket.settimeout(60)
        assert self.socket.recv(100) == READY
        return self

    def __exit__(self, *exception):
        self.socket.close()
        self.process.wait(30)

    def start(self, arguments, folder):
        """Start ``paramserver.launch`` with these arguments in ``folder``."""
        reading, writing = os.pipe()
        output = folder / f"output-{len(list(folder.glob('output-*')))}"
        request = {"arguments": [str(a) for a in arguments], "folder": str(folder), "output": str(output)}
        socket.send_fds(self.socket, [json.dumps(request).encode()], [writing])
        os.close(writing)
        return Hatched(reading, output)

    def run(self, arguments, folder, timeout_s=60):
        """The same to its end: exit code and output."""
        with self.start(arguments, folder) as hatched:
            return hatched.wait(timeout_s), hatched.output.read_text()


class Hatched:
    """A run that was started: the supervisor's pid, which leads a session of its own, and its end."""

    def __init__(self, reading, output):
        self.output = output
        self._reading = reading
        self.pid = int(self._line(30))

    def _line(self, timeout_s):
        """The next word; an empty one after a death without a word."""
        deadline, word = time.monotonic() + timeout_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._reading, selectors.EVENT_READ)
            while not word.endswith(b"\n"):
                assert selector.select(max(deadline - time.monotonic(), 0)), f"too slow: {self._said()}"
                if not (piece := os.read(self._reading, 1)):
                    break
                word += piece
        return word.decode().strip()

    def _said(self):
        return self.output.read_text() if self.output.exists() else "nothing was said"

    def wait(self, timeout_s=60):
        """The exit code; None where it was killed."""
        word = self._line(timeout_s)
        return int(word) if word else None

    def kill(self):
        """kill -9 of the supervisor and of all its ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.kill()
        os.close(self._reading)


# Inside the process that is forked from.


class Forked:
    """What the supervisor needs of ``subprocess.Popen``, for a rank that is a fork."""

    def __init__(self, command, *, stdin, stdout, stderr, pass_fds, env):
        assert command[1:3] == ["-m", "paramserver.launch"]
        self.returncode = None
        self.pid = os.fork()
        if self.pid == 0:
            become(command[3:], stdout.fileno(), pass_fds, env)

    def poll(self):
        return self.returncode if self.returncode is not None else self._wait(os.WNOHANG)

    def wait(self):
        return self.returncode if self.returncode is not None else self._wait(0)

    def _wait(self, options):
        try:
            pid, status = os.waitpid(self.pid, options)
        except ChildProcessError:  # the other thread of the supervisor has just seen it
            while self.returncode is None:
                os.sched_yield()
            return self.returncode
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


def become(arguments, output, kept, environ=None):
    """Be a process of the command line from here on."""
    from paramserver import launch
    from paramserver.process_utils import exit_process

    os.dup2(output, 1)
    os.dup2(output, 2)
    for descriptor in sorted(int(link.name) for link in Path("/proc/self/fd").iterdir()):
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    if environ is not None:
        os.environ.clear()
        os.environ.update(environ)
    sys.argv = ["paramserver.launch", *arguments]
    exit_process(launch.main(arguments))


def hatch(request, told):
    """In a fork: a supervisor, which tells its pid and its exit code."""
    from paramserver import launch, process_utils
    from paramserver.runtime import supervisor

    process_utils.die_with_parent()
    os.setsid()
    os.chdir(request["folder"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    supervisor.subprocess = type("Forking", (), {"Popen": Forked, "DEVNULL": subprocess.DEVNULL})
    sys.argv = ["paramserver.launch", *request["arguments"]]
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.write(told, f"{os.getpid()}\n".encode())
    code = 1
    try:
        code = launch.main(request["arguments"])
    finally:
        os.write(told, f"{code}\n".encode())
        process_utils.exit_process(code)


def main():
    for name in ("paramserver.launch", "paramserver.runtime.rank", "paramserver.runtime.supervisor", "trainers.rpc"):
        import_module(name)

    link = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(link.fileno(), False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the supervisors but through their pipes
    link.send(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(link, 1 << 16, 1)
        if not message:
            return
        if os.fork() == 0:
            link.close()
            hatch(json.loads(message), descriptors[0])
        os.close(descriptors[0])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()

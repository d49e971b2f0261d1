"""The client and the subscriber in C with the interface of those in Python, in a process with address sanitizer."""

import atexit
import functools
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np
import psutil

from paramserver.errors import ClientError, RunOver
from paramserver.online.weights import Version

CLIENTS = Path(__file__).parents[2] / "examples" / "clients"
SANITIZED = "-g -O1 -Werror -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
_DEADLINE_S = 120
_NONE = 4  # the status PS_NONE
_building = threading.Lock()


@functools.cache
def missing(fortran=False):
    """What the clients need and this machine lacks, by the names of Debian's packages; None = nothing."""
    absent = [package for package, program in (("gcc", "cc"), ("make", "make")) if shutil.which(program) is None]
    if not absent:
        done = subprocess.run(["cc", "-E", "-"], input="#include <zmq.h>", capture_output=True, text=True, check=False)
        absent += ["libzmq3-dev"] if done.returncode else []
    if fortran and shutil.which("gfortran") is None:
        absent.append("gfortran")
    return f"{', '.join(absent)} not installed: the clients in other languages are not built" if absent else None


@functools.cache
def build_folder():
    folder = tempfile.mkdtemp(prefix="clients-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def build(target):
    """Build ``heat``, ``heat_fortran``, ``watch`` or a driver of this folder with sanitizers; returns the program."""
    with _building:
        return _build(target)


@functools.cache
def _build(target):
    folder = build_folder()
    is_driver = target.endswith("_driver")
    goal = "ps_client.o" if is_driver else target
    _run("make", "-C", CLIENTS, f"BUILD={folder}", f"CFLAGS={SANITIZED}", folder / goal)
    if is_driver:
        source = Path(__file__).with_name(f"{target}.c")
        flags = ["-std=c99", "-Wall", "-Wextra", *SANITIZED.split(), f"-I{CLIENTS / 'c'}"]
        _run("cc", *flags, "-o", folder / target, source, folder / goal, "-lzmq")
    return folder / target


def _run(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr


class _Driver:
    """A process that makes the calls that it is sent. ``program`` is its target of ``build``."""

    program: str

    def __init__(self):
        self._process = subprocess.Popen(
            [build(self.program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def connected_ports(self):
        """The remote ports of its TCP connections that have not ended here."""
        return {one.raddr.port for one in psutil.Process(self._process.pid).net_connections("tcp") if one.raddr}

    def _ask(self, *words, body=b""):
        """Make a call; returns the words of the first line of the answer."""
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n" + body)
        self._process.stdin.flush()
        answer = self._process.stdout.readline().decode(errors="replace")
        assert answer, self._process.stderr.read().decode()
        return answer.split(" ")

    def free(self):
        """End the process; returns what it wrote to stderr. A report of a sanitizer is an error."""
        out, err = self._process.communicate(b"free\n", timeout=_DEADLINE_S)
        assert (self._process.returncode, out) == (0, b""), err.decode()
        self.log = err.decode()
        return self.log

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self._process.returncode is None:
            self.free()


def prepare(kind):
    """Build the program of a client or subscriber in C, before a run or a deadline waits for its first message.

    On a busy machine the compiler takes longer than these. Does nothing for one in Python.
    """
    if issubclass(kind, _Driver):
        build(kind.program)


class CClient(_Driver):
    """As ``Client``, by a process that makes the calls. It ends at ``close`` or at the end of ``with``."""

    program = "client_driver"

    def __init__(self, address=None, *, keys=None, timeout_s=None, member=-1, members=-1, attempt=-1):
        self._options = [address or "-", keys or "-", timeout_s or 0], [member, members, attempt]
        self.sent, self.refused, self.waited_s = 0, 0, 0.0
        super().__init__()

    def open(self, simulation=None, parameters=None):
        place, group = self._options
        given = [-1] if parameters is None else [len(parameters), *map(float, parameters)]
        try:
            self._call("open", *place, -1 if simulation is None else simulation, *group, *given)
        except BaseException:
            self.free()
            raise
        return self

    def send(self, step, fields, version=None):
        for name, value in fields.items():
            self.put(name, np.asarray(value))
        if version is not None:
            self._call("version", *version)
        self._call("send", step)

    def put(self, name, array):
        body = np.ascontiguousarray(array).tobytes()
        self._call("put", name, array.dtype.str, len(body), array.ndim, *array.shape, body=body)

    def close(self):
        if self._process.returncode is not None:
            return
        try:
            self._call("close")
        finally:
            self.free()

    def _call(self, *words, body=b""):
        status, sent, refused, waited_s, simulation, steps, count, *rest = self._ask(*words, body=body)
        self.sent, self.refused, self.waited_s = int(sent), int(refused), float(waited_s)
        self.simulation, self.steps = int(simulation), int(steps)
        self.parameters = np.array(rest[: int(count)], dtype=np.float64)
        if int(status):
            error = RunOver if int(status) == 1 else ClientError
            raise error(" ".join(rest[int(count) :]).strip())

    def __exit__(self, kind, *rest):
        if kind is None:
            self.close()
        super().__exit__(kind, *rest)


class CWeights(dict):
    """One version: its arrays by name."""

    def __init__(self, version, arrays):
        super().__init__(arrays)
        self.version = version
        self.step = version.step


class CSubscriber(_Driver):
    """As ``Subscriber``, by a process that makes the calls. It ends at the end of ``with``."""

    program = "subscriber_driver"

    def __init__(self, address, *, keys=None, encoding="exact"):
        super().__init__()
        try:
            self._call("open", address, keys or "-", encoding)
        except BaseException:
            self.free()
            raise

    def latest(self, timeout_s):
        status, weights = self._call("latest", timeout_s)
        if status == _NONE:
            raise ClientError(weights)
        return weights

    def newer_than(self, version, timeout_s):
        status, weights = self._call("newer_than", *version, timeout_s)
        return None if status == _NONE else weights

    def is_current(self, version):
        return self._ask("is_current", *version)[0] == "1"

    def _call(self, *words):
        """Returns the status, and the version, or the error if there is none."""
        status, generation, step, count, *error = self._ask(*words)
        if int(status) not in (0, _NONE):
            raise (RunOver if int(status) == 1 else ClientError)(" ".join(error).strip())
        if int(status) == _NONE:
            return _NONE, " ".join(error).strip()
        arrays = {}
        for _ in range(int(count)):
            length, dtype, *shape = self._process.stdout.readline().decode().split()
            name = self._process.stdout.read(int(length)).decode(errors="replace")
            shape = tuple(map(int, shape))
            num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            arrays[name] = np.frombuffer(self._process.stdout.read(num_bytes), dtype).reshape(shape)
        return int(status), CWeights(Version(int(generation), int(step)), arrays)

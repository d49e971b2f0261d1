"""Segments reach the processes that may have them, block no client, and end with the last process that uses them."""

import contextlib
import ctypes
import errno
import gc
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from memory_maps import shared_maps

from paramserver.distributed.timeouts import poll_until
from paramserver.errors import DeadlineExceeded, ParamserverError, PeerLost, PeerRefused, UnsupportedConfiguration
from paramserver.parameters.flat import FlatLayout
from paramserver.platform import available_bytes, oom_kills
from paramserver.transport import segments
from paramserver.transport.segments import SegmentHost, attach, can_attach

MIXED = FlatLayout((torch.float32, torch.bfloat16, torch.bool, torch.float64, torch.int64), (33, 5, 7, 0, 3), ())
SMALL = FlatLayout((torch.float32,), (16,), ())
LARGE = FlatLayout((torch.uint8,), (64 * 2**20,), ())
NAME = "memfd:paramserver-segment"
OTHER_UID = 65534
_CLONE_NEWNET = 0x40000000
PROGRAM = """
import gc, os, socket, sys, torch
from paramserver.parameters.flat import FlatLayout
from paramserver.transport import segments
from paramserver.transport.segments import SegmentHost, attach, can_attach
print("ready", flush=True)
for line in sys.stdin:
    try:
        exec(line)
        print("done", flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""


class Other:
    """Another process, which executes one line at a time."""

    def __init__(self, folder: Path) -> None:
        environ = {**os.environ, "TMPDIR": str(folder)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, bufsize=0, env=environ
        )
        assert self.read_line() == "ready"

    def read_line(self) -> str:
        assert select.select([self.process.stdout], [], [], 60)[0], "the other process does not reply"
        return self.process.stdout.readline().decode().strip()

    def execute(self, line: str) -> str:
        """What it prints; ``done`` for a line that prints nothing."""
        self.process.stdin.write(f"{line}\n".encode())
        answer = self.read_line()
        if answer != "done" and line.startswith("print"):
            assert self.read_line() == "done"
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=90)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    process = Other(tmp_path_factory.mktemp("other"))
    yield process
    process.kill()


@pytest.fixture
def doomed(tmp_path):
    process = Other(tmp_path)
    yield process
    process.kill()


def files(pid: int | str = "self") -> list[str]:
    """What a process has open, and what it has mapped of segments."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            found.append(str(link.readlink()))
    found += [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if NAME in line]
    return sorted(name for name in found if re.match("socket|anon_inode|.*memfd", name))


@pytest.fixture(autouse=True)
def no_pages_left():
    gc.collect()  # a server of an earlier test ends with its cycles of references
    before = files()
    yield
    gc.collect()
    assert files() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "segment-host"]


@pytest.fixture
def host():
    with SegmentHost("tests", 5) as opened:
        yield opened


def connect(host: SegmentHost) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(10)
    client.connect(f"\0{host.address.partition(':')[0]}")
    return client


def descriptor() -> int:
    """Of the only segment in this process."""
    (number,) = (int(link.name) for link in Path("/proc/self/fd").iterdir() if NAME in str(link.resolve()))
    return number


def wait_for_files(before: list[str]) -> None:
    """The host closes its end of a connection a moment after the client has its answer."""
    gc.collect()
    assert poll_until(time.monotonic() + 10, lambda: files() == before or None, threading.Event()), files()


@contextlib.contextmanager
def limited(kind: int, most: int):
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


# Memory in two processes.


@pytest.mark.parametrize("layout", [MIXED, SMALL, FlatLayout((torch.bfloat16,), (0,), ()), FlatLayout((), (), ())])
def test_what_one_process_writes_another_reads(host, other, layout):
    ours = host.allocate("key", layout)
    assert [(t.dtype, t.numel()) for t in ours] == list(zip(layout.dtypes, layout.sizes, strict=True))
    assert all(t.count_nonzero() == 0 for t in ours)
    for value, tensor in enumerate(ours, 1):
        tensor.fill_(value)
    assert other.execute(f"theirs = attach({host.address!r}, 'key', {layout!r}, 5)") == "done"
    expected = [(str(t.dtype), t.double().tolist()) for t in ours]
    assert other.execute("print([(str(t.dtype), t.double().tolist()) for t in theirs])") == str(expected)
    other.execute("[t.fill_(0).view(-1)[-1:].fill_(1) for t in theirs]")
    assert [t.double().tolist() for t in ours] == [[0.0] * (n - 1) + [1.0] * (n > 0) for n in layout.sizes]
    other.execute("del theirs")


def test_flat_tensors_begin_at_cache_lines_and_do_not_overlap(host):
    ours = [t for t in host.allocate("key", MIXED) if t.numel()]
    begins = [t.data_ptr() for t in ours]
    assert [begin % 64 for begin in begins] == [0] * len(ours)
    assert all(
        t.data_ptr() + t.numel() * t.element_size() <= after
        for t, after in zip(ours, [*begins[1:], 2**64], strict=True)
    )


def test_mapping_and_descriptor_end_with_the_tensors(host, other):
    assert not any("memfd" in name for name in files(other.process.pid))
    ours = host.allocate("key", SMALL)
    other.execute(f"theirs = attach({host.address!r}, 'key', {SMALL!r}, 5); one = theirs[0][3:5]; del theirs")
    assert len([name for name in files(other.process.pid) if "memfd" in name]) == 1  # the mapping alone, by a view
    other.execute("del one")
    assert not any("memfd" in name for name in files(other.process.pid))
    assert len([name for name in files() if "memfd" in name]) == 2
    host.release("key")
    ours[0].fill_(1)
    del ours
    assert not any("memfd" in name for name in files())


def test_a_released_segment_is_served_no_more_and_its_tensors_stay(host):
    ours = host.allocate("key", SMALL)
    theirs = attach(host.address, "key", SMALL, 5)
    host.release("key")
    with pytest.raises(ParamserverError, match=r"^segment key must be one of \(\); allocate it first"):
        attach(host.address, "key", SMALL, 5)
    ours[0].fill_(2)
    assert host.allocate("key", SMALL)[0].sum() == 0  # memory of its own
    assert theirs[0].sum() == 32


def test_a_request_names_any_number_of_tensors(host):
    layout = FlatLayout((torch.float32,) * 20_000, (16,) * 20_000, ())
    host.allocate("key", layout)[-1].fill_(3)
    assert attach(host.address, "key", layout, 5)[-1].sum() == 48
    other = replace(layout, sizes=(*layout.sizes[1:], 32))
    with pytest.raises(ParamserverError, match=r"segment key \(20000 flat tensors with sha256 \w+\) must be attached"):
        attach(host.address, "key", other, 5)


def test_the_pages_are_there_and_nobody_can_cut_them(host):
    host.allocate("key", FlatLayout((torch.float32,), (2**18,), ()))
    assert os.fstat(descriptor()).st_blocks * 512 >= 2**20
    assert not os.get_inheritable(descriptor())
    for size_bytes in (0, 2**21):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor(), size_bytes)


# Who is served.


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda host: attach(host.address, "no", SMALL, 5),
            r"segment no must be one of \(key, more\); allocate it first",
        ),
        (
            lambda host: attach(host.address, "key", MIXED, 5),
            r"segment key \(16 float32\) must .* own layout, not \(33 f",
        ),
        (lambda host: host.allocate("key", SMALL), r"segment key must be new"),
        (lambda host: host.release("no"), r"segment no must be one of \(key, more\)"),
        (lambda host: SegmentHost("shut", 1).allocate("key", SMALL), r"the host of segment key must be open"),
        (lambda host: host.__enter__(), r"a segment host \(tests-\w+\) must be entered once"),
    ],
)
def test_errors_name_the_segment_and_the_rule(host, act, message):
    held = host.allocate("key", SMALL), host.allocate("more", SMALL)
    with pytest.raises(ParamserverError, match=f"^{message}"):
        act(host)
    assert attach(host.address, "key", SMALL, 5)[0].equal(held[0][0])


@pytest.mark.parametrize("request_bytes", [b"[", b"{}", b"3", b'["a", "key", ""]', b"[1, 2, 3]", b"x" * 70000])
def test_a_client_without_the_secret_gets_nothing(host, request_bytes):
    host.allocate("key", SMALL)
    name, _, secret = host.address.partition(":")
    assert name in (names := Path("/proc/net/unix").read_text())
    assert secret not in names
    with connect(host) as stranger:
        stranger.send(request_bytes)
        answer, descriptors, _, _ = socket.recv_fds(stranger, 4096, 1)
    assert descriptors == []
    assert json.loads(answer)["kind"] == "PeerRefused"
    with pytest.raises(PeerRefused, match="must begin with its secret"):
        attach(f"{name}:{secret[:-1]}", "key", SMALL, 5)


def test_another_user_is_refused_on_both_sides(host, other):
    """As root with another user; else with the own one, who is served."""
    host.allocate("key", SMALL)
    uid = OTHER_UID if os.geteuid() == 0 else os.geteuid()
    foreign = uid != os.geteuid()
    name, _, secret = host.address.partition(":")
    request = json.dumps([secret, "key", "16 float32"]).encode()
    other.execute(f"os.seteuid({uid})")
    other.execute(f"s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect({chr(0) + name!r})")
    other.execute(f"s.send({request!r}); s.settimeout(10); packet, got, *_ = socket.recv_fds(s, 4096, 1); s.close()")
    answer = other.execute("print(len(got), packet.decode()); [os.close(n) for n in got]")
    assert answer.startswith('0 {"kind": "UnsupportedConfiguration"' if foreign else "1 {}")
    answer = other.execute(f"theirs = attach({host.address!r}, 'key', {SMALL!r}, 5); del theirs")
    assert ("all processes of a host must have one user" in answer) is foreign
    assert other.execute(f"print(can_attach({host.address!r}, 5))") == str(not foreign)
    other.execute(f"os.seteuid({os.geteuid()})")


def test_a_host_of_another_user_is_not_trusted(host, monkeypatch):
    here = threading.current_thread()  # the client; the host sees who asks
    monkeypatch.setattr(segments, "peer_uid", lambda _: os.geteuid() + (threading.current_thread() is here))
    with pytest.raises(UnsupportedConfiguration, match="must have one user"):
        attach(host.address, "key", SMALL, 5)


def test_a_host_is_reached_within_its_network_namespace_only(host):
    """Where this process may not make a namespace, it stays in its own."""
    seen = []

    def elsewhere():
        moved = ctypes.CDLL(None).unshare(_CLONE_NEWNET) == 0  # this thread alone
        seen.extend([moved, can_attach(host.address, 5)])

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(30)
    moved, reached = seen
    assert reached is (not moved)
    assert can_attach(host.address, 5)


# Clients that send nothing, or disconnect.


def test_a_silent_client_blocks_no_other_and_is_disconnected():
    with SegmentHost("tests", 0.3) as host, connect(host) as silent:
        host.allocate("key", SMALL)
        assert len(attach(host.address, "key", SMALL, 5)) == 1
        assert silent.recv(1) == b""


def test_a_timeout_may_be_longer_than_the_system_waits():
    """epoll takes at most 24 days."""
    with SegmentHost("tests", 1e7) as host, connect(host):
        host.allocate("key", SMALL)
        assert len(attach(host.address, "key", SMALL, 5)) == 1


def test_many_silent_clients_do_not_keep_another_out(host):
    with contextlib.ExitStack() as crowd:
        silent = [crowd.enter_context(connect(host)) for _ in range(segments._MAX_PENDING + 20)]
        assert can_attach(host.address, 5)
        assert [client.recv(1) for client in silent[:20]] == [b""] * 20
        assert select.select(silent[22:], [], [], 0)[0] == []


@pytest.mark.parametrize("sent", [None, "request", "nonsense"])
def test_a_client_that_disconnects_leaves_nothing(host, sent):
    host.allocate("key", SMALL)
    before = files()
    with connect(host) as client:
        if sent is not None:
            request = [host.address.partition(":")[2], "key", "16 float32"] if sent == "request" else {}
            client.send(json.dumps(request).encode())
    wait_for_files(before)
    assert can_attach(host.address, 5)


def test_a_host_without_descriptors_serves_again_once_it_has_some(host, caplog):
    free = os.dup(0)
    os.close(free)
    with (
        limited(resource.RLIMIT_NOFILE, free + 1),
        pytest.raises(DeadlineExceeded, match=r"did not answer within 0\.3 s"),
    ):
        can_attach(host.address, 0.3)
    assert can_attach(host.address, 5)
    assert "cannot let a client in" in caplog.text


def test_clients_are_answered_while_memory_is_made(host, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: seen.append(can_attach(host.address, 5)))
    host.allocate("key", SMALL)
    assert seen == [True]


def test_a_thread_that_fails_rejects_clients_and_raises_to_its_owner(monkeypatch):
    monkeypatch.setattr(SegmentHost, "_serve", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), SegmentHost("tests", 5) as host:  # noqa: PT012
        for _ in range(2):
            with pytest.raises(PeerLost, match="must run in this network namespace and does not answer"):
                attach(host.address, "key", SMALL, 5)


def test_a_closed_host_disconnects_waiting_clients():
    with SegmentHost("tests", 5) as host:
        silent = connect(host)
        theirs = host.allocate("key", SMALL)
    assert silent.recv(1) == b""
    silent.close()
    assert not can_attach(host.address, 5)
    assert theirs[0].fill_(1).sum() == 16
    with pytest.raises(ParamserverError, match="must be open"):
        host.allocate("more", SMALL)


def test_a_closed_host_is_gone_even_if_a_forked_child_has_its_sockets():
    before = files()
    with SegmentHost("tests", 5) as host:
        sockets = [link for link in Path("/proc/self/fd").iterdir() if link.resolve().name.startswith("socket")]
        copies = [os.dup(int(link.name)) for link in sockets]  # what fork does
        assert can_attach(host.address, 5)
    try:
        assert len(copies) > len([name for name in before if name.startswith("socket")])
        assert not can_attach(host.address, 5)
    finally:
        for copy in copies:
            os.close(copy)


# Processes that are killed.


def test_a_killed_client_leaves_nothing(host, doomed):
    host.allocate("key", SMALL)
    before = files()
    doomed.execute(f"theirs = attach({host.address!r}, 'key', {SMALL!r}, 5); theirs[0].fill_(3)")
    doomed.execute(f"s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect({chr(0) + host._name!r})")
    doomed.kill()
    wait_for_files(before)
    assert attach(host.address, "key", SMALL, 5)[0].sum() == 48


def test_a_killed_host_leaves_nothing(doomed, tmp_path):
    shm = set(Path("/dev/shm").iterdir())
    doomed.execute(f"host = SegmentHost('doomed', 5).__enter__(); ours = host.allocate('key', {SMALL!r})")
    address = doomed.execute("print(host.address)")
    theirs = attach(address, "key", SMALL, 5)
    assert "@doomed-" in Path("/proc/net/unix").read_text()
    assert NAME in "".join(files(doomed.process.pid))
    assert not [line for line in shared_maps(doomed.process.pid) if NAME not in line]
    doomed.kill()
    assert "@doomed-" not in Path("/proc/net/unix").read_text()
    assert not can_attach(address, 5)
    with pytest.raises(PeerLost):
        attach(address, "key", SMALL, 5)
    assert theirs[0].fill_(1).sum() == 16  # ends with this tensor, which the last look at this process asserts
    assert list(tmp_path.iterdir()) == []
    assert not [name for name in set(Path("/dev/shm").iterdir()) - shm if re.search("torch|segment", name.name)]


def test_a_frozen_host_holds_nobody_up(doomed):
    doomed.execute("host = SegmentHost('frozen', 5).__enter__()")
    address = doomed.execute("print(host.address)")
    doomed.process.send_signal(signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(doomed.process.pid, os.WUNTRACED)[1])
    with pytest.raises(DeadlineExceeded, match=r"did not answer within 0\.2 s"):
        attach(address, "key", SMALL, 0.2)
    with contextlib.ExitStack() as queue:  # now no client can even connect
        while True:
            client = queue.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            client.setblocking(False)
            try:
                client.connect(f"\0{address.partition(':')[0]}")
            except BlockingIOError:
                break
        with pytest.raises(DeadlineExceeded, match=r"did not answer within 0\.2 s"):
            can_attach(address, 0.2)


# Too little memory.


def test_too_little_memory_is_reported_before_it_is_allocated(host, monkeypatch):
    monkeypatch.setattr(segments, "available_bytes", lambda: 3 * 2**20)
    monkeypatch.setattr(os, "memfd_create", lambda *_: pytest.fail("this would be killed"))
    rule = r"^segment key needs 64.0 MiB of shared memory, 3.0 MiB are available; use server.transport: rpc, a smaller "
    with pytest.raises(UnsupportedConfiguration, match=rule + "model, or a larger memory limit$"):
        host.allocate("key", LARGE)


def test_a_limit_of_file_size_is_too_little_memory(host):
    before = files()
    with limited(resource.RLIMIT_FSIZE, 2**20), pytest.raises(UnsupportedConfiguration, match="File too large"):
        host.allocate("key", LARGE)
    assert files() == before
    assert host.allocate("key", SMALL)  # nothing of the first one is kept


def test_a_limit_of_address_space_is_too_little_memory(host):
    host.allocate("key", LARGE)
    before = files()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + 16 * 2**20
    with limited(resource.RLIMIT_AS, room), pytest.raises(UnsupportedConfiguration, match="allocate memory"):
        attach(host.address, "key", LARGE, 5)
    wait_for_files(before)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EIO])
def test_an_error_of_the_system_is_quoted(host, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = files()
    expected = OSError if number == errno.EIO else UnsupportedConfiguration
    with pytest.raises(expected, match=os.strerror(number)):
        host.allocate("key", SMALL)
    assert files() == before


V2 = "30 1 0:1 {top} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = "31 1 0:2 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n32 1 0:3 / /cpu rw - cgroup cgroup rw,cpu\n"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("mounts", "own", "groups", "expected_mib"),
    [
        ("", "", {}, 100),
        (V2.format(top="/"), "0::/job", {"job": "50 20 5"}, 35),
        (V2.format(top="/"), "0::/job", {"job": "max 20 5"}, 100),
        (V2.format(top="/"), "0::/job", {"job": "500 20 5"}, 100),
        (V2.format(top="/"), "0::/job", {"job": "20 30 0"}, 0),
        (V2.format(top="/"), "0::/job/step", {"job": "50 20 5", "job/step": "90 20 0"}, 35),
        (V2.format(top="/docker/a"), "0::/docker/a", {".": "40 10 0"}, 30),
        (V2.format(top="/docker/a"), "0::/docker/a/b", {".": "90 1 0", "b": "40 15 0"}, 25),
        (V2.format(top="/docker/a"), "0::/docker/other", {".": "40 10 0"}, 30),
        (V2.format(top="/"), "0::/../job", {".": "40 10 0"}, 30),
        (V1.format(top="/"), "4:memory:/job\n0::/", {"memory/job": "50 20 5"}, 35),
        (V1.format(top="/"), "7:cpu:/job\n4:hugetlb,memory:/x", {"memory/job": "1 0 0", "memory/x": "60 20 0"}, 40),
        (V1.format(top="/") + V2.format(top="/"), "4:memory:/a\n0::/b", {"memory/a": "80 0 0", "b": "70 0 0"}, 70),
    ],
)
def test_the_lowest_of_all_limits_counts(tmp_path, mounts, own, groups, expected_mib):
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write("proc/meminfo", f"MemTotal: {200 * 1024} kB\nMemAvailable: {100 * 1024} kB\n")
    write("proc/self/mountinfo", "25 1 0:9 / /home rw - ext4 /dev/sda rw\n" + mounts)
    write("proc/self/cgroup", own)
    for group, numbers in groups.items():
        limit, usage, cache = (n if n == "max" else str(int(n) * 2**20) for n in numbers.split())
        v1 = group.startswith("memory")
        names = (
            ["limit_in_bytes", "usage_in_bytes", "total_inactive_file"] if v1 else ["max", "current", "inactive_file"]
        )
        write(f"sys/fs/cgroup/{group}/memory.{names[0]}", limit)
        write(f"sys/fs/cgroup/{group}/memory.{names[1]}", usage)
        write(f"sys/fs/cgroup/{group}/memory.stat", f"anon 1\n{names[2]} {cache}\n")
    assert available_bytes(tmp_path) == expected_mib * 2**20


@pytest.mark.parametrize(
    ("mounts", "own", "counts", "expected"),
    [
        ("", "", {}, 7),
        (V2.format(top="/"), "0::/", {}, 7),
        (V2.format(top="/"), "0::/job", {"job/memory.events": "high 1\noom 3\noom_kill 2\n"}, 2),
        (V1.format(top="/"), "4:memory:/a", {"memory/a/memory.oom_control": "under_oom 0\noom_kill 3\n"}, 3),
        (V1.format(top="/"), "4:memory:/a", {"memory/a/memory.oom_control": "oom_kill_disable 0\n"}, 7),
    ],
)
def test_what_the_kernel_killed_in_the_own_group_counts(tmp_path, mounts, own, counts, expected):
    files = {f"sys/fs/cgroup/{name}": text for name, text in counts.items()}
    files |= {"proc/self/mountinfo": mounts, "proc/self/cgroup": own, "proc/vmstat": "pgfault 9\noom_kill 7\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path) == expected


def test_this_host_has_memory():
    assert 2**20 < available_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

"""The stores of a process ask no name server, and the resolver of its threads is as before."""

import os
import subprocess
import sys

import pytest

from paramserver.distributed import store_relay

# A look-up of torch fails at once, and torch prints so.
STORES = """
import ctypes
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
from paramserver.distributed.store_relay import disable_name_lookups

disable_name_lookups()
options = {"wait_for_workers": False, "timeout": timedelta(seconds=60)}
store = TCPStore("127.0.0.1", 0, is_master=True, **options)
for _ in range(3):
    TCPStore("127.0.0.1", store.port, is_master=False, **options).set("key", "value")
"""
# Of this thread: its first look-up reads resolv.conf.
ATTEMPTS = """
import ctypes, os
from paramserver.distributed.store_relay import disable_name_lookups

libc = ctypes.CDLL(None)
libc.__res_state.restype = ctypes.c_void_p
resolver = libc.__res_state()
disable_name_lookups()
assert "RES_OPTIONS" not in os.environ
libc.__res_ninit(ctypes.c_void_p(resolver))
print((ctypes.c_int * 2).from_address(resolver)[1])
"""


def run(program, **variables):
    environ = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"} | variables
    return subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=90)


@pytest.mark.claim("name-server")
def test_no_store_of_the_process_looks_up_a_name():
    done = run(STORES, RES_OPTIONS="attempts:0", TORCH_CPP_LOG_LEVEL="WARNING")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.claim("name-server")
def test_other_threads_make_as_many_attempts_as_before():
    done = run(ATTEMPTS)
    assert int(done.stdout) > 0, done.stderr


def test_only_the_warning_about_the_look_up_is_removed(capfd):
    with store_relay._without_warning():
        os.write(2, b"[W1 socket.cpp:1] [c10d] The hostname of the client socket cannot be retrieved. err=-3\n")
        os.write(2, b"another line\nand a part of one")
    os.write(2, b", continued\n")
    assert capfd.readouterr().err == "another line\nand a part of one, continued\n"


def test_a_look_up_that_cannot_be_made_to_fail_is_logged(monkeypatch, caplog):
    def refuse():
        raise OSError("no address")

    monkeypatch.setattr(store_relay, "_fail_a_lookup", refuse)
    with caplog.at_level("INFO", "paramserver"):
        store_relay.disable_name_lookups.__wrapped__()
    assert caplog.messages == ["a name server that does not answer may delay the start of this rank: no address"]

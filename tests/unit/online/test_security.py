"""Keys: who gets in, who does not, and what is written where."""

import json
import logging
import os
import stat
import subprocess
import sys

import numpy as np
import pytest
import zmq
from fake_run import FakeRun
from zmq.auth import load_certificate

from paramserver import cli
from paramserver.client import Client, ping
from paramserver.cluster import own_address
from paramserver.errors import ClientError, UnsupportedConfiguration
from paramserver.online.protocol import Header, MessageKind
from paramserver.online.security import (
    ServerSecurity,
    find_client_key,
    make_keys,
    secure_client_socket,
    secure_trainer_socket,
)
from paramserver.online.sender import CoordinatorConnection

SHORT_S = 0.5


def own_host():
    """An address of this machine that others reach, where it has one."""
    try:
        return own_address("192.0.2.1")
    except UnsupportedConfiguration:
        return "127.0.0.1"


@pytest.fixture
def folder(tmp_path):
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def run(folder):
    with FakeRun(1, security=lambda context: ServerSecurity(context, folder)) as fake:
        yield fake


# Who gets in.


@pytest.mark.parametrize("host", ["127.0.0.1", own_host()])
def test_a_known_key_passes_on_every_line(folder, host):
    with FakeRun(2, host=host, security=lambda context: ServerSecurity(context, folder)) as run:
        with Client(run.address, keys=folder, timeout_s=20).open(0, [1.0]) as client:
            for step in range(4):
                client.send(step, {"temperature": np.full((2, 3), step)})
        run.wait_for(lambda: run.byes)
        assert run.keys() == {0: [(0, 0), (0, 2)], 1: [(0, 1), (0, 3)]}
        assert ping(run.address, folder) == {"alive": True}


def refused(run, keys, timeout_s=SHORT_S):
    with pytest.raises(ClientError, match=rf"the run at \S+ gave no sign of life for {timeout_s:g} s") as caught:
        ping(run.address, keys, timeout_s)
    assert run.messages == []
    return str(caught.value)


def test_an_unknown_key_is_never_answered_and_named_in_the_log(run, folder, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "paramserver.keys")
    other = tmp_path / "other"
    make_keys(other)
    (other / "server.key").write_bytes((folder / "server.key").read_bytes())  # it knows the run, but not conversely
    message = refused(run, other)
    assert message.endswith("and that the public key of this client is in the folder clients of its keys")
    public, _ = load_certificate(other / "clients" / "client.key")
    assert caplog.messages == [f"a client with the unknown key {public.decode()} was refused"]


def test_another_run_is_not_trusted(run, folder, tmp_path):
    other = tmp_path / "other"
    make_keys(other)
    (other / "client.key_secret").write_bytes((folder / "client.key_secret").read_bytes())
    refused(run, other)


def test_without_a_key_there_is_no_reply(run):
    assert "clients" not in refused(run, None)


@pytest.mark.claim("refused-key", "send-deadlines")
@pytest.mark.parametrize("unknown", [False, True], ids=["without a key", "with an unknown one"])
def test_a_request_after_a_failed_handshake_fails_and_does_not_block(run, folder, tmp_path, unknown):
    keys = tmp_path / "other" if unknown else None
    if keys is not None:
        make_keys(keys)
        (keys / "server.key").write_bytes((folder / "server.key").read_bytes())
    # Mostly ZeroMQ gives the connection up for good, which is reported at once; it may also try again.
    pattern = r"has broken off the connection to this client: .* key; correct the address|gave no sign of life for 3 s"
    with pytest.raises(ClientError, match=pattern):
        Client(run.address, keys=keys, timeout_s=3).open(0, [1.0])
    assert run.messages == []


def test_clients_are_added_and_removed_during_the_run(run, folder):
    make_keys(folder, "laptop")
    assert ping(run.address, folder / "laptop.key_secret") == {"alive": True}
    (folder / "clients" / "laptop.key").unlink()
    run.messages.clear()
    refused(run, folder / "laptop.key_secret")


def test_a_damaged_key_of_one_client_does_not_affect_others(run, folder, caplog):
    (folder / "clients" / "broken.key").write_text("no key at all")
    (folder / "clients" / "a.key").write_bytes(b"\xff" * 100)
    assert ping(run.address, folder) == {"alive": True}
    assert all("must be a key that can be read" in message for message in caplog.messages)


def test_without_the_authenticator_no_client_connects(run, folder):
    assert ping(run.address, folder) == {"alive": True}
    run.messages.clear()
    run.security.close()
    refused(run, folder)


def test_a_process_of_the_run_has_its_own_secret(run, folder):
    context = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        secure_trainer_socket(dealer, folder)
        dealer.linger = 0
        dealer.connect(run.address)
        dealer.send(Header(MessageKind.PING).pack())
        assert dealer.poll(20_000)
        assert Header.unpack(dealer.recv_multipart()[0]).kind is MessageKind.PONG
    context.term()


def test_without_keys_there_is_no_authentication():
    context = zmq.Context()
    with context.socket(zmq.DEALER) as dealer, ServerSecurity(context, None) as security:
        secure_client_socket(dealer, None)
        secure_trainer_socket(dealer, None)
        security.protect(dealer)
        assert dealer.mechanism == zmq.NULL
    context.term()


# What is written.


def test_secrets_are_for_their_owner_alone(folder):
    old = os.umask(0)
    try:
        make_keys(folder, "laptop")
    finally:
        os.umask(old)
    files = {str(f.relative_to(folder)): f for f in folder.rglob("*") if f.is_file()}
    assert sorted(files) == [
        "client.key_secret",
        "clients/client.key",
        "clients/laptop.key",
        "laptop.key_secret",
        "server.key",
        "server.key_secret",
    ]
    for name, file in files.items():
        secret = name.endswith("_secret")
        assert stat.S_IMODE(file.stat().st_mode) == (0o600 if secret else 0o644)
        assert (b"secret-key" in file.read_bytes()) == secret
    for name in ("client", "laptop"):
        assert load_certificate(folder / f"{name}.key_secret")[0] == load_certificate(files[f"clients/{name}.key"])[0]
    assert len({load_certificate(f)[0] for f in files.values()}) == 3


@pytest.mark.parametrize("client", [None, "client"])
def test_keys_are_never_overwritten(folder, client):
    before = {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    with pytest.raises(
        UnsupportedConfiguration, match="must not be there yet, keys are never overwritten; name another"
    ):
        make_keys(folder, client)
    assert {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()} == before


def test_a_first_client_with_a_name_creates_the_keys_of_the_run(tmp_path):
    files = make_keys(tmp_path / "keys", "laptop")
    names = ["server.key", "server.key_secret", "clients/laptop.key", "laptop.key_secret"]
    assert files == [tmp_path / "keys" / name for name in names]


@pytest.mark.parametrize("name", ["", "server", "../x", "a/b", ".hidden", "a b", "*"])
def test_a_name_that_no_client_may_have(folder, name):
    with pytest.raises(UnsupportedConfiguration, match=r"--client \(.*\) must be letters, digits, _, - and \. and not"):
        make_keys(folder, name)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnsupportedConfiguration, match="cannot be written"):
        make_keys(tmp_path / "file" / "keys")


# What is read.


def test_a_client_finds_its_own_key(folder):
    assert find_client_key(folder) == folder / "client.key_secret"
    make_keys(folder, "laptop")
    assert find_client_key(str(folder)) == folder / "client.key_secret"  # still the usual one
    assert find_client_key(folder / "laptop.key_secret") == folder / "laptop.key_secret"
    (folder / "client.key_secret").unlink()
    assert find_client_key(folder) == folder / "laptop.key_secret"  # what a client took along, with server.key
    make_keys(folder, "tower")
    with pytest.raises(
        UnsupportedConfiguration, match=r"there is laptop\.key_secret, tower\.key_secret; name the file"
    ):
        find_client_key(folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "server.key").unlink(), r"server\.key must be a key that can be read"),
        (
            lambda folder: (folder / "client.key_secret").unlink(),
            "must be a folder with one client's secret key, there is no",
        ),
        (lambda folder: (folder / "client.key_secret").write_text('public-key = "ab"'), "must hold a secret key of 40"),
        (lambda folder: (folder / "server.key").write_text('public-key = "ab"'), "must hold a public key of 40"),
        (lambda folder: (folder / "client.key_secret").write_text(""), r"client\.key_secret must be a key that can be"),
    ],
)
def test_keys_that_are_none_are_refused_before_anything_is_sent(folder, spoil, message):
    spoil(folder)
    context = zmq.Context()
    with pytest.raises(UnsupportedConfiguration, match=message):
        CoordinatorConnection(context, "tcp://127.0.0.1:1", folder)
    context.term()  # nothing was left open


@pytest.mark.parametrize("keys", ["nowhere", "."])
def test_a_run_needs_its_own_secret(tmp_path, keys):
    context = zmq.Context()
    with pytest.raises(UnsupportedConfiguration, match=r"server\.key_secret must be a key that can be read"):
        ServerSecurity(context, tmp_path / keys)
    context.term()


# The commands.


def test_the_command_makes_keys(tmp_path, capsys):
    folder = tmp_path / "keys"
    assert cli.keys_main([str(folder)]) == 0
    assert cli.keys_main([str(folder), "--client", "laptop"]) == 0
    made = capsys.readouterr().out.split()
    assert sorted(made) == sorted(str(f) for f in folder.rglob("*") if f.is_file())
    assert cli.keys_main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_the_command_pings(run, folder, capsys):
    assert cli.ping_main([run.address, "--keys", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out) == {"alive": True}
    run.answers[MessageKind.PING] = None
    assert cli.ping_main([run.address, "--keys", str(folder), "--timeout-s", "0.2"]) == 1
    assert "gave no sign of life for 0.2 s" in capsys.readouterr().err
    assert cli.ping_main([run.address, "--keys", str(folder / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_pyzmq_there_is_one_message(tmp_path):
    program = (
        "import sys; sys.modules['zmq'] = None\n"
        "from paramserver import cli\n"
        "sys.exit(cli.keys_main([sys.argv[1]]) + 10 * cli.ping_main(['tcp://127.0.0.1:1']))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "keys")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 22
    sentence = "error: simulations, publish and subscribers need pyzmq; install pyzmq, or the extra online\n"
    assert done.stderr == 2 * sentence

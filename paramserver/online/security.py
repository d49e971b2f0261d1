"""Keys of a run that others can reach: CURVE (RFC 26), who may send, and who the run is.

A folder of keys::

    server.key              who the run is; every client has it
    server.key_secret       of the run alone
    client.key_secret       of a client; takes server.key and its own file along
    clients/client.key      who may send; of the run

Messages are encrypted, and whoever has none of the keys in ``clients`` does not get through the handshake.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.errors import UnsupportedConfiguration
from paramserver.online.zmq_import import zmq

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

SERVER = "server"
CLIENT = "client"
_CLIENTS = "clients"
_PUBLIC, _SECRET = ".key", ".key_secret"
_DOMAIN = "paramserver"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_Z85_LENGTH = 40
_THREAD = "gatekeeper"
_MOST_REFUSALS_LOGGED = 100

_logger = logging.getLogger("paramserver.keys")


# Making them.


def make_keys(folder: str | Path, client: str | None = None) -> list[Path]:
    """Write the keys of a run and of one client, or of a further client.

    Args:
        folder: is made where it is not there.
        client: the name of the client; None = ``client``, and the keys of the run must not be there yet.

    Returns:
        The files that were written; those with secrets can be read by their owner alone.

    Raises:
        UnsupportedConfiguration: keys are there already, which are never overwritten; a name that no file may have; a
            folder that cannot be written.
    """
    folder, name = Path(folder), CLIENT if client is None else client
    if not _NAME.fullmatch(name) or name == SERVER:
        raise UnsupportedConfiguration(
            f"--client ({name}) must be letters, digits, _, - and . and not {SERVER}; choose another name"
        )
    wanted = [_pair(folder, name)]
    if client is None or not (folder / f"{SERVER}{_PUBLIC}").exists():
        wanted.insert(0, _pair(folder, SERVER))
    taken = [file for pair in wanted for file in pair if file.exists()]
    if taken:
        raise UnsupportedConfiguration(
            f"{taken[0]} must not be there yet, keys are never overwritten; name another folder, or add a client with "
            "--client NAME"
        )
    try:
        for public, _ in wanted:
            public.parent.mkdir(parents=True, exist_ok=True)
        return [file for public, secret in wanted for file in _write_pair(public, secret)]
    except OSError as error:
        raise UnsupportedConfiguration(f"{folder} cannot be written ({error.strerror}); name another folder") from error


def _pair(folder: Path, name: str) -> tuple[Path, Path]:
    """The files of a public and a secret key."""
    home = folder if name == SERVER else folder / _CLIENTS
    return home / f"{name}{_PUBLIC}", folder / f"{name}{_SECRET}"


def _write_pair(public: Path, secret: Path) -> tuple[Path, Path]:
    public_key, secret_key = (key.decode() for key in zmq.curve_keypair())
    told = f'    public-key = "{public_key}"\n'
    # The secret first: a public key that nobody has the secret of would only stand in the way.
    _write(secret, 0o600, f'# Keep this file to yourself.\ncurve\n{told}    secret-key = "{secret_key}"\n')
    _write(public, 0o644, f"curve\n{told}")
    return public, secret


def _write(file: Path, mode: int, text: str) -> None:
    """A new file that has its mode from its first moment on."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="ascii") as opened:
        opened.write(text)


# Reading them.


def _read(file: Path, *, secret: bool) -> tuple[bytes, bytes]:
    """Public and secret key; the second is empty where it is not asked for."""
    from zmq.auth.certs import load_certificate

    try:
        public_key, secret_key = load_certificate(file)
    except (OSError, ValueError) as error:
        raise UnsupportedConfiguration(
            f"{file} must be a key that can be read ({error}); make keys with: paramserver keys FOLDER"
        ) from error
    keys = (public_key, (secret_key or b"") if secret else b"")
    if any(len(key) != _Z85_LENGTH for key in keys[: 1 + secret]):
        raise UnsupportedConfiguration(
            f"{file} must hold a {'secret' if secret else 'public'} key of {_Z85_LENGTH} characters; make keys with: "
            "paramserver keys FOLDER"
        )
    return keys


def client_file(keys: str | Path) -> Path:
    """The secret key that a client uses: the one that is named, ``client.key_secret`` of a folder, or its only one.

    Raises:
        UnsupportedConfiguration: there is none, or it is not clear which.
    """
    keys = Path(keys)
    if keys.is_file():
        return keys
    if (usual := keys / f"{CLIENT}{_SECRET}").is_file():
        return usual
    found = sorted(file for file in keys.glob(f"*{_SECRET}") if file.name != f"{SERVER}{_SECRET}")
    if len(found) == 1:
        return found[0]
    names = ", ".join(file.name for file in found) or "none"
    raise UnsupportedConfiguration(
        f"keys ({keys}) must be a folder with one client's secret key, there is {names}; name the file itself, or make "
        "one with: paramserver keys FOLDER --client NAME"
    )


# Using them.


def client_security(socket: zmq.Socket[Any], keys: str | Path | None) -> None:
    """Make a socket that is going to connect prove who it is, and demand it of the run; nothing where ``keys`` is None.

    Args:
        socket: not connected yet.
        keys: folder of the keys, or a client's secret key, which has server.key beside it.

    Raises:
        UnsupportedConfiguration: the keys are not there or are none.
    """
    if keys is not None:
        own = client_file(keys)
        _prove(socket, own, own.parent)


def peer_security(socket: zmq.Socket[Any], keys: str | Path | None) -> None:
    """The same for a process of the run itself, which has the run's own secret."""
    if keys is not None:
        _prove(socket, Path(keys) / f"{SERVER}{_SECRET}", Path(keys))


def _prove(socket: zmq.Socket[Any], own: Path, folder: Path) -> None:
    socket.curve_publickey, socket.curve_secretkey = _read(own, secret=True)
    socket.curve_serverkey, _ = _read(folder / f"{SERVER}{_PUBLIC}", secret=False)


class ServerSecurity:
    """Lets those in who have a key. Owns the thread ``gatekeeper``; ``close`` before the context is terminated.

    Who may come is read anew at each handshake: a client that is added may come at once, and one whose file is removed
    no more, but for connections that it has.

    Args:
        context: of the sockets that are protected; it must have no other.
        keys: folder of the keys; None = everybody may come.

    Raises:
        UnsupportedConfiguration: the keys are not there or are none.
    """

    def __init__(self, context: zmq.Context[Any], keys: str | Path | None) -> None:
        self._authenticator: ThreadAuthenticator | None = None
        self._refused: set[bytes] = set()
        if keys is None:
            return
        self._clients = Path(keys) / _CLIENTS
        self._public, self._secret = _read(Path(keys) / f"{SERVER}{_SECRET}", secret=True)
        self._authenticator = self._start(context)

    def _start(self, context: zmq.Context[Any]) -> ThreadAuthenticator:
        from zmq.auth.thread import ThreadAuthenticator

        authenticator = ThreadAuthenticator(context)
        authenticator.configure_curve_callback(_DOMAIN, self)
        authenticator.start()
        authenticator.thread.name = _THREAD
        return authenticator

    def protect(self, socket: zmq.Socket[Any]) -> None:
        """Make a socket that is going to be bound ask who comes."""
        if self._authenticator is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
            socket.zap_domain = _DOMAIN.encode()
            # Else libzmq takes everybody where the thread that would be asked is gone.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this public key may come; called by pyzmq in its thread."""
        known = key == self._public or any(self._holds(file, key) for file in self._clients.glob(f"*{_PUBLIC}"))
        if not known and key not in self._refused and len(self._refused) < _MOST_REFUSALS_LOGGED:
            self._refused.add(key)
            _logger.warning("a client with the unknown key %s was refused", key.decode())
        return known

    def _holds(self, file: Path, key: bytes) -> bool:
        try:
            return _read(file, secret=False)[0] == key
        except UnsupportedConfiguration as error:
            _logger.warning("%s", error)
            return False

    def close(self) -> None:
        """End the thread; who comes later is not let in."""
        if self._authenticator is not None:
            self._authenticator.stop()

    def __enter__(self) -> ServerSecurity:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def server_security(context: zmq.Context[Any], keys: str | Path | None) -> ServerSecurity:
    """Whoever protects the sockets of this context; its owner closes it."""
    return ServerSecurity(context, keys)

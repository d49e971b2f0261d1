"""Keys of an online run that is reachable from other machines: CURVE encryption (RFC 26) and authorization.

A folder of keys holds::

    server.key              public key of the run; every client needs it
    server.key_secret       secret key of the run, for the run alone
    client.key_secret       secret key of a client; copy it to the client together with server.key
    clients/client.key      public key of a client that may connect, for the run

Messages are encrypted. The handshake of a client fails if its public key is not in ``clients``.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.errors import UnsupportedConfiguration
from paramserver.online.connections import zmq

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

SERVER = "server"
CLIENT = "client"
_CLIENTS = "clients"
_PUBLIC, _SECRET = ".key", ".key_secret"
_DOMAIN = "paramserver"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_Z85_LENGTH = 40
_THREAD = "zap-authenticator"
_MAX_REFUSALS_LOGGED = 100

_logger = logging.getLogger("paramserver.keys")


def make_keys(folder: str | Path, client: str | None = None) -> list[Path]:
    """Create the keys of a run and of one client, or of a further client.

    Without the name of a ``client`` (None) the keys of the run must not exist yet, and the client is named ``client``.
    Return the files written. Files with secrets are readable by their owner alone.

    Raises:
        UnsupportedConfiguration: the keys exist already, and keys are never overwritten; the name is not valid in a
            file name; or the folder cannot be written.
    """
    folder, name = Path(folder), CLIENT if client is None else client
    if not _NAME.fullmatch(name) or name == SERVER:
        raise UnsupportedConfiguration(
            f"--client ({name}) must be letters, digits, _, - and . and not {SERVER}; choose another name"
        )
    pairs = [_key_pair(folder, name)]
    if client is None or not (folder / f"{SERVER}{_PUBLIC}").exists():
        pairs.insert(0, _key_pair(folder, SERVER))
    # All files are looked for before the first is written, so that a refusal leaves the folder as it was.
    existing = [file for pair in pairs for file in pair if file.exists()]
    if existing:
        raise UnsupportedConfiguration(
            f"{existing[0]} must not be there yet, keys are never overwritten; name another folder, or add a client "
            "with --client NAME"
        )
    try:
        for public, _ in pairs:
            public.parent.mkdir(parents=True, exist_ok=True)
        return [file for public, secret in pairs for file in _write_pair(public, secret)]
    except OSError as error:
        raise UnsupportedConfiguration(f"{folder} cannot be written ({error.strerror}); name another folder") from error


def _key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    public_folder = folder if name == SERVER else folder / _CLIENTS
    return public_folder / f"{name}{_PUBLIC}", folder / f"{name}{_SECRET}"


def _write_pair(public: Path, secret: Path) -> tuple[Path, Path]:
    public_key, secret_key = (key.decode() for key in zmq.curve_keypair())
    public_line = f'    public-key = "{public_key}"\n'
    # The secret first: if writing stops in between, no public key without a secret blocks the next try.
    _write(secret, 0o600, f'# Keep this file to yourself.\ncurve\n{public_line}    secret-key = "{secret_key}"\n')
    _write(public, 0o644, f"curve\n{public_line}")
    return public, secret


def _write(file: Path, mode: int, text: str) -> None:
    # The mode is set when the file is created: a chmod afterwards would leave the secret readable for a moment.
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="ascii") as opened:
        opened.write(text)


def _read(file: Path, *, secret: bool) -> tuple[bytes, bytes]:
    """Public and secret key; the second is empty unless ``secret``."""
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


def find_client_key(keys: str | Path) -> Path:
    """The secret key that a client uses: the named file, or ``client.key_secret`` of a folder, or its only one.

    Raises:
        UnsupportedConfiguration: there is none, or more than one.
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


def secure_client_socket(socket: zmq.Socket[Any], keys: str | Path | None) -> None:
    """Encrypt a client's socket and authenticate both sides. Call it before the socket connects.

    ``keys`` is their folder, or a client's secret key file with server.key in the same folder; None = no effect.

    Raises:
        UnsupportedConfiguration: the keys do not exist or cannot be read.
    """
    if keys is not None:
        secret = find_client_key(keys)
        _set_keys(socket, secret, secret.parent)


def secure_trainer_socket(socket: zmq.Socket[Any], keys: str | Path | None) -> None:
    """Secure the socket of a process of the run itself, which has the run's own secret key."""
    if keys is not None:
        _set_keys(socket, Path(keys) / f"{SERVER}{_SECRET}", Path(keys))


def _set_keys(socket: zmq.Socket[Any], secret: Path, folder: Path) -> None:
    # libzmq reads these options when the socket connects: set later, they have no effect on that connection.
    socket.curve_publickey, socket.curve_secretkey = _read(secret, secret=True)
    socket.curve_serverkey, _ = _read(folder / f"{SERVER}{_PUBLIC}", secret=False)


class ServerSecurity(AbstractContextManager["ServerSecurity"]):
    """Authorizes clients by their keys. Owns the thread ``zap-authenticator``; close it before the context.

    The folder of public keys is read at each handshake. A client that is added may connect at once; one whose file is
    removed keeps the connections that it has and gets no new one. The context has no other one. Without ``keys`` (None)
    every client may connect, without encryption.

    Raises:
        UnsupportedConfiguration: the keys do not exist or cannot be read.
    """

    def __init__(self, context: zmq.Context[Any], keys: str | Path | None) -> None:
        self._authenticator: ThreadAuthenticator | None = None
        self._refused: set[bytes] = set()
        if keys is None:
            return
        self._clients = Path(keys) / _CLIENTS
        # Read once: the sockets keep these keys. Those of clients are read at each handshake.
        self._public, self._secret = _read(Path(keys) / f"{SERVER}{_SECRET}", secret=True)
        from zmq.auth.thread import ThreadAuthenticator

        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.configure_curve_callback(_DOMAIN, self)
        self._authenticator.start()
        self._authenticator.thread.name = _THREAD

    def protect(self, socket: zmq.Socket[Any]) -> None:
        """Require encryption and a known key on a socket. Call it before the socket is bound."""
        if self._authenticator is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
            socket.zap_domain = _DOMAIN.encode()
            # Without this option libzmq accepts every client while no authenticator thread runs.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this public key may connect; pyzmq calls it in the authenticator thread."""
        # The run's own key too: its trainers connect with it.
        known = key == self._public or any(self._holds(file, key) for file in self._clients.glob(f"*{_PUBLIC}"))
        # Limited, as a stranger can make any number of keys. The set is used by the authenticator thread alone.
        if not known and key not in self._refused and len(self._refused) < _MAX_REFUSALS_LOGGED:
            self._refused.add(key)
            _logger.warning("a client with the unknown key %s was refused", key.decode())
        return known

    def _holds(self, file: Path, key: bytes) -> bool:
        # Must not raise: an exception would end the authenticator thread, and with it every later handshake.
        try:
            return _read(file, secret=False)[0] == key
        except UnsupportedConfiguration as error:
            _logger.warning("%s", error)
            return False

    def close(self) -> None:
        """End the thread; later handshakes fail."""
        if self._authenticator is not None:
            self._authenticator.stop()

    def __exit__(self, *exception: object) -> None:
        self.close()

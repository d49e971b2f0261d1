"""The job token, which ranks that connect to rank 0 prove: a file, or an environment variable of this process."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from paramserver.errors import UnsupportedConfiguration

TOKEN_VARIABLE = "PARAMSERVER_TOKEN"

# Fewer can be guessed from a recorded proof.
_MIN_BYTES = 16
_MAX_BYTES = 4096
_MAKE = "make one with: (umask 077; openssl rand -hex 32 > FILE)"


@dataclass(frozen=True)
class JobToken:
    """A secret of all ranks of a run. Its text form does not show it."""

    source: str
    secret: bytes = field(repr=False)

    def sign(self, purpose: str, data: bytes) -> bytes:
        """Return the HMAC-SHA256 of ``data`` for one purpose. That of another purpose is not valid for it."""
        return hmac.digest(self.secret, f"paramserver {purpose}\0".encode() + data, hashlib.sha256)


def read_token(token_file: str | None, environ: Mapping[str, str]) -> JobToken | None:
    """Return the token of the environment, else that of ``cluster.token_file``; None if neither is given.

    Raises:
        UnsupportedConfiguration: the token is too short or too long, or other users can read or replace its file.
    """
    if TOKEN_VARIABLE in environ:
        source, secret = TOKEN_VARIABLE, os.fsencode(environ[TOKEN_VARIABLE]).strip()
    elif token_file is not None:
        source, secret = f"cluster.token_file ({token_file})", _read_private(Path(token_file)).strip()
    else:
        return None
    if not _MIN_BYTES <= len(secret) <= _MAX_BYTES:
        raise UnsupportedConfiguration(f"{source} must hold a token of {_MIN_BYTES} to {_MAX_BYTES} bytes; {_MAKE}")
    return JobToken(source, secret)


def hide_token(environ: MutableMapping[str, str]) -> None:
    """Remove the token from the environment of a rank that has read it: processes that it starts do not need it."""
    environ.pop(TOKEN_VARIABLE, None)


def _read_private(file: Path) -> bytes:
    name = f"cluster.token_file ({file})"
    try:
        # O_NONBLOCK: opening a FIFO does not wait. The open file is checked: the path may be replaced meanwhile.
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UnsupportedConfiguration(f"{name} must be a regular file; {_MAKE}")
            if status.st_uid != os.geteuid():
                raise UnsupportedConfiguration(
                    f"{name} must belong to the user of this process (uid {os.geteuid()}, not {status.st_uid}); make "
                    "a copy of your own, with mode 600"
                )
            if mode := stat.S_IMODE(status.st_mode) & 0o077:
                raise UnsupportedConfiguration(
                    f"{name} must be closed to other users (mode 600, without {mode:03o}); run: chmod 600 {file}"
                )
            return opened.read(_MAX_BYTES + 2)
    except OSError as error:
        raise UnsupportedConfiguration(f"{name} cannot be read ({error.strerror or error}); {_MAKE}") from error

"""The secret that a sidecar's process and its drivers share (H61): a file that only its owner can read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from protocol.wire.handshake import SECRET_BYTES_MIN
from spark_bridge.errors import SidecarError

__all__ = ["read_or_make_secret", "read_secret"]

SECRET_BYTES = 32


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """Raises ``SidecarError`` for a file that is not there, too short, or open to others."""
    file = Path(path)
    try:
        mode = file.stat().st_mode
        secret = bytes.fromhex(file.read_text(encoding="ascii").strip())
    except (OSError, ValueError) as error:
        raise SidecarError(
            f"the secret cannot be read from {file}: {error}; it is made by the sidecar's process when that starts "
            "first, and a driver on another machine needs a copy of it"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise SidecarError(f"{file} may be read or written by others than its owner: chmod 600 {file}")
    if len(secret) < SECRET_BYTES_MIN:
        raise SidecarError(f"{file} holds {len(secret)} bytes of secret, fewer than {SECRET_BYTES_MIN}: remove it")
    return secret


def read_or_make_secret(path: str | os.PathLike[str]) -> bytes:
    """Like ``read_secret``; a file that is not there is made, with a random secret."""
    file = Path(path)
    if not file.exists():
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:  # another process was faster
            return read_secret(file)
        except OSError as error:
            raise SidecarError(f"the secret cannot be written to {file}: {error}") from error
        with os.fdopen(descriptor, "w", encoding="ascii") as new:
            new.write(secrets.token_hex(SECRET_BYTES) + "\n")
    return read_secret(file)

# SPDX-License-Identifier: Apache-2.0

"""The secret that a sidecar's process and its drivers share (H61), in a file that only its owner can read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from protocol.wire.keys import SECRET_BYTES_MIN
from spark_bridge.errors import SidecarError

__all__ = ["read_or_make_secret", "read_secret"]

SECRET_BYTES = 32


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """Read the secret. Raises ``SidecarError`` if the file is missing, too short, or accessible to others."""
    file = Path(path)
    try:
        mode = file.stat().st_mode
        secret = bytes.fromhex(file.read_text(encoding="ascii").strip())
    except (OSError, ValueError) as error:
        raise SidecarError(
            f"cannot read the secret from {file}: {error}. The sidecar's process creates it when it starts for the "
            "first time; a driver on another machine needs a copy"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise SidecarError(f"{file} is accessible to other users: run chmod 600 {file}")
    if len(secret) < SECRET_BYTES_MIN:
        raise SidecarError(
            f"{file} holds a secret of {len(secret)} bytes, fewer than {SECRET_BYTES_MIN}: delete it, and "
            "the sidecar's process creates a new one"
        )
    return secret


def read_or_make_secret(path: str | os.PathLike[str]) -> bytes:
    """Like ``read_secret``, but create a missing file with a random secret."""
    file = Path(path)
    if not file.exists():
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:  # another process was faster
            return read_secret(file)
        except OSError as error:
            raise SidecarError(f"cannot write the secret to {file}: {error}; choose another --secret-file") from error
        with os.fdopen(descriptor, "w", encoding="ascii") as new:
            new.write(secrets.token_hex(SECRET_BYTES) + "\n")
    return read_secret(file)

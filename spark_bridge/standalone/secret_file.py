# SPDX-License-Identifier: Apache-2.0

"""The secret that a sidecar's process and its drivers share (H61), in a file that only its owner can read."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from protocol.wire.keys import KEY_BYTES, SECRET_BYTES_MIN
from spark_bridge.common.errors import SidecarError
from spark_bridge.common.regular_files import read_small

__all__ = ["read_or_make_secret", "read_secret"]


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """Read the secret.

    Raises ``SidecarError`` if the file is missing, too short, accessible to others, or belongs to another user.
    """
    file = Path(path)
    try:
        content, status = read_small(file)
    except (OSError, ValueError) as error:
        raise SidecarError(
            f"cannot read the secret from {file}: {error}. The sidecar's process creates it when it starts for the "
            "first time; a driver on another machine needs a copy"
        ) from error
    try:
        secret = bytes.fromhex(content.decode("ascii").strip())
    except ValueError:
        raise SidecarError(
            f"cannot read the secret from {file}: it is not what a sidecar wrote, which is one line of hexadecimal "
            "digits. Pass the sidecar's secret file; or delete this one, and the sidecar's process creates a new one"
        ) from None
    if status.st_uid not in (os.geteuid(), 0):
        raise SidecarError(
            f"{file} belongs to another user (uid {status.st_uid}), who could change the secret: copy it to a file "
            "that belongs to you"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise SidecarError(f"{file} is accessible to other users: run chmod 600 {file}")
    if len(secret) < SECRET_BYTES_MIN:
        raise SidecarError(
            f"{file} holds a secret of {len(secret)} bytes, fewer than {SECRET_BYTES_MIN}: delete it, and "
            "the sidecar's process creates a new one"
        )
    return secret


def read_or_make_secret(path: str | os.PathLike[str]) -> bytes:
    """Like ``read_secret``, but create a missing file with a random secret.

    The file appears with its whole content, so processes that start at the same time all read the same secret.
    """
    file = Path(path)
    if not file.exists():
        try:
            _make(file)
        except OSError as error:
            raise SidecarError(f"cannot write the secret to {file}: {error}; choose another --secret-file") from error
    return read_secret(file)


def _make(file: Path) -> None:
    written = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as new:
            new.write(secrets.token_hex(KEY_BYTES) + "\n")
        with suppress(FileExistsError):  # another process was faster: its secret is used
            os.link(written, file)
    finally:
        written.unlink()

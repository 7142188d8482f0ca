# SPDX-License-Identifier: Apache-2.0

"""Reading files that a user names: a pipe or a device would make the reader wait, or never end."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO, cast

__all__ = ["open_regular", "read_small"]

SMALL_BYTES_MAX = 4_096


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading, without a buffer. Raises ``OSError``, also for a pipe, a device and the like."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for its other end
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return cast("BinaryIO", open(descriptor, "rb", buffering=0))


def read_small(path: str | os.PathLike[str], bytes_max: int = SMALL_BYTES_MAX) -> tuple[bytes, os.stat_result]:
    """The content of a regular file, and its status. Raises ``OSError``, also if it has more than ``bytes_max``."""
    with open_regular(path) as file:
        content = file.read(bytes_max + 1)
        if len(content) > bytes_max:
            raise OSError(errno.EFBIG, f"it has more than {bytes_max} bytes")
        return content, os.fstat(file.fileno())

# SPDX-License-Identifier: Apache-2.0

"""Folders on an executor's local disk that only this user can read, in the directory that Spark removes at its end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["executor_folder", "private_folder"]

_PRIVATE = 0o700


def executor_folder(name: str) -> Path | None:
    """A folder that the processes of this executor share. None outside of one, or if its directory cannot be used."""
    local = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0]
    if not os.path.basename(local).startswith("blockmgr-"):  # not one that Spark removes with the executor
        return None
    return private_folder(Path(local, name))


def private_folder(folder: Path) -> Path | None:
    """Make this folder, if it is missing. None if that is not possible, or if others could have access to it."""
    try:
        folder.mkdir(_PRIVATE, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == _PRIVATE
    return folder if mine else None

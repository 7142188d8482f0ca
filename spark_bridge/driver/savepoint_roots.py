# SPDX-License-Identifier: Apache-2.0

"""Where savepoints may be written."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Collection

from spark_bridge.common.errors import SidecarError

__all__ = ["check_savepoint_directory"]


def check_savepoint_directory(directory: str | os.PathLike[str], roots: Collection[str | os.PathLike[str]]) -> None:
    """Raise ``SidecarError`` unless ``directory`` is one of ``roots``, or lies below one.

    Links in local paths are followed first, so a link below a root does not lead out of it. May block.
    """
    place = _resolved(directory)
    if not any(place == root or place.startswith(root.rstrip("/") + "/") for root in map(_resolved, roots)):
        allowed = ", ".join(sorted(os.fspath(root) for root in roots)) or "none"
        raise SidecarError(
            f"this sidecar does not write savepoints into {os.fspath(directory)}: its configuration allows {allowed}. "
            "Add the directory to StorageDetails.savepoint_roots, or to --savepoint-root of a sidecar process"
        )


def _resolved(place: str | os.PathLike[str]) -> str:
    text = os.fspath(place)
    scheme, separator, path = text.partition("://")
    if not separator or scheme in ("file", "local"):
        return os.path.realpath(path if separator else text)
    return f"{scheme}://{posixpath.normpath(path)}"

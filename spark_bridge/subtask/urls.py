# SPDX-License-Identifier: Apache-2.0

"""The filesystem of a URL, for sources and sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spark_bridge.subtask.bootstrap import ensure_importable

__all__ = ["filesystem_of"]


def filesystem_of(url: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """Return the filesystem of ``url``, and the path in it. ``options`` are the arguments for the filesystem.

    Raises ``ValueError`` if fsspec knows no such filesystem, or ``ImportError`` if its package is missing; the text
    says what to do.
    """
    ensure_importable("fsspec")
    from fsspec.core import url_to_fs

    try:
        filesystem, path = url_to_fs(url, **(options or {}))
    except (ValueError, ImportError) as error:
        kind = ImportError if isinstance(error, ImportError) else ValueError
        raise kind(
            f"cannot use {url}: {error}. Correct the URL, or install the package of its filesystem (s3fs, gcsfs, "
            "adlfs, ...) on the driver and the executors"
        ) from error
    return filesystem, str(path)

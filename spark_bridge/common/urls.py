# SPDX-License-Identifier: Apache-2.0

"""The filesystem of a URL, for sources and sinks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from protocol.arguments import given
from spark_bridge.common.bootstrap import ensure_importable
from spark_bridge.common.secret_texts import Secrets, check_no_password

__all__ = ["check_absolute", "filesystem_of"]


def check_absolute(url: str, *, name: str = "url", error: type[ValueError] = ValueError) -> None:
    """Raise ``error`` for a relative path, which would mean another place in each process."""
    check_no_password(url, name, "give it in options", error)
    if "\0" in url or ("://" not in url and not os.path.isabs(url)):
        raise error(
            f"{name} must be an absolute path or a URL, because executors have other working directories, not "
            f"{given(name, url)}"
        )


def filesystem_of(url: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str, Secrets]:
    """Return the filesystem of ``url``, the path in it, and what its errors must not show.

    ``options`` are the arguments for the filesystem. Use it as ``secrets.guarding(filesystem)``.

    Raises ``ValueError`` if fsspec knows no such filesystem, or ``ImportError`` if its package is missing; the text
    says what to do.
    """
    ensure_importable("fsspec")
    import fsspec
    from fsspec.core import url_to_fs

    def hint(text: str) -> str:
        return (
            f"cannot use {url}: {text}. Correct the URL, or install the package of its filesystem (s3fs, gcsfs, "
            "adlfs, ...) on the driver and the executors"
        )

    check_no_password(url, "url", "give it in options")
    secrets = Secrets("options", options or {})
    with (
        secrets.kept(ImportError, lambda text: ImportError(hint(text))),
        secrets.kept(ValueError, lambda text: ValueError(hint(text))),
        secrets.kept(),
    ):
        if "://" not in url or url.startswith("file://"):  # its "::" is part of a name, and begins no chain
            filesystem = fsspec.filesystem("file", **(options or {}))
            path = filesystem._strip_protocol(url)
        else:
            filesystem, path = url_to_fs(url, **(options or {}))
    return filesystem, str(path), secrets

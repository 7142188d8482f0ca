# SPDX-License-Identifier: Apache-2.0

"""The list of the files of a state (pure): a handle vouches for it, and it vouches for each file (H191).

It is JSON, in exactly one notation: other bytes are not a manifest. Paths are those in the folder of the state, with
slashes, sorted. Names are those in the storage, relative to the folder of states. Several paths may have one name.

```
{"files":[[PATH,SIZE,SHA256,NAME],...],"headgate":"state files","key_groups":[FIRST,END,ALL],"total":BYTES,"version":1}
```
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import sha256
from typing import Any, NamedTuple

from protocol.wire.state_handles import (
    FILES_MAX,
    MANIFEST_BYTES_MAX,
    KeyGroupRange,
    StateHandle,
    check_file_name,
)

PATH_BYTES_MAX = 1_024
_PART_BYTES_MAX = 255
_VERSION = 1


class StoredFile(NamedTuple):
    """A file of a state: its path in the folder, its content, and the name of that in the storage."""

    path: str
    size: int
    sha256: bytes
    name: str


def encode_manifest(files: Iterable[StoredFile], key_groups: KeyGroupRange | None) -> bytes:
    """The bytes of a manifest. Raises ``ValueError`` with the rest of a sentence if they would be refused."""
    listed = sorted(files)
    _check_files(listed)
    data = json.dumps(
        {
            "files": [[one.path, one.size, one.sha256.hex(), one.name] for one in listed],
            "headgate": "state files",
            "key_groups": list(key_groups) if key_groups else None,
            "total": sum(one.size for one in listed),
            "version": _VERSION,
        },
        separators=(",", ":"),
    ).encode("ascii")
    if len(data) > MANIFEST_BYTES_MAX:
        raise ValueError(f"must have a list of at most {MANIFEST_BYTES_MAX} bytes, has {len(data)}")
    return data


def decode_manifest(data: bytes, handle: StateHandle) -> tuple[StoredFile, ...]:
    """The files in a manifest. Raises ``ValueError`` with the rest of a sentence unless the handle vouches for it."""
    if len(data) != handle.size or sha256(data).digest() != handle.sha256:
        raise ValueError("is damaged: size or SHA-256 are not those that were stored")
    try:
        found = json.loads(data)
        files = tuple(_file(one) for one in found["files"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError("is not a list of files") from None
    if encode_manifest(files, handle.key_groups) != data:
        raise ValueError("is not written as Headgate writes it, or has other key groups than its handle")
    if (len(files), sum(one.size for one in files)) != (handle.files, handle.total_bytes):
        raise ValueError("has another number of files or bytes than its handle")
    return files


def _file(entry: Any) -> StoredFile:
    path, size, digest, name = entry
    if type(path) is not str or type(size) is not int or type(digest) is not str or type(name) is not str:
        raise TypeError
    return StoredFile(path, size, bytes.fromhex(digest), name)


def _check_files(files: list[StoredFile]) -> None:
    if len(files) > FILES_MAX:
        raise ValueError(f"must have at most {FILES_MAX} files, has {len(files)}")
    paths: set[str] = set()
    contents: dict[str, tuple[int, bytes]] = {}
    for one in files:
        problem = _problem_of_path(one.path)
        if problem:
            raise ValueError(f"has the path {one.path!r:.300}, which {problem}")
        if one.path in paths:
            raise ValueError(f"has the path {one.path!r:.300} twice")
        paths.add(one.path)
        if one.size < 0 or len(one.sha256) != sha256().digest_size:
            raise ValueError(f"has {one.path!r:.300} with an impossible size or digest")
        try:
            check_file_name(one.name)
        except ValueError as error:
            raise ValueError(f"has {one.path!r:.300} under a name that {error}") from None
        if contents.setdefault(one.name, (one.size, one.sha256)) != (one.size, one.sha256):
            raise ValueError(f"has two contents under the name {one.name}")
    for path in paths:
        above = path
        while above := above.rpartition("/")[0]:
            if above in paths:
                raise ValueError(f"has {above!r:.300} both as a file and as a folder")


def _problem_of_path(path: str) -> str:
    """Why a file of a restored state cannot have this path; empty if it can."""
    if path.startswith("/"):
        return "is not relative"
    try:
        parts = [part.encode("utf-8", "surrogateescape") for part in path.split("/")]
    except UnicodeEncodeError:
        return "no filesystem can have"
    if any(part in (b"", b".", b"..") for part in parts):
        return "leads to another folder"
    if b"\0" in b"".join(parts) or max(map(len, parts)) > _PART_BYTES_MAX or len(b"/".join(parts)) > PATH_BYTES_MAX:
        return "no filesystem can have"
    return ""

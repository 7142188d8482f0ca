# SPDX-License-Identifier: Apache-2.0

"""The handle of a state that is in files: all that goes through the driver of it, some 80 bytes (H190).

A task stores the files itself, and beside them a *manifest* that lists them. The handle names the manifest, with its
size and digest. So what is restored can be verified from here on: the handle vouches for the manifest, and the manifest
for each file (H191).

```
byte  0         version
bytes 1..8      size of the manifest, u64 big-endian, like all numbers here
bytes 9..40     SHA-256 of the manifest
bytes 41..48    how many bytes all files have together, u64
bytes 49..52    how many files there are, u32
                version 1: 4 bytes, which are 0 and are ignored: the state is not divided into key groups
                version 2: the first of its key groups, the one after the last, and how many there are in all; then the
                first one that counts here, and the one after the last that does; u16 each
                the manifest's name, ASCII
```

After a change of the parallelism, a subtask may restore a *piece*: those of the key groups in the files that lie in its
own range. The others count elsewhere. A task acknowledges whole states only.

A name is relative to the folder that has the state's files, so that a copy of the folder works at another place. A
handle may come from a task or from a file, so a name can point to nothing outside of that folder.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, NamedTuple

from protocol.describing import type_name

__all__ = [
    "FILES_MAX",
    "FILE_NAME_CHARS_MAX",
    "HANDLE_BYTES_MAX",
    "KEY_GROUPS_MAX",
    "MANIFEST_BYTES_MAX",
    "KeyGroupRange",
    "StateHandle",
    "check_file_name",
    "pack_handle",
    "pack_piece",
    "unpack_handle",
    "unpack_piece",
]

UNDIVIDED, DIVIDED = 1, 2
"""The versions."""
FILE_NAME_CHARS_MAX = 200
KEY_GROUPS_MAX = 2**15
MANIFEST_BYTES_MAX = 2**27
"""The size limit of a manifest, which is completely in memory while it is read."""
FILES_MAX = 2**18
"""The size limit of a state: more files would take longer to list than to read."""
TOTAL_BYTES_MAX = 2**63 - 1
DIGEST_BYTES = 32

_HEAD = Struct(">BQ32sQI")
_GROUPS = {UNDIVIDED: Struct(">HH"), DIVIDED: Struct(">HHHHH")}
_BYTES_MIN = _HEAD.size + _GROUPS[UNDIVIDED].size + 1
HANDLE_BYTES_MAX = _HEAD.size + _GROUPS[DIVIDED].size + FILE_NAME_CHARS_MAX
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.=-")


class KeyGroupRange(NamedTuple):
    """The first of the groups whose keys a state has, the one after the last, and how many groups there are in all."""

    first: int
    end: int
    total: int


class StateHandle(NamedTuple):
    """A state in files.

    ``manifest``: its name. ``size`` and ``sha256``: of the manifest. ``total_bytes``: of all files together. ``files``:
    how many these are. ``key_groups``: those whose keys the state has; None if it is not divided into groups.
    """

    manifest: str
    size: int
    sha256: bytes
    total_bytes: int
    files: int
    key_groups: KeyGroupRange | None = None


def check_file_name(name: Any) -> str:
    """Return the name. Raises ``ValueError`` with the rest of a sentence unless it is the name of a file below the
    folder of the state's files."""
    if type(name) is not str:
        raise ValueError(f"must be a string, is {type_name(name)}")
    if not 0 < len(name) <= FILE_NAME_CHARS_MAX:
        raise ValueError(f"must have 1 to {FILE_NAME_CHARS_MAX} characters, has {len(name)}")
    if not all(map(_is_part, name.split("/"))):
        raise ValueError(f"must be a relative path of letters, digits, '_', '.', '=' and '-', is {name!r}")
    return name


def _is_part(part: str) -> bool:
    """Whether this may stand between two slashes."""
    return part not in ("", ".", "..") and _LETTERS.issuperset(part)


def pack_handle(handle: StateHandle) -> bytes:
    """Return the bytes of a handle. Raises ``ValueError`` for one that ``unpack_handle`` would refuse."""
    return pack_piece(handle, None)


def pack_piece(handle: StateHandle, groups: tuple[int, int] | None) -> bytes:
    """Return the bytes of a handle of which only some key ``groups`` count; of all of it if None."""
    _check(handle, groups)
    whole = handle.key_groups
    version, numbers = (UNDIVIDED, (0, 0)) if whole is None else (DIVIDED, (*whole, *(groups or (0, 0))))
    head = _HEAD.pack(version, handle.size, handle.sha256, handle.total_bytes, handle.files)
    return head + _GROUPS[version].pack(*numbers) + handle.manifest.encode("ascii")


def unpack_handle(data: bytes) -> StateHandle:
    """Return the handle in some bytes. Raises ``ValueError`` with the rest of a sentence if there is none."""
    handle, groups = unpack_piece(data)
    if groups is not None:
        raise ValueError("must be a handle of a whole state, is one of a piece")
    return handle


def unpack_piece(data: bytes) -> tuple[StateHandle, tuple[int, int] | None]:
    """Return a handle and those of its key groups that count; None if it was not cut."""
    if not _BYTES_MIN <= len(data) <= HANDLE_BYTES_MAX:
        raise ValueError(f"must have {_BYTES_MIN} to {HANDLE_BYTES_MAX} bytes, has {len(data)}")
    version, size, sha256, total_bytes, files = _HEAD.unpack_from(data)
    groups = _GROUPS.get(version)
    if groups is None:
        raise ValueError(f"must be a handle of version {UNDIVIDED} or {DIVIDED}, is one of version {version}")
    at = _HEAD.size + groups.size
    if at >= len(data):
        raise ValueError("must name its manifest")
    numbers = groups.unpack_from(data, _HEAD.size)
    try:
        manifest = data[at:].decode("ascii")
    except UnicodeDecodeError:
        raise ValueError("must name its manifest in ASCII") from None
    handle, piece = StateHandle(manifest, size, sha256, total_bytes, files), None
    if version == DIVIDED:
        handle = handle._replace(key_groups=KeyGroupRange(*numbers[:3]))
        piece = numbers[3:] if any(numbers[3:]) else None
    _check(handle, piece)
    return handle, piece


def _check(handle: Any, groups: Any) -> None:
    if type(handle) is not StateHandle:
        raise ValueError(f"must be a StateHandle, is {type_name(handle)}")
    try:
        check_file_name(handle.manifest)
    except ValueError as error:
        raise ValueError(f"must name its manifest: the name {error}") from None
    _check_number("the size of its manifest", handle.size, 1, MANIFEST_BYTES_MAX)
    _check_number("the size of its files", handle.total_bytes, 0, TOTAL_BYTES_MAX)
    _check_number("the number of its files", handle.files, 0, FILES_MAX)
    if type(handle.sha256) is not bytes or len(handle.sha256) != DIGEST_BYTES:
        raise ValueError(f"must have a digest of {DIGEST_BYTES} bytes")
    if handle.key_groups is None:
        if groups is not None:
            raise ValueError("must have key groups, because it is a piece")
        return
    low, high, total = handle.key_groups
    _check_number("how many key groups there are", total, 1, KEY_GROUPS_MAX)
    _check_number("the first of its key groups", low, 0, total - 1)
    _check_number("the end of its key groups", high, low + 1, total)
    if groups is not None:
        _check_number("the first key group that counts", groups[0], low, high - 1)
        _check_number("the end of the key groups that count", groups[1], groups[0] + 1, high)


def _check_number(what: str, number: Any, least: int, most: int) -> None:
    if type(number) is not int or not least <= number <= most:
        raise ValueError(f"must say {what} as an integer from {least} to {most}, not {number!r:.40}")

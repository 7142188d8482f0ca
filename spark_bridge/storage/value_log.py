# SPDX-License-Identifier: Apache-2.0

"""The values of a durable cache: a log of files, each of which appears whole and is never changed (H162, H183).

A file holds the entries that were written together. A later file wins over an earlier one. If there are too many files,
or too much in them is of no use any more, the newest ones are merged: what the cache still has is written again, and
then they are deleted. So whatever is killed between two steps, each entry is in a file.

Files are written only while this application holds the storage, which ``Claims`` checks before and after each one.
Names have a random token, so no two applications ever write the same file. One that has lost the storage takes back
what it was writing, and deletes nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

from spark_bridge.storage.claims import Claims
from spark_bridge.storage.errors import StorageError
from spark_bridge.storage.files import Files
from spark_bridge.storage.layout import parse_values, values_name

Entry = tuple[bytes, bytes]

MAGIC = b"headgate values 1\n"
_SIZES = Struct(">II")
_DIGEST_BYTES = sha256().digest_size
FILES_MAX = 32
MERGED_BYTES_MAX = 64 * 2**20
"""About how much one file holds at most."""
_WASTE_BYTES = 16 * 2**20
_FILE_BYTES_MAX = 2**31
_LOOKS_MAX = 5


class _File(NamedTuple):
    name: str
    size: int
    keys: tuple[bytes, ...]


class ValueLog:
    """The log of one cache. All methods block, and are called one at a time."""

    def __init__(self, files: Files, claims: Claims, folder: str) -> None:
        self._files = files
        self._claims = claims
        self._folder = folder
        self._known: list[_File] = []  # the oldest first
        self._last = 0

    def load(self) -> list[Entry]:
        """Return all entries, the oldest first; a key may come again with a later value.

        Raises ``StorageError`` for a damaged file, naming it.
        """
        for _ in range(_LOOKS_MAX):
            self._claims.check()
            try:
                return self._read_all()
            except FileNotFoundError:  # an application that has lost the storage was just merging
                continue
        raise StorageError(f"{self._files.name_of(self._folder)}: another application keeps deleting files; try again")

    def append(self, entries: Iterable[Entry]) -> None:
        """Write entries durably, all or none. Raises ``StorageFenced`` if a later application has taken over."""
        self._known.append(self._write(list(entries)))

    def merge_if_due(self, value_of: Callable[[bytes], bytes | None], live_bytes: int) -> None:
        """Write fewer and smaller files, if that is worth it.

        ``value_of`` says what the cache still has, and ``live_bytes`` how much that is.
        """
        sizes = [file.size for file in self._known]
        if sum(sizes) > 2 * live_bytes + _WASTE_BYTES:
            first = 0
        elif len(sizes) <= FILES_MAX + live_bytes // MERGED_BYTES_MAX:
            return
        else:  # those before are at least twice as large: an entry is written again only so often
            first, total = len(sizes) - 1, sizes[-1]
            while first > 0 and sizes[first - 1] <= min(2 * total, MERGED_BYTES_MAX):
                first -= 1
                total += sizes[first]
            if first == len(sizes) - 1:
                first = 0
        old = self._known[first:]
        keys = dict.fromkeys(key for file in old for key in file.keys)
        kept = [(key, value) for key in keys if (value := value_of(key)) is not None]
        merged = [self._write(one) for one in _in_parts(kept)]
        self._known[first:] = merged
        for file in old:
            self._claims.check()
            self._files.remove(self._path(file.name))

    def _read_all(self) -> list[Entry]:
        known, entries = [], []
        for name in self._files.names(self._folder):
            if name.endswith(".tmp") and parse_values(name.removesuffix(".tmp")):  # its writer is dead, or fenced
                self._files.remove(self._path(name))
        names = sorted((number, name) for name in self._files.names(self._folder) if (number := parse_values(name)))
        for number, name in names:
            size, found = self._read(self._path(name))
            known.append(_File(name, size, tuple(key for key, _ in found)))
            entries += found
            self._last = max(self._last, number)
        self._known = known
        return entries

    def _read(self, path: str) -> tuple[int, list[Entry]]:
        name = self._files.name_of(path)

        def check_head(head: bytes, size: int) -> None:
            if head != MAGIC or size > _FILE_BYTES_MAX:
                raise StorageError(f"{name}: it is not a file of a cache, or of a later release: {_ADVICE}")

        data = self._files.read(path, head_bytes=len(MAGIC), check_head=check_head)
        body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if sha256(body).digest() != digest:
            raise StorageError(f"{name}: it is damaged, because its digest does not match: {_ADVICE}")
        try:
            return len(data), list(_entries(body))
        except StructError as error:
            raise StorageError(f"{name}: it is damaged ({error}): {_ADVICE}") from error

    def _write(self, entries: list[Entry]) -> _File:
        self._last += 1
        name = values_name(self._last, secrets.token_hex(8))
        body = b"".join([MAGIC, *(part for entry in entries for part in (_SIZES.pack(*map(len, entry)), *entry))])
        data = body + sha256(body).digest()
        self._files.make_folder(self._folder)
        self._files.write_new(self._path(name), data, self._claims.check)
        return _File(name, len(data), tuple(key for key, _ in entries))

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"


_ADVICE = "restore it from a backup, or delete it, and its values are computed again"


def _entries(body: bytes) -> Iterator[Entry]:
    place = len(MAGIC)
    while place < len(body):
        key_size, value_size = _SIZES.unpack_from(body, place)
        place += _SIZES.size
        yield body[place : place + key_size], body[place + key_size : place + key_size + value_size]
        place += key_size + value_size


def _in_parts(entries: list[Entry]) -> Iterator[list[Entry]]:
    part: list[Entry] = []
    size = 0
    for key, value in entries:
        part.append((key, value))
        size += len(key) + len(value)
        if size >= MERGED_BYTES_MAX:
            yield part
            part, size = [], 0
    if part:
        yield part

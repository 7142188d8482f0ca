# SPDX-License-Identifier: Apache-2.0

"""Values by key in an embedded store, whose state in files is divided by key groups (H52, H190).

The store is RocksDB, from the package ``rocksdict``. In it, a key begins with its group, in 2 bytes, big-endian. So a
piece of a state is one range, in which others are deleted, and which is ingested as one file. After the group there is

    the bytes of the key                                    the time when the value expires, in 8 bytes, and the value
    0x00, the time when a value expires, and its key        nothing: this says what may have expired, the oldest first

A time is in milliseconds since 1970, and 0 says that the value does not expire. An entry of the second kind counts only
if the value of its key still has that time. There is no log of the store's own: what no snapshot has is lost anyhow.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from protocol.describing import show, type_name
from protocol.errors import LocalProtocolError
from protocol.key_groups import Key, KeyGroups, decode_key, encode_key
from spark_bridge.common.extras import require
from spark_bridge.storage.state_files.values import RestoredFiles, StateFiles

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

__all__ = ["KeyedState"]

FOLDER = "keyed"
_TIME_BYTES = 8
_NEVER = bytes(_TIME_BYTES)
_TTL_S_MAX = 1e12  # some 30,000 years
_EXPIRES = b"\0"
_AFTER_ALL = b"\xff\xff"


class KeyedState:
    """Values by key, of any number, on the task's local disk. Needs the extra ``keyed``.

    Make it in ``open``, return its ``snapshot`` from ``snapshot_state``, and its ``merge`` from ``merge_files``, so
    that the parallelism may change. Close it in ``close``. ``groups``: those by which the records are sent to the
    subtasks. ``now``: the time in seconds since 1970, for values that expire.

    Keys are ``str``, ``bytes``, ``int`` of up to 64 bits, and tuples of these. Values are bytes. All methods are for
    the task's own thread.

    Raises ``ValueError`` if the restored state has another number of groups. After ``close``, every other method raises
    ``LocalProtocolError``.
    """

    def __init__(
        self, context: SubtaskContext[Any], groups: KeyGroups, *, now: Callable[[], float] = time.time
    ) -> None:
        if not isinstance(groups, KeyGroups):
            raise TypeError(
                f"groups must be KeyGroups(...), is {show(groups)}, which is of the type {type_name(groups)}"
            )
        self._context, self._groups, self._now = context, groups, now
        self._own = groups.range_of(context.subtask, context.parallelism)
        context._check_key_groups(groups)
        self._store: Any = _opened(context.state_folder / FOLDER)

    def put(self, key: Key, value: bytes, *, ttl_s: float | None = None) -> None:
        """Set the value of a key. ``ttl_s``: after so many seconds it is as if it had been deleted. None: never."""
        if type(value) is not bytes:
            raise TypeError(f"value must be bytes, is of the type {type_name(value)}: encode it first")
        if ttl_s is not None:
            if type(ttl_s) not in (int, float):
                raise TypeError(f"ttl_s must be a number of seconds or None, is of the type {type_name(ttl_s)}")
            if not 0 < ttl_s < _TTL_S_MAX:
                raise ValueError(f"ttl_s must be a positive number of seconds, is {ttl_s!r}")
        place = self._place(key)
        expires = _NEVER if ttl_s is None else self._milliseconds(ttl_s).to_bytes(_TIME_BYTES, "big")
        self._store[place] = expires + value
        if ttl_s is not None:
            self._store[place[:2] + _EXPIRES + expires + place[2:]] = b""

    def get(self, key: Key) -> bytes | None:
        """Return the value of a key, or None."""
        found: bytes | None = self._store.get(self._place(key))
        return None if found is None or self._is_over(found) else found[_TIME_BYTES:]

    def delete(self, key: Key) -> None:
        """Delete a key, if it is there."""
        del self._store[self._place(key)]

    def scan(self, prefix: Key | None = None, *, group: int | None = None) -> Iterator[tuple[Key, bytes]]:
        """Yield the keys with their values, in the order of the keys: integers, bytes, texts, tuples.

        ``prefix``: only texts or bytes that begin with it, or tuples whose first elements it has. ``group``: only keys
        of this group, which must be one of the subtask's; by default those of all of them. What changes meanwhile is
        not seen.
        """
        start = b"" if prefix is None else encode_key(prefix)
        if group is not None and group not in self._own:
            raise ValueError(
                f"subtask {self._context.subtask} has the key groups from {self._own.start} to {self._own.stop - 1}, "
                f"and not {group!r:.100}: scan one of these"
            )
        groups = self._own if group is None else [group]
        for place, found in heapq.merge(*(self._scan(one, start) for one in groups)):
            if not self._is_over(found):
                yield decode_key(place), found[_TIME_BYTES:]

    def _scan(self, group: int, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        first = group.to_bytes(2, "big")
        for place, found in self._store.items(from_key=first + max(start, b"\1")):
            if not place.startswith(first + start):
                return
            yield place[2:], found

    def expire(self) -> int:
        """Delete the values that have expired; return how many. ``snapshot`` does this too."""
        count, now = 0, self._milliseconds(0)
        for group in self._own:
            first = group.to_bytes(2, "big") + _EXPIRES
            for entry in self._store.keys(from_key=first):
                expires, key = entry[3 : 3 + _TIME_BYTES], entry[3 + _TIME_BYTES :]
                if not entry.startswith(first) or int.from_bytes(expires, "big") > now:
                    break
                place = entry[:2] + key
                if (found := self._store.get(place)) is not None and found.startswith(expires):
                    del self._store[place]
                    count += 1
                del self._store[entry]
        return count

    def snapshot(self, checkpoint_id: int, data: bytes = b"") -> StateFiles:
        """Return the state, for ``snapshot_state``. ``data`` is that of ``StateFiles``."""
        from rocksdict import Checkpoint

        self.expire()
        folder = self._context.snapshot_folder(checkpoint_id)
        self._store.flush(True)  # otherwise the checkpoint does this, and keeps the interpreter from other threads
        Checkpoint(self._store).create_checkpoint(str(folder / FOLDER))
        return StateFiles(folder, data, key_groups=self._groups)

    def close(self) -> None:
        """Close the store. Its files stay. Idempotent."""
        if not isinstance(self._store, _Closed):
            self._store.close()
            self._store = _Closed()

    @staticmethod
    def merge(pieces: Sequence[RestoredFiles]) -> bytes:
        """Make one state of several, in the folder of the first one, and return no ``data``, for ``merge_files``."""
        store = _opened(pieces[0].folder / FOLDER)
        low, high = _ends(pieces[0])
        store.delete_range(b"", low)
        store.delete_range(high, _AFTER_ALL)
        for piece in pieces[1:]:
            _ingest(store, piece)
        store.flush(True)
        store.close()
        return b""

    # --- internal -------------------------------------------------------------------------------------------------

    def _place(self, key: Key) -> bytes:
        group = self._groups.of(key)
        if group not in self._own:
            raise ValueError(
                f"the key {key!r:.100} is in group {group}, and subtask {self._context.subtask} has those from "
                f"{self._own.start} to {self._own.stop - 1}: send records to KeyGroups.subtask_of(key, parallelism)"
            )
        return group.to_bytes(2, "big") + encode_key(key)

    def _milliseconds(self, later_s: float) -> int:
        return int((self._now() + later_s) * 1000)

    def _is_over(self, found: bytes) -> bool:
        return not found.startswith(_NEVER) and int.from_bytes(found[:_TIME_BYTES], "big") <= self._milliseconds(0)


class _Closed:
    """In place of a store that is closed, whose errors would not say what to do."""

    def _refuse(self, *given: Any) -> Never:
        raise LocalProtocolError(
            "this KeyedState is closed: use it from open() to close() of the operator that has made it, and end every "
            "thread that uses it before you close it"
        )

    def __getattr__(self, name: str) -> Never:
        self._refuse()

    __delitem__ = __setitem__ = _refuse


def _opened(folder: Path) -> Any:
    require("rocksdict", "keyed")
    from rocksdict import Options, Rdict, WriteOptions

    store = Rdict(str(folder), Options(raw_mode=True))
    options: Any = WriteOptions()  # its stubs say that the attribute is a method
    options.disable_wal = True
    store.set_write_options(options)
    return store


def _ends(piece: RestoredFiles) -> tuple[bytes, bytes]:
    groups = piece.key_groups
    if groups is None:
        raise TypeError(
            "KeyedState.merge got a state without key groups, which KeyedState.snapshot did not make: restore it with "
            "the parallelism that it was taken with"
        )
    return groups.start.to_bytes(2, "big"), groups.stop.to_bytes(2, "big")


def _ingest(store: Any, piece: RestoredFiles) -> None:
    """Bring the groups of a piece into a store, as one file."""
    from rocksdict import Options, SstFileWriter

    other, (low, high) = _opened(piece.folder / FOLDER), _ends(piece)
    file, writer = str(piece.folder / "piece.sst"), None
    for place, found in other.items(from_key=low):
        if place >= high:
            break
        if writer is None:  # a file without entries cannot be ingested
            writer = SstFileWriter(Options(raw_mode=True))
            writer.open(file)
        writer[place] = found
    other.close()
    if writer is not None:
        writer.finish()
        store.ingest_external_file([file])

# SPDX-License-Identifier: Apache-2.0

"""A set of keys that takes 15 bytes for each, however long they are: what a discovering source has found (H164).

A key is known by 16 bytes of its BLAKE2b digest. Two keys with the same digest would be taken for one, and a file
would be skipped. That this happens anywhere among a billion keys has a probability of 10^-21.

The first two bytes of a digest choose a *bucket*. The bucket has a *record* of 15 bytes for each of its keys: the rest
of the digest, and the parity of the period in which the key was last seen. Buckets are immutable bytes, so a thread may
look up and mark keys while a state is encoded, and a step of that writes many buckets.

Keys can be forgotten: ``forget_unseen`` ends a period, and forgets what was never seen in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

from protocol.wire.state import Steps, encode_entry, in_chunks

_PREFIX = 2
_RECORD = 15
_REST = _RECORD - 1


class KnownKeys:
    """The set; see the module. One thread at a time changes it; others may call ``buckets`` meanwhile."""

    __slots__ = ("_buckets", "_count", "_period")

    def __init__(self) -> None:
        self._buckets: dict[bytes, bytes] = {}
        self._count = 0
        self._period = 0

    def __len__(self) -> int:
        return self._count

    @property
    def period(self) -> int:
        """The parity of the current period, for ``restore_in_steps``."""
        return self._period

    def add(self, key: Any) -> bool:
        """Add a key, and note that it is seen now. Returns whether it is new.

        A key is any value that an event can have. Raises ``EventEncodeError`` for another one.
        """
        if self.see(key):
            return False
        prefix, rest = _digest(key)
        self._buckets[prefix] = b"".join((self._buckets.get(prefix, b""), rest, bytes((self._period,))))
        self._count += 1
        return True

    def see(self, key: Any) -> bool:
        """Whether the key is known. If it is, it is seen now."""
        prefix, rest = _digest(key)
        bucket = self._buckets.get(prefix, b"")
        at = bucket.find(rest)
        while at > 0 and at % _RECORD:  # the end of one record and the beginning of the next
            at = bucket.find(rest, at + 1)
        if at < 0:
            return False
        if bucket[at + _REST] != self._period:
            self._buckets[prefix] = b"".join((bucket[: at + _REST], bytes((self._period,)), bucket[at + _RECORD :]))
        return True

    def forget_unseen(self) -> None:
        """End a period, and forget what was not seen in it. Takes some seconds for ten million keys."""
        for prefix, bucket in list(self._buckets.items()):
            seen = bucket[_REST::_RECORD].count(self._period)
            if seen * _RECORD == len(bucket):
                continue
            records = (bucket[at : at + _RECORD] for at in range(0, len(bucket), _RECORD))
            kept = b"".join(record for record in records if record[_REST] == self._period)
            self._count -= (len(bucket) - len(kept)) // _RECORD
            if kept:
                self._buckets[prefix] = kept
            else:
                del self._buckets[prefix]
        self._period ^= 1

    def buckets(self) -> Iterator[bytes]:
        """What is known, for a state. While ``forget_unseen`` runs, what it forgets may be in it or not."""
        return (prefix + self._buckets.get(prefix, b"") for prefix in list(self._buckets))

    def restore_in_steps(self, buckets: Iterable[bytes], period: int) -> Steps[None]:
        """Continue with what ``buckets`` and ``period`` were."""
        self._period = period
        for chunk in in_chunks(buckets):
            for bucket in chunk:
                self._buckets[bucket[:_PREFIX]] = bucket[_PREFIX:]
                self._count += len(bucket) // _RECORD
            yield


def _digest(key: Any) -> tuple[bytes, bytes]:
    if type(key) is str:  # a file's may have bytes that UTF-8 has not, which Python turns into lone surrogates
        encoded = key.encode("utf-8", "surrogatepass")
    else:
        encoded = b"\xc1" + encode_entry(key)  # 0xc1 is in no UTF-8
    digest = blake2b(encoded, digest_size=_PREFIX + _REST).digest()
    return digest[:_PREFIX], digest[_PREFIX:]

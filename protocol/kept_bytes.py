# SPDX-License-Identifier: Apache-2.0

"""The account of what a coordinator keeps of the things that its tasks have sent (H157).

Whatever stays after an event was handled is charged before it is kept, with its real size and never with the size that
a peer claims. What would exceed the limit is refused with an error that names the limit and the way out. So the one
who sent it, or its operator, ends, and no other.
"""

from __future__ import annotations

from collections.abc import Hashable


class KeptBytes:
    """What one coordinator keeps, by owner: an attempt, a checkpoint, or a name for what belongs to nobody.

    For one thread at a time.

    Args:
        bytes_max: the limit for all owners together.
        what: what takes the bytes, at the beginning of the error.
        remedy: what to do about it, at its end.

    Attributes:
        total: what all owners keep.
    """

    __slots__ = ("_beside", "_by_owner", "_bytes_max", "_remedy", "_what", "total")

    def __init__(self, bytes_max: int, what: str, remedy: str) -> None:
        self._bytes_max = bytes_max
        self._what = what
        self._remedy = remedy
        self._by_owner: dict[Hashable, int] = {}
        self._beside = 0
        self.total = 0

    def charge(self, owner: Hashable, size_bytes: int) -> None:
        """So many bytes more are about to be kept. Raises ``ValueError``, and changes nothing, above the limit."""
        if self.total + size_bytes > self._bytes_max + self._beside:
            raise ValueError(f"{self._what} would exceed the limit of {self._bytes_max} bytes: {self._remedy}")
        self.keep(owner, size_bytes)

    def keep(self, owner: Hashable, size_bytes: int) -> None:
        """The owner keeps so many bytes more, of a checkpoint. The limit is for what comes on top of them."""
        if size_bytes:
            self.total += size_bytes
            self._by_owner[owner] = self._by_owner.get(owner, 0) + size_bytes

    def keep_beside(self, owner: Hashable, size_bytes: int) -> None:
        """The owner keeps so many bytes more, of the program itself. The limit is for the rest."""
        self._beside += size_bytes
        self.keep(owner, size_bytes)

    def release(self, owner: Hashable, size_bytes: int | None = None) -> int:
        """The owner keeps so many bytes less; by default nothing any more. Return how many that were."""
        kept = self._by_owner.pop(owner, 0)
        size = kept if size_bytes is None else min(size_bytes, kept)
        if kept > size:
            self._by_owner[owner] = kept - size
        self.total -= size
        return size

    def move(self, owner: Hashable, to: Hashable, size_bytes: int | None = None) -> None:
        """Another owner keeps it from now on."""
        self.keep(to, self.release(owner, size_bytes))

    def keeps(self, owner: Hashable) -> bool:
        """Whether the owner keeps anything."""
        return owner in self._by_owner

    def owners(self) -> list[Hashable]:
        """Those that keep anything."""
        return list(self._by_owner)

    def clear(self) -> None:
        """Nothing is kept any more."""
        self._by_owner.clear()
        self.total = self._beside = 0

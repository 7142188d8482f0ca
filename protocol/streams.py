# SPDX-License-Identifier: Apache-2.0

"""The reliable, ordered stream between the two ends of an attempt. Each direction has one instance at each end.

Theory of operation
-------------------
Each direction of an attempt is one stream of *items*, numbered from 1 without gaps. The sender's half,
``OutgoingStream``, keeps every item until the peer has confirmed it; a confirmation is cumulative. When a connection
breaks, the items stay. On a new one, the peer says how far it has received; the sender drops those items and sends the
rest again, in order. The receiver's half, ``IncomingStream``, takes exactly the next number. A lower number is a
duplicate (dropped, and confirmed again); a higher one is a gap, which only a faulty peer can cause. Together: in order,
each once, across any number of connections (H22, H24, H30).

A received item is not yet confirmed. The receiver may withhold the confirmation until the item is *taken*; no
confirmation covers an item that is not taken. So the sender's window also bounds what waits at the receiver (H27), and
a resume reports what is taken, not what was merely received.

What counts against a bound is counted for each part of the operator (H150): by the receiver here, as ``Share``; by the
sender where it has its bounds, which also cover what has not entered the stream.

Nothing here knows what the items mean.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Generic, TypeVar

from protocol.errors import RemoteProtocolError
from protocol.values import value

ItemT = TypeVar("ItemT")
Entry = tuple[ItemT, int | None, int | None, int]
"""An item, its size in bytes if it counts against a bound, the owner's number for it if it has one, and its part."""


# --- inputs and effects that both machines have -----------------------------------------------------------


@value
class ConnectionAttached:
    """Input: a connection is up and its handshake done. The peer has taken our items up to ``received_seq``.

    It replaces an older connection, whether or not its loss was noticed: from now on the shell passes on only messages
    of the new one. The ``received_seq`` of a first connection is 0.
    """

    received_seq: int


@value
class ConnectionLost:
    """Input: the connection is gone. Not a failure: the reconnect clock starts (H24)."""


@value
class RefuseMessage:
    """Effect: a message was dropped because it is stale or out of turn. Count and log it (H3)."""

    why: str


@value
class DropConnection:
    """Effect of a batch, always the last: the peer broke the protocol. Close this connection, then report
    ``ConnectionLost``. A resume repairs what can be repaired."""

    why: str


# --- the two halves ---------------------------------------------------------------------------------------


class OutgoingStream(Generic[ItemT]):
    """The items that were sent and are not confirmed.

    An entry is ``(item, size, tag, part)``. ``size`` is in bytes if the item counts against a bound; it is None for the
    protocol's own items, which are few and never refused. ``tag`` is the owner's number for the item, or None. The
    owner counts what is unconfirmed, because it looks at each confirmed entry in any case.
    """

    __slots__ = ("_entries", "last_seq")

    def __init__(self) -> None:
        self._entries: list[Entry[ItemT]] = []  # an empty deque takes 700 bytes more
        self.last_seq = 0

    @property
    def confirmed_seq(self) -> int:
        return self.last_seq - len(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, item: ItemT, size: int | None = None, tag: int | None = None, part: int = 0) -> None:
        """Keep ``item``, whose number must be ``last_seq + 1``."""
        self.last_seq += 1
        self._entries.append((item, size, tag, part))

    def confirm(self, seq: int) -> list[Entry[ItemT]]:
        """Forget the items up to ``seq`` and return their entries, oldest first; none for an old confirmation.

        Raises ``RemoteProtocolError``, and changes nothing, if ``seq`` was never sent.
        """
        if seq > self.last_seq:
            raise RemoteProtocolError(f"item {seq} is confirmed, but the last one sent is {self.last_seq}")
        entries = self._entries
        kept = self.last_seq - seq
        count = len(entries) - kept
        if count <= 0:
            return []
        if not kept:
            self._entries = []
            return entries
        confirmed = entries[:count]
        del entries[:count]
        return confirmed

    def resume(self, seq: int) -> list[Entry[ItemT]]:
        """Like ``confirm``, for a new connection. The peer must not report less than it confirmed before, because
        confirmed items are gone here and cannot be sent again."""
        if seq < self.confirmed_seq:
            raise RemoteProtocolError(f"peer resumes after item {seq}, but has confirmed {self.confirmed_seq}")
        return self.confirm(seq)

    def unconfirmed(self) -> Iterator[ItemT]:
        """The items to send again on a new connection, in order."""
        return (entry[0] for entry in self._entries)

    def entry(self, seq: int) -> Entry[ItemT]:
        """The entry of the unconfirmed item ``seq``."""
        return self._entries[seq - self.confirmed_seq - 1]

    def tags(self) -> Iterator[int]:
        """The owner's numbers of the unconfirmed items that have one, in order."""
        return (entry[2] for entry in self._entries if entry[2] is not None)

    def clear(self) -> None:
        """Forget all items: the attempt is over. Their numbers stay used."""
        self._entries.clear()

    def counted(self, part: int | None = None) -> tuple[int, int]:
        """How many items count against a bound, of this part or of all, and their bytes: a walk over all entries."""
        sizes = [size for _, size, _, its in self._entries if size is not None and part in (None, its)]
        return len(sizes), sum(sizes)

    def parts_of(self, kind: type[ItemT]) -> list[int]:
        """The parts of the unconfirmed items of this kind, in order."""
        return [part for item, _, _, part in self._entries if isinstance(item, kind)]

    def check_invariants(self) -> None:
        assert 0 <= self.confirmed_seq <= self.last_seq
        for seq, item in enumerate(self.unconfirmed(), start=self.confirmed_seq + 1):
            assert getattr(item, "seq", seq) == seq, "an item does not carry its own place"


class Share:
    """What one part has in a stream: how many events and requests, and their bytes."""

    __slots__ = ("bytes", "events")

    def __init__(self) -> None:
        self.events = 0
        self.bytes = 0


class IncomingStream:
    """Counts the items that were received, and how many of them may be confirmed.

    ``shares``: what is received and not taken of each of ``parts`` parts.
    """

    __slots__ = ("_untaken", "received_seq", "shares", "told_seq")

    def __init__(self, parts: int = 1) -> None:
        self.received_seq = 0
        self.told_seq = 0  # the last confirmation that was made
        self.shares = [Share() for _ in range(parts)]
        self._untaken: list[tuple[int, int, int]] = []  # number, size, part

    @property
    def untaken_events(self) -> int:
        """Of all parts."""
        return len(self._untaken)

    @property
    def untaken_bytes(self) -> int:
        return sum(share.bytes for share in self.shares)

    @property
    def confirmable_seq(self) -> int:
        """The highest number up to which every item was taken."""
        return self._untaken[0][0] - 1 if self._untaken else self.received_seq

    def confirmation(self) -> int:
        """``confirmable_seq``, for a message that is sent now; 0 if an earlier one has said so."""
        seq = self._untaken[0][0] - 1 if self._untaken else self.received_seq
        if seq == self.told_seq:
            return 0
        self.told_seq = seq
        return seq

    def is_new(self, seq: int) -> bool:
        """True for the next item, False for a duplicate. Raises ``RemoteProtocolError`` for a gap."""
        expected = self.received_seq + 1
        if seq > expected:
            raise RemoteProtocolError(f"item {seq} arrived, but item {expected} is next")
        return seq == expected

    def advance(self, size: int | None = None, part: int = 0) -> None:
        """The next item has come. It counts as taken, or if ``size`` (in bytes) is given, only after ``take``."""
        self.received_seq += 1
        if size is not None:
            self._untaken.append((self.received_seq, size, part))
            share = self.shares[part]
            share.events += 1
            share.bytes += size

    def take(self, seq: int, parts: Container[int] | None = None) -> None:
        """Everything up to ``seq`` is taken. Naming items again that were taken before is fine.

        ``parts``: only what is of these parts. None: of all, as in an operator without parts outside of checkpoints.
        """
        if parts is not None:
            self._take_of(seq, parts)
            return
        count, shares = 0, self.shares
        for number, size, part in self._untaken:
            if number > seq:
                break
            share = shares[part]
            share.events -= 1
            share.bytes -= size
            count += 1
        del self._untaken[:count]

    def _take_of(self, seq: int, parts: Container[int]) -> None:
        left = []
        for entry in self._untaken:
            number, size, part = entry
            if number <= seq and part in parts:
                share = self.shares[part]
                share.events -= 1
                share.bytes -= size
            else:
                left.append(entry)
        self._untaken = left

    def clear(self) -> None:
        """Forget what is not taken: the attempt is over, and nothing more will be confirmed."""
        self._untaken.clear()
        self.shares = [Share() for _ in self.shares]

    def check_invariants(self) -> None:
        seqs = [seq for seq, _, _ in self._untaken]
        assert seqs == sorted(set(seqs))
        assert not seqs or seqs[-1] <= self.received_seq
        for part, share in enumerate(self.shares):
            sizes = [size for _, size, its in self._untaken if its == part]
            assert (share.events, share.bytes) == (len(sizes), sum(sizes))
        assert self.told_seq <= self.confirmable_seq

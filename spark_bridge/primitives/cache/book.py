# SPDX-License-Identifier: Apache-2.0

"""Which values a cache has, who computes the others, and who waits: pure, on the times that it is given.

A *ticket* is one call of ``get``: who asks, and its own number. A key without a value has at most one *lease*, whose
token is the ticket that it was given to. The others that want the key wait in the order in which they came.

A value that was put is *arriving* until ``arrived`` is called: a durable cache writes it in between. So nobody sees a
value that would be lost with the driver, and nobody computes it meanwhile (H183).

| what happens | nothing is known of the key | it is leased | its value arrives | it has a value |
|---|---|---|---|---|
| ``get`` | gets the lease | waits | waits | gets the value |
| ``put`` of the one with the lease | - | arrives; the lease ends | the first one stays; the lease ends | the same |
| ``put`` of another, whose lease was lost | arrives | arrives; the lease stays | the first one stays | the same |
| ``end`` of the one with the lease | - | one waiter gets it | the lease ends | the lease ends |
| ``end`` of one that waits | - | waits no more | waits no more | - |
| ``forget``: attempts are over | - | ``end`` of each of their tickets | the same | the same |
| ``pass_time``: the lease has lasted too long | - | one waiter gets it | the lease ends | the lease ends |
| ``arrived`` | - | - | all that wait get it | - |
| ``evict``, if the values are too large | - | - | - | the one that nobody has wanted for longest is gone |

A lease may be there beside a value, if that came from one whose lease was lost. It stays so that the key is not
computed by a third one after an eviction.

A request and the word that its ticket has ended arrive in this order, so the word also finds a lease that it has
crossed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from spark_bridge.primitives.tickets import Asker, Ticket

ENTRY_BYTES = 256
"""What an entry takes besides its key and its value."""
LEASED_BYTES_MAX = 64 * 2**20
"""The keys of all tickets of an attempt together, each with ``ENTRY_BYTES`` (H157)."""


class Answer(NamedTuple):
    """Tell the asker the value."""

    ticket: Ticket
    value: bytes


class Lease(NamedTuple):
    """Tell the asker to compute the value. ``overdue``: the lease was taken from one who had it for too long."""

    ticket: Ticket
    overdue: Ticket | None = None


class Withdraw(NamedTuple):
    """The ticket waits no more."""

    ticket: Ticket


CacheEffect = Answer | Lease | Withdraw


class _Leased(NamedTuple):
    ticket: Ticket
    until: float


@dataclass(slots=True)
class Counts:
    """What has happened since the cache was made.

    ``gets`` are all calls, ``hits`` those that found a value, and ``waits`` those that waited for another one's.
    ``leases`` is how often a value was to be computed, and ``leases_lost`` how often that ended without one.
    """

    gets: int = 0
    hits: int = 0
    waits: int = 0
    leases: int = 0
    leases_lost: int = 0
    evictions: int = 0


class CacheBook:
    """The entries of one cache. ``bytes_max``: of all values with their keys; ``lease_s``: how long a lease lasts.

    Attributes:
        values: by key, the one that nobody has wanted for longest first.
        bytes: what they take, with their keys.
    """

    def __init__(self, bytes_max: int, lease_s: float) -> None:
        self.values: OrderedDict[bytes, bytes] = OrderedDict()
        self.arriving: dict[bytes, bytes] = {}
        self.bytes = 0
        self.counts = Counts()
        self._bytes_max = bytes_max
        self._lease_s = lease_s
        self._leased: dict[bytes, _Leased] = {}  # in the order in which they end
        self._waiting: dict[bytes, dict[Ticket, None]] = {}
        self._keys: dict[Asker, dict[int, bytes]] = {}  # of all that wait or have a lease, by the number of the ticket
        self._key_bytes: dict[Asker, int] = {}

    @property
    def leased(self) -> int:
        """How many values are computed now."""
        return len(self._leased)

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return sum(map(len, self._waiting.values()))

    def get(self, key: bytes, ticket: Ticket, now: float) -> list[CacheEffect]:
        """Ask for a value.

        Raises, and changes nothing: ``ValueError`` if the ticket was used before and has not ended, and
        ``OverflowError`` if the attempt computes and waits for too much.
        """
        asker, number = ticket
        if number in self._keys.get(asker, ()):
            raise ValueError(f"{ticket} has asked already")
        value = self.values.get(key)
        if value is None and self._key_bytes.get(asker, 0) + len(key) + ENTRY_BYTES > LEASED_BYTES_MAX:
            raise OverflowError(f"{asker} asks for too much at a time")
        self.counts.gets += 1
        if value is not None:
            self.counts.hits += 1
            self.values.move_to_end(key)
            return [Answer(ticket, value)]
        self._keys.setdefault(asker, {})[number] = key
        self._key_bytes[asker] = self._key_bytes.get(asker, 0) + len(key) + ENTRY_BYTES
        if key in self._leased or key in self.arriving:
            self.counts.waits += 1
            self._waiting.setdefault(key, {})[ticket] = None
            return []
        return [self._lease(key, ticket, now)]

    def put(self, key: bytes, ticket: Ticket, value: bytes) -> bool:
        """A value was computed. Return whether it arrives now; otherwise there is another one, which stays."""
        leased = self._leased.get(key)
        if leased is not None and leased.ticket == ticket:
            del self._leased[key]
            self._forget_ticket(ticket)
        if key in self.values or key in self.arriving:
            return False
        self.arriving[key] = value
        return True

    def arrived(self, key: bytes) -> list[CacheEffect]:
        """The value may be seen. Tell all that wait for it."""
        value = self.arriving.pop(key)
        effects: list[CacheEffect] = []
        for ticket in self._waiting.pop(key, {}):
            self._forget_ticket(ticket)
            effects.append(Answer(ticket, value))
        self.add(key, value)
        return effects

    def add(self, key: bytes, value: bytes) -> None:
        """Keep a value, and drop those that nobody has wanted for longest if they are too large together."""
        if key in self.values:
            return
        self.values[key] = value
        self.bytes += _size(key, value)
        while self.bytes > self._bytes_max:
            self.bytes -= _size(*self.values.popitem(last=False))
            self.counts.evictions += 1

    def end(self, ticket: Ticket, now: float) -> list[CacheEffect]:
        """The call has ended without a value: its function failed, it was cancelled, or it took too long."""
        key = self._keys.get(ticket.asker, {}).get(ticket.number)
        if key is None:
            return []  # it has its value, or has lost its lease
        if ticket in self._waiting.get(key, ()):
            self._leave(key, ticket)
            return [Withdraw(ticket)]
        self._forget_ticket(ticket)
        return self._lose(key, now)

    def forget(
        self, now: float, operator_id: str, subtask: int | None = None, attempt: int | None = None
    ) -> list[CacheEffect]:
        """These attempts are over. Nothing is given to one of them on the way."""
        if subtask is None or attempt is None:
            over = [one for one in self._keys if operator_id == one[0] and subtask in (None, one[1])]
        else:
            over = [Asker(operator_id, subtask, attempt)]
        effects: list[CacheEffect] = []
        tickets = [Ticket(asker, number) for asker in over for number in self._keys.get(asker, ())]
        for ticket in tickets:  # none of them may get what another one of them loses
            key = self._keys[ticket.asker][ticket.number]
            if ticket in self._waiting.get(key, ()):
                self._leave(key, ticket)
                effects.append(Withdraw(ticket))
        for asker in over:
            for number, key in list(self._keys.get(asker, {}).items()):
                self._forget_ticket(Ticket(asker, number))
                effects += self._lose(key, now)
        return effects

    def next_deadline(self) -> float | None:
        """When ``pass_time`` has something to do; None if no value is computed."""
        return next(iter(self._leased.values())).until if self._leased else None

    def pass_time(self, now: float) -> list[CacheEffect]:
        """End the leases that have lasted too long."""
        effects: list[CacheEffect] = []
        while self._leased:
            key, leased = next(iter(self._leased.items()))
            if leased.until > now:
                break
            self._forget_ticket(leased.ticket)
            effects += self._lose(key, now, overdue=leased.ticket)
        return effects

    # --- one step -----------------------------------------------------------------------------------------------------

    def _lease(self, key: bytes, ticket: Ticket, now: float, overdue: Ticket | None = None) -> Lease:
        self._leased[key] = _Leased(ticket, now + self._lease_s)
        self.counts.leases += 1
        return Lease(ticket, overdue)

    def _lose(self, key: bytes, now: float, overdue: Ticket | None = None) -> list[CacheEffect]:
        """The lease has ended without a value. One that waits gets it, unless the value comes from elsewhere."""
        del self._leased[key]
        self.counts.leases_lost += 1
        waiting = self._waiting.get(key)
        if not waiting or key in self.arriving:
            return []
        ticket = next(iter(waiting))
        del waiting[ticket]
        if not waiting:
            del self._waiting[key]
        return [self._lease(key, ticket, now, overdue)]

    def _leave(self, key: bytes, ticket: Ticket) -> None:
        del self._waiting[key][ticket]
        if not self._waiting[key]:
            del self._waiting[key]
        self._forget_ticket(ticket)

    def _forget_ticket(self, ticket: Ticket) -> None:
        asker, number = ticket
        key = self._keys[asker].pop(number)
        self._key_bytes[asker] -= len(key) + ENTRY_BYTES
        if not self._keys[asker]:
            del self._keys[asker], self._key_bytes[asker]

    def check_invariants(self) -> None:
        leases = {leased.ticket: key for key, leased in self._leased.items()}
        waits = {ticket: key for key, waiting in self._waiting.items() for ticket in waiting}
        tickets = {Ticket(asker, number): key for asker, keys in self._keys.items() for number, key in keys.items()}
        assert len(leases) == len(self._leased), "a ticket has two leases"
        assert not leases.keys() & waits.keys(), "one with a lease waits"
        assert tickets == {**leases, **waits}, "a ticket is lost, or was kept"
        assert all(self._waiting.values()), "a key that nobody waits for is kept"
        assert all(self._keys.values()), "an asker without tickets is kept"
        for key in self._waiting:
            assert key in self._leased or key in self.arriving, "one waits for a value that nobody computes"
            assert key not in self.values, "one waits for a value that is there"
        assert not self.arriving.keys() & self.values.keys(), "a value that arrives replaces one"
        assert self.bytes == sum(_size(*entry) for entry in self.values.items()), "the size is wrong"
        assert self.bytes <= self._bytes_max, "the values are too large"
        sizes = {asker: sum(len(key) + ENTRY_BYTES for key in keys.values()) for asker, keys in self._keys.items()}
        assert sizes == self._key_bytes, "the size of an attempt's keys is wrong"
        ends = [leased.until for leased in self._leased.values()]
        assert ends == sorted(ends), "leases are out of order"


def _size(key: bytes, value: bytes) -> int:
    return len(key) + len(value) + ENTRY_BYTES

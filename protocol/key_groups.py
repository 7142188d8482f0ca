# SPDX-License-Identifier: Apache-2.0

"""The groups into which the keys of a state are divided, so that another parallelism can divide the state.

Theory of operation
-------------------
Each key belongs to one of a fixed number of groups, and each subtask has a range of neighbouring groups. So with
another parallelism, no key has to be looked at: a new subtask takes from each old state the groups that lie in its own
range (``protocol.barrier_tracker.rescale``). The group of a key must be the same in each process and each release. So
it comes from the bytes of the key, and never from Python's ``hash``.

*The bytes of a key* say its type, so ``1``, ``"1"`` and ``b"1"`` are three keys, and they have the order of the keys:
integers, then bytes, then texts, then tuples. The bytes of ``"ab"`` begin with those of ``"a"``, and the bytes of
``("a", 1)`` with those of ``("a",)``, which makes a scan by prefix one range of a sorted store.

```
integer     0x10 + n for n >= 0, 0x10 - n for a negative one; then its magnitude in n = 1 to 8 bytes, big-endian,
            inverted if it is negative. Zero is 0x10 alone.
bytes       0x20, then the bytes
text        0x30, then its UTF-8
tuple       0x40, then each element as above, an element of bytes or text with 0x00 0xff for 0x00 and then 0x00 0x00,
            and an element that is a tuple with 0x00 at its end
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from protocol.arguments import Rule, check_fields, checked, checked_names
from protocol.describing import show, type_name
from protocol.wire.state_handles import KEY_GROUPS_MAX, KeyGroupRange

__all__ = ["Key", "KeyGroups", "cut", "decode_key", "encode_key"]

Key = str | bytes | int | tuple["Key", ...]
"""What a key may be."""

INTEGER, BYTES, TEXT, TUPLE = 0x10, 0x20, 0x30, 0x40
INTEGER_BYTES_MAX = 8
_ZERO, _ESCAPED, _END = b"\0", b"\0\xff", b"\0\0"

_COUNT = Rule(f"from 1 to {KEY_GROUPS_MAX}", lambda value: 1 <= value <= KEY_GROUPS_MAX)


def encode_key(key: Key) -> bytes:
    """Return the bytes of a key; see the module. Raises ``TypeError`` or ``ValueError`` for what cannot be a key."""
    kind: type = type(key)  # a subclass, such as a bool, may be equal to a key and is none
    if kind is str and isinstance(key, str):
        return bytes((TEXT,)) + key.encode("utf-8", "surrogatepass")
    if kind is bytes and isinstance(key, bytes):
        return bytes((BYTES,)) + key
    if kind is int and isinstance(key, int):
        return _encode_integer(key)
    if kind is tuple and isinstance(key, tuple):
        return bytes((TUPLE,)) + b"".join(map(_encode_element, key))
    raise TypeError(
        f"a key must be a str, bytes, an int, or a tuple of these, is {show(key)}, which is of the type "
        f"{type_name(key)}: convert it first"
    )


def _encode_integer(key: int) -> bytes:
    size = (abs(key).bit_length() + 7) // 8
    if size > INTEGER_BYTES_MAX:
        raise ValueError(f"an integer in a key must have at most {INTEGER_BYTES_MAX} bytes, is {show(key)}")
    if key < 0:
        return bytes((INTEGER - size,)) + int(256**size - 1 + key).to_bytes(size, "big")
    return bytes((INTEGER + size,)) + key.to_bytes(size, "big")


def _encode_element(element: Key) -> bytes:
    encoded = encode_key(element)
    if encoded[0] in (BYTES, TEXT):
        return encoded.replace(_ZERO, _ESCAPED) + _END
    return encoded + _ZERO if encoded[0] == TUPLE else encoded


def decode_key(data: bytes) -> Key:
    """Return the key of which ``encode_key`` makes these bytes."""
    tag = data[0]
    if tag == TEXT:
        return data[1:].decode("utf-8", "surrogatepass")
    if tag == BYTES:
        return data[1:]
    if tag != TUPLE:
        return _decode_integer(data, 0)[0]
    return _decode_elements(data, 1, len(data))[0]


def _decode_integer(data: bytes, at: int) -> tuple[int, int]:
    """An integer, and where it ends."""
    size = data[at] - INTEGER
    end = at + 1 + abs(size)
    magnitude = int.from_bytes(data[at + 1 : end], "big")
    return (magnitude if size >= 0 else magnitude - 256**-size + 1), end


def _decode_elements(data: bytes, at: int, end: int) -> tuple[tuple[Key, ...], int]:
    """The elements of a tuple up to its end, and where they end."""
    elements: list[Key] = []
    while at < end and data[at]:
        tag = data[at]
        if tag == TUPLE:
            element, at = _decode_elements(data, at + 1, end)
            elements.append(element)
            at += 1
        elif tag in (BYTES, TEXT):
            stop = at + 1
            while data[stop : stop + 2] != _END:
                stop += 2 if data[stop : stop + 2] == _ESCAPED else 1
            elements.append(decode_key(data[at:stop].replace(_ESCAPED, _ZERO)))
            at = stop + 2
        else:
            number, at = _decode_integer(data, at)
            elements.append(number)
    return tuple(elements), at


@checked_names
@dataclass(frozen=True, slots=True)
class KeyGroups:
    """How the keys of an operator's state are divided: into this number of groups, and these among the subtasks.

    Send each record to the subtask that has its key, for example with Spark's
    ``rdd.partitionBy(8, lambda key: groups.subtask_of(key, 8))``, and return the state as
    ``StateFiles(folder, key_groups=groups)``. Then the parallelism can change at each restart.

    ``count``: how many groups there are, 1 to 32768. It is the highest possible parallelism, and cannot be changed
    for a state that exists. Some ten times the parallelism that you expect is enough.

    Keys are ``str``, ``bytes``, ``int`` of up to 64 bits, and tuples of these. ``1`` and ``"1"`` are different keys.

    It may be made in any thread, and is immutable.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value.
    """

    count: int = 128

    def __post_init__(self) -> None:
        check_fields(self, count=_COUNT)

    def of(self, key: Key) -> int:
        """Return the group of a key, from 0 to ``count - 1``: the same in each process and each release.

        Raises ``TypeError`` or ``ValueError`` for what cannot be a key.
        """
        return int.from_bytes(blake2b(encode_key(key), digest_size=8).digest(), "big") % self.count

    @checked()
    def range_of(self, subtask: int, parallelism: int) -> range:
        """Return the groups of a subtask. Each subtask has at least one, and their sizes differ by one at most.

        Raises ``ValueError`` if there are fewer groups than subtasks, or no such subtask.
        """
        self._check_parallelism(parallelism)
        if not 0 <= subtask < parallelism:
            raise ValueError(f"subtask must be from 0 to {parallelism - 1}, is {show(subtask)}")
        return _range_of(subtask, parallelism, self.count)

    def subtask_of(self, key: Key, parallelism: int) -> int:
        """Return the subtask that has a key. Raises as ``of`` and ``range_of`` do."""
        self._check_parallelism(parallelism)
        return _subtask_of(self.of(key), parallelism, self.count)

    def _check_parallelism(self, parallelism: int) -> None:
        if not 1 <= parallelism <= self.count:
            raise ValueError(
                f"parallelism must be from 1 to {self.count}, the number of key groups, is {show(parallelism)}"
            )


def _range_of(subtask: int, parallelism: int, count: int) -> range:
    return range(-(-subtask * count // parallelism), -(-(subtask + 1) * count // parallelism))


def _subtask_of(group: int, parallelism: int, count: int) -> int:
    return group * parallelism // count


def cut(pieces: Sequence[KeyGroupRange], parallelism: int) -> list[tuple[int, int, int, int]]:
    """Cut pieces of states to another parallelism: for each part of one, the new subtask, the index of the piece, the
    first of its groups, and the one after the last.

    They are in the order of the groups. Raises ``ValueError`` with the rest of a sentence if a group is in two pieces,
    if the pieces are not of the same number of groups, or if these are fewer than the new subtasks.
    """
    if not pieces:
        return []
    totals = sorted({piece.total for piece in pieces})
    if len(totals) > 1:
        raise ValueError(f"its states have {' and '.join(map(str, totals))} key groups")
    (total,) = totals
    if parallelism > total:
        raise ValueError(f"its states have {total} key groups, so {total} is the highest parallelism")
    parts = []
    covered = 0
    for index in sorted(range(len(pieces)), key=lambda one: pieces[one]):
        first, end, _ = pieces[index]
        if first < covered:
            raise ValueError(f"two of its states have key group {first}")
        covered = end
        for subtask in range(_subtask_of(first, parallelism, total), _subtask_of(end - 1, parallelism, total) + 1):
            own = _range_of(subtask, parallelism, total)
            parts.append((subtask, index, max(first, own.start), min(end, own.stop)))
    return parts

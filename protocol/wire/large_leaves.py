# SPDX-License-Identifier: Apache-2.0

"""Takes the large leaves out of an event before msgpack sees it, and puts them in again (H62, H114).

msgpack copies what it is given several times, and each copy of 64 MiB holds the interpreter for some 50 ms. So of an
event of ``LARGE_EVENT_BYTES`` or more, each byte string, string or array of ``LEAF_BYTES`` or more is *cut out*: a
placeholder takes its place, an extension value of a code that no event has. The rest is small. A leaf is copied once,
in steps.

``skim`` walks over the headers of a value, and builds nothing. It shows whether what is claimed is there, and where the
large leaves are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from io import BytesIO
from struct import Struct
from typing import Any, NamedTuple

from protocol.wire.framing import WireLimits

__all__ = ["LARGE_EVENT_BYTES", "LEAF_BYTES", "PLACEHOLDER", "Leaf", "LeafReader", "Skimmed", "placeholder", "skim"]

LARGE_EVENT_BYTES = 2**20
LEAF_BYTES = 256 * 1024
COPY_BYTES = 2**20
"""How much of a leaf one step copies."""
HEADERS = 4096
"""So many headers one step looks at."""

ITEM_BYTES_MAX = 16
"""The largest items of an array: a complex number."""

PLACEHOLDER = 127
"""The extension code of a placeholder."""

NO_CODE = -1
"""Of what is not an extension value."""

_U32 = Struct(">I")
_MARK = bytes((0xD6, PLACEHOLDER))


def placeholder(index: int) -> bytes:
    """What stands for the leaf of this number."""
    return _MARK + _U32.pack(index)


class Leaf(NamedTuple):
    """A leaf that is ``size`` bytes at ``place``; its header begins at ``start``. ``code``: of an extension type.

    ``kind`` is "str", "bin" or "ext".
    """

    kind: str
    start: int
    place: int
    size: int
    code: int = NO_CODE


class Skimmed(NamedTuple):
    """The large leaves of an event, in order, and the codes of all its extension values."""

    leaves: list[Leaf]
    codes: set[int]


class _Head(NamedTuple):
    """What a first byte says: how many bytes of length follow, and of what.

    ``kind`` is "scalar" (``width`` bytes are the value), "list", "map", or that of a leaf. ``given`` is what the byte
    itself says about the entries or the length; None if the length follows.
    """

    kind: str
    width: int = 0
    given: int | None = None


def _heads() -> list[_Head | None]:
    heads: list[_Head | None] = [_Head("scalar")] * 256
    for count in range(16):
        heads[0x80 + count], heads[0x90 + count] = _Head("map", 0, count), _Head("list", 0, count)
    for length in range(32):
        heads[0xA0 + length] = _Head("scalar", length)
    for power, width in enumerate((1, 2, 4)):
        heads[0xC4 + power], heads[0xC7 + power], heads[0xD9 + power] = (
            _Head("bin", width),
            _Head("ext", width),
            _Head("str", width),
        )
    for power in range(2):
        heads[0xDC + power], heads[0xDE + power] = _Head("list", 2 << power), _Head("map", 2 << power)
    for power in range(4):
        heads[0xCC + power] = heads[0xD0 + power] = _Head("scalar", 1 << power)
    for power in range(5):
        heads[0xD4 + power] = _Head("ext", 0, 1 << power)
    heads[0xCA], heads[0xCB], heads[0xC1] = _Head("scalar", 4), _Head("scalar", 8), None
    return heads


_HEADS = _heads()
_LISTS_AND_MAPS = frozenset({"list", "map"})


def skim(
    data: bytes, limits: WireLimits, leaf_bytes: int = LEAF_BYTES, *, found: int | None = None
) -> Generator[None, None, Skimmed]:
    """Walk over the one value that ``data`` is, in steps, and return what it has.

    With ``found``, the extension values of this code are leaves as well. Otherwise a placeholder is refused, as any
    code that no event has. Raises ``ValueError`` for what is not one whole value, and for too many lists, maps and
    entries.
    """
    size = len(data)
    position, missing, steps = 0, 1, 0
    containers, items = limits.event_containers_max, limits.event_items_max
    leaves: list[Leaf] = []
    codes: set[int] = set()
    while missing:
        if position + missing > size:
            raise ValueError("it ends before its last value")
        steps += 1
        if steps % HEADERS == 0:
            yield
        head = _HEADS[data[position]]
        if head is None:
            raise ValueError("the byte 0xc1, which begins no value")
        missing -= 1
        kind, width, count = head
        if kind == "scalar":
            position += 1 + width
            continue
        if count is None:
            count = int.from_bytes(data[position + 1 : position + 1 + width], "big")
        if kind in _LISTS_AND_MAPS:
            missing += count if kind == "list" else 2 * count
            containers, items = containers - 1, items - count
            if containers < 0 or items < 0:
                raise ValueError(_too_many(limits, containers))
            position += 1 + width
            continue
        leaf = _leaf(data, kind, position, position + 1 + width, count)
        codes.add(leaf.code)
        if count >= leaf_bytes or leaf.code == found:
            leaves.append(leaf)
        elif leaf.code == PLACEHOLDER:
            raise ValueError(f"extension type {PLACEHOLDER}")
        position = leaf.place + count
    if position != size:
        raise ValueError(_wrong_end(position, size))
    codes.discard(NO_CODE)
    return Skimmed(leaves, codes)


def _leaf(data: bytes, kind: str, start: int, place: int, size: int) -> Leaf:
    if kind != "ext":
        return Leaf(kind, start, place, size)
    if place >= len(data):
        raise ValueError("it ends within its last value")
    return Leaf(kind, start, place + 1, size, data[place])


def _wrong_end(position: int, size: int) -> str:
    return "bytes follow the value" if position < size else "it ends within its last value"


def _too_many(limits: WireLimits, containers_left: int) -> str:
    if containers_left < 0:
        return f"more than {limits.event_containers_max} lists and maps"
    return f"more than {limits.event_items_max} entries in its lists and maps"


class LeafReader:
    """The large leaves of one event, copied. ``small`` is the event with placeholders instead of them."""

    __slots__ = ("_leaves", "small")

    def __init__(self) -> None:
        self._leaves: list[tuple[int | None, Any]] = []
        self.small = b""

    def read(self, data: bytes, leaves: list[Leaf]) -> Generator[None, None, None]:
        """Copy the leaves, in steps. Raises ``ValueError`` for a string that is not valid Unicode."""
        view = memoryview(data)
        pieces: list[bytes | memoryview] = []
        end = 0
        for leaf in leaves:
            pieces += (view[end : leaf.start], placeholder(len(self._leaves)))
            end = leaf.place + leaf.size
            if leaf.kind == "ext":
                self._leaves.append((leaf.code, (yield from _copy_for_array(view[leaf.place : end]))))
                continue
            raw = yield from _copy(view[leaf.place : end])
            self._leaves.append((None, raw.decode("utf-8") if leaf.kind == "str" else raw))
        pieces.append(view[end:])
        self.small = b"".join(pieces)

    def hook(self, take_extension: Callable[[int, Any], Any]) -> Callable[[int, bytes], Any]:
        """Return what msgpack has to call for an extension value, instead of ``take_extension``."""

        def take(code: int, data: bytes) -> Any:
            if code != PLACEHOLDER:
                return take_extension(code, data)
            own_code, leaf = self._leaves[_U32.unpack(data)[0]]
            return leaf if own_code is None else take_extension(own_code, leaf)

        return take


def _copy(view: memoryview) -> Generator[None, None, bytes]:
    """Copy a leaf in steps, and only once."""
    stream = BytesIO()
    for position in range(0, len(view), COPY_BYTES):
        stream.write(view[position : position + COPY_BYTES])
        yield
    return stream.getvalue()


def _copy_for_array(view: memoryview) -> Generator[None, None, memoryview]:
    """Copy the data of an array in steps, to where the array can be: its items at a multiple of their size."""
    size = len(view)
    name_bytes = view[0]
    padding = -(2 + name_bytes + 8 * view[1 + name_bytes]) % ITEM_BYTES_MAX
    buffer = bytearray(padding)  # not made as large as it will be: that would fill it with zeros, in one step
    for position in range(0, size, COPY_BYTES):
        buffer += view[position : position + COPY_BYTES]
        yield
    return memoryview(buffer)[padding:]

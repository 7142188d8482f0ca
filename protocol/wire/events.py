# SPDX-License-Identifier: Apache-2.0

"""Encodes and decodes user events, with every size limited (H21, H62, H95).

An event is a single msgpack value, encoded at the sender and decoded where it is handled. Plain msgpack carries None,
bool, int, float, str, bytes, lists and dicts. ``protocol.wire.extension_types`` is the table of what else an event can
have.

The bytes of a peer are refused with ``RemoteProtocolError`` unless they are what this module writes. The limits are
checked on both ends: a sender gets ``EventEncodeError`` before anything leaves.

msgpack itself does nearly all the work, in C. What is left to check is done so that a plain event costs little more:

* *Sending.* msgpack asks ``_lower`` about each value that is not plain, and refuses what that refuses. Before, one call
  of the garbage collector's ``get_referents`` for each level of the event counts what msgpack would visit: a small
  event could otherwise unfold into a huge one, as a list can contain another one many times. If the counts are within
  the limits, nothing else is checked. Otherwise ``_check_value`` looks at each container, and names what is wrong.
* *Receiving.* A first pass builds nothing and shows whether what is claimed is there. An event without extension types
  is then built by msgpack alone. ``get_referents`` finds its nesting.

Functions here are pure and may be called from any thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable
from contextlib import suppress
from functools import cache
from gc import get_referents, is_tracked
from typing import Any, NamedTuple, cast

import msgpack

from protocol.describing import class_name, describe, full_name, is_a, is_encodable, show, text_of, type_name
from protocol.errors import EventEncodeError, RemoteProtocolError
from protocol.wire import event_classes
from protocol.wire.event_classes import registration_of
from protocol.wire.extension_types import CONTAINER_TYPES, ExtensionType, mark
from protocol.wire.framing import CLAIMS_UNCHECKED, CODEC_LIMITS, WireLimits
from protocol.wire.large_leaves import LARGE_EVENT_BYTES, LEAF_BYTES, PLACEHOLDER, LeafReader, skim

__all__ = [
    "EVENT_STEP_BYTES",
    "EventSteps",
    "decode_event",
    "decode_event_in_steps",
    "encode_argument",
    "encode_event",
    "run_steps",
]

_Packer: Callable[..., Any] = msgpack.Packer
_unpack: Callable[..., Any] = msgpack.unpackb
_Unpacker: Callable[..., Any] = msgpack.Unpacker
_UNPACK_ERRORS = (ValueError, TypeError, RecursionError, MemoryError, msgpack.UnpackException)

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_BYTES_LIKE = frozenset({bytearray, memoryview})
_SETS = frozenset({set, frozenset})
_SEQUENCES = frozenset({list, tuple})
_CONTAINERS = _SETS | _SEQUENCES | {dict}
_PLAIN = _SCALARS | _CONTAINERS
"""Types of which the garbage collector shows exactly what msgpack would visit."""
_EVENT = "the event"
"""How texts name it, at their beginning."""
_MARK_FIRST = 0xC7
_MARK_START = bytes((_MARK_FIRST, 0))
_TIMESTAMP_CODE = b"\xff"
"""Before the data of msgpack's own extension type, which it decodes by itself. Other values may have this byte, too."""
_TUPLE_CODE = int(ExtensionType.TUPLE)
_MARKED_CODES = (_TUPLE_CODE, int(ExtensionType.REGISTERED))
_REGISTERED_START = mark(ExtensionType.REGISTERED)
_CONTAINER_FIRSTS = bytes((*range(0x80, 0xA0), *range(0xDC, 0xE0)))
"""The first bytes of lists and maps."""
_LIST_HEADS = [bytes((0x90 + count,)) for count in range(16)]
_FORM_ENTRIES_MAX = 1024
"""An event with so many entries has its form made level by level. A larger one is left to C."""
_FEW = 16
"""So many values are looked at one by one."""
_MANY = 64
"""The number of values that are looked into together: a list may be many of them, and is then listed as often."""
_EQUAL_HASHES_MAX = 16
"""How many different members of a set, or keys of a dict, may have the same hash, if any of them is not a scalar: a
peer can choose decimals or tuples whose hashes are equal, and comparing all of them would take minutes."""


# --- sending ------------------------------------------------------------------------------------------------------

_MARKS = {code: msgpack.ExtType(code, b"") for code in CONTAINER_TYPES}
_TUPLE, _REGISTERED = _MARKS[ExtensionType.TUPLE], _MARKS[ExtensionType.REGISTERED]

_leaf_kinds: set[type] = set()
"""Types of leaves that have been sent. Arrays are not among them, because they can be too large."""

_PACKER_BYTES_MAX = 2**18
_packers: list[Any] = []
"""Packers to use again, because making one takes longer than packing a small event. One thread takes one at a time."""


def encode_event(value: object, limits: WireLimits = CODEC_LIMITS) -> bytes:
    """Encode one user event (H21). Later changes of ``value`` have no effect on the bytes.

    An event is None, a bool, an int of 64 bits, a float, a str, bytes, a date or a time of ``datetime``, a Decimal, a
    UUID, a NumPy number or array, a value of a class that is registered with ``event``, or a list, tuple, dict, set or
    frozenset of these. All arrive with their type. Subclasses that are not registered are refused, because they would
    arrive as something else; ``bytearray`` and ``memoryview`` arrive as bytes. Raises ``EventEncodeError`` that names
    the place in the event, the cause and the fix.
    """
    kind, form = type(value), value
    if (
        kind is dict
        and not is_tracked(value)  # so it has scalars, and perhaps tuples
        and len(cast("dict[Any, Any]", value)) <= limits.event_entries_few
        and not get_referents(*get_referents(value))
    ):
        pass  # it has no tuples
    elif kind not in _SCALARS:
        level: Any = value if kind in _SEQUENCES else ()  # a dict that is tracked has more than scalars
        if 0 < len(level) <= limits.event_entries_few:
            for entry in level:
                if type(entry) not in _SCALARS:
                    form = _checked(value, kind, limits)
                    break
        else:
            form = _checked(value, kind, limits)
    elif kind is bytes and len(cast(bytes, value)) >= LEAF_BYTES:
        return _encode_large_bytes(cast(bytes, value), limits)
    try:
        packer = _packers.pop()
    except IndexError:
        packer = _Packer(default=_lower, strict_types=True)
    try:
        data: bytes = packer.pack(form)
    except Exception as error:  # also what the fields of a registered class raise
        return _encode_otherwise(value, error, limits)
    if len(data) <= _PACKER_BYTES_MAX <= limits.event_bytes_max:
        _packers.append(packer)
        return data
    return _large_event(data, limits)


def _large_event(data: bytes, limits: WireLimits) -> bytes:
    """The event, if it is not too large. Its packer is not used again, because it keeps its buffer."""
    if len(data) > limits.event_bytes_max:
        raise _too_many_bytes(len(data), limits)
    return data


def encode_argument(name: str, value: object, limits: WireLimits = CODEC_LIMITS) -> bytes:
    """``encode_event`` for a value that its caller does not know as an event: the error says ``name`` instead."""
    try:
        return encode_event(value, limits)
    except EventEncodeError as error:
        raise EventEncodeError(str(error).replace(_EVENT, name, 1)) from error.__cause__


def _encode_otherwise(value: object, error: Exception, limits: WireLimits) -> bytes:
    """Encode an event with large arrays, or raise for one that msgpack cannot pack."""
    if type(error) is _LargeArrayMet:
        return _encode_large_arrays(value, limits)
    raise _unsendable(value, error, limits) from error


def _checked(value: Any, kind: type, limits: WireLimits) -> Any:
    """Check the counts of an event, and return what msgpack packs of it."""
    if kind not in _PLAIN or (kind is list and value and type(value[0]) not in _PLAIN):
        # The class is the user's, or the value cannot be sent: then the check raises that again, and says where.
        try:
            form = _form_of(value, kind, limits)
        except Exception:
            form = None
        if form is not None:
            return form
    _check(value, kind, limits)
    return value


def _form_of(value: Any, kind: type, limits: WireLimits) -> Any:
    """What msgpack packs of a leaf, of a value of a registered class, or of a list of these; None for anything else.

    It is within the limits. This spares a small event the look at its levels, and the calls from C for what msgpack
    does not know: ``event_class_encoded`` in ``make instructions``. Raises what the class raises.
    """
    if kind is list:
        form = value[:]
        return form if _lower_all(form, 0, limits) else None
    if kind in _leaf_kinds:
        return _leaf_form(value)
    registration = registration_of(kind)
    if registration is None:
        return None
    fields = registration.values(value)
    form = [_REGISTERED, registration.name, *fields]
    for field in fields:
        if type(field) not in _SCALARS:
            return form if _lower_all(form, 2, limits) else None
    return form if len(fields) <= limits.event_entries_few else None


def _lower_all(form: list[Any], start: int, limits: WireLimits) -> bool:
    """Put lists in the place of all values in ``form``, from ``start`` on, that are of registered classes.

    Level by level. False if there is anything else than those, scalars and leaves, or too much.
    """
    level, entries, containers = [form], len(form), 1
    for _ in range(limits.event_nesting_max):
        below: list[Any] = []
        for inner in level:
            for place in range(start, len(inner)):
                field = inner[place]
                kind = type(field)
                if kind in _SCALARS:
                    continue
                if kind in _leaf_kinds:
                    inner[place] = _leaf_form(field)
                    continue
                registration = registration_of(kind)
                if registration is None or entries > _FORM_ENTRIES_MAX:
                    return False
                inner[place] = under = [_REGISTERED, registration.name, *registration.values(field)]
                entries, containers = entries + len(under), containers + 1
                below.append(under)
        if not below:
            return entries <= _FORM_ENTRIES_MAX and _are_few(entries, containers, limits)
        level, start = below, 2
    return False


def _check(value: Any, kind: type, limits: WireLimits) -> None:
    level = _first_level(value, kind, limits)
    if level is None or not _is_small(level, limits):
        _check_value(value, limits)


def _lower(value: Any) -> Any:
    """Return what msgpack packs instead of a value that it does not know."""
    kind = type(value)
    if kind is tuple:
        return [_TUPLE, *value]
    if kind in _SETS:
        _refuse_equal_hashes(value)
        return [_MARKS[ExtensionType.SET if kind is set else ExtensionType.FROZENSET], *_in_order(value)]
    registration = registration_of(kind)
    if registration is not None:
        return [_REGISTERED, registration.name, *registration.values(value)]
    if kind is int:
        raise OverflowError("Integer value out of range")
    if kind in _leaf_kinds:
        return _leaf_form(value)
    if getattr(value, "nbytes", 0) >= LEAF_BYTES:
        raise _LargeArrayMet
    leaf = _leaves().encode_leaf(value, CODEC_LIMITS.event_bytes_max)
    if leaf is None:
        raise TypeError(f"can not serialize {class_name(kind)!r} object")
    if leaf[0] != ExtensionType.NUMPY_ARRAY:
        _leaf_kinds.add(kind)
    return msgpack.ExtType(*leaf)


def _leaf_form(value: Any) -> Any:
    """A leaf whose type is in ``_leaf_kinds``, without the checks of ``ExtType``, which take as long as the rest."""
    return tuple.__new__(msgpack.ExtType, _leaves().encode_leaf(value, CODEC_LIMITS.event_bytes_max))


class _LargeArrayMet(Exception):
    """The event has an array that msgpack would copy several times."""


def _encode_large_bytes(value: bytes, limits: WireLimits) -> bytes:
    size = 5 + len(value)
    if size > limits.event_bytes_max:
        raise _too_many_bytes(size, limits)
    return b"".join((b"\xc6", len(value).to_bytes(4, "big"), value))


def _encode_large_arrays(value: object, limits: WireLimits) -> bytes:
    """Encode an event with large arrays: msgpack packs a placeholder for each, and each is copied once."""
    arrays: list[tuple[bytes, Any]] = []
    size = 0

    def lower(entry: Any) -> Any:
        nonlocal size
        if getattr(entry, "nbytes", 0) < LEAF_BYTES or registration_of(type(entry)) is not None:
            return _lower(entry)
        if not _leaves().is_large_array(entry, LEAF_BYTES, limits.event_bytes_max):  # raises if it alone is too large
            raise TypeError(f"can not serialize {type(entry).__name__!r} object")
        size += entry.nbytes
        if size > limits.event_bytes_max:
            raise _too_many_bytes(size, limits)
        arrays.append(_leaves().encode_large_array(entry))
        return msgpack.ExtType(PLACEHOLDER, (len(arrays) - 1).to_bytes(4, "big"))

    try:
        small = _Packer(default=lower, strict_types=True).pack(value)
    except EventEncodeError:
        raise
    except Exception as error:
        raise _unsendable(value, error, limits) from error
    pieces: list[Any] = []
    end = 0
    view = memoryview(small)
    for place in run_steps(skim(small, limits, len(small) + 1, found=PLACEHOLDER)).leaves:
        head, data = arrays[int.from_bytes(small[place.place : place.place + 4], "big")]
        ext = b"\xc9" + (len(head) + len(data)).to_bytes(4, "big") + bytes((ExtensionType.NUMPY_ARRAY,))
        pieces += (view[end : place.start], ext, head, data)
        end = place.place + place.size
    pieces.append(view[end:])
    total = sum(map(len, pieces))
    if total > limits.event_bytes_max:
        raise _too_many_bytes(total, limits)
    return b"".join(pieces)


def _in_order(members: Collection[Any]) -> Iterable[Any]:
    """The same order for equal sets, because equal splits must have equal bytes."""
    if set(map(type, members)) in ({str}, {int}, {bytes}):
        return sorted(members)
    return sorted(members, key=_Packer(default=_lower, strict_types=True).pack)


@cache
def _leaves() -> Any:
    """The module of leaves, imported when the first one is met: what it needs would slow down each new task."""
    from protocol.wire import leaf_values

    return leaf_values


def _first_level(value: Any, kind: type, limits: WireLimits) -> Collection[Any] | None:
    """Return what the event contains. None for what is not a container, and for a map that is too large."""
    if kind is list or kind is tuple:
        return cast("Collection[Any]", value)
    if kind is dict:
        return get_referents(value) if len(value) <= limits.event_map_entries_max else None
    return _fields_or_members(value, kind, limits)


def _is_small(level: Collection[Any], limits: WireLimits) -> bool:
    """Whether the counts of an event are within the limits, as far as that can be told cheaply. False if in doubt.

    ``level`` is what the event contains. Each entry of a level is counted as a container with two marks, unless this
    shows too many.
    """
    entries, containers, over = len(level), 1, cast("Collection[Any]", ())
    for _ in range(limits.event_nesting_max - 1):
        below = _inside_of(level, limits.event_items_max - entries)
        if not below:
            if below is None:
                return False
            return _are_few(entries, containers + len(level), limits) or (
                _are_few(entries, containers, limits) and _SCALARS.issuperset(map(type, level))
            )
        # Only now, because it takes long: if there is nothing below, there was no class among what was found.
        if not _PLAIN.issuperset(map(type, over)):
            return False
        if len(below) > limits.event_map_entries_max and _has_large_map(level, limits):
            return False
        entries, containers = entries + len(below), containers + len(level)
        if not _are_few(entries, containers, limits):
            return False
        over, level = level, below
    return False


def _are_few(entries: int, containers: int, limits: WireLimits) -> bool:
    return containers <= limits.event_containers_max and entries + 2 * containers <= limits.event_items_max


def _fields_or_members(value: Any, kind: type, limits: WireLimits) -> Collection[Any] | None:
    if kind in _SETS:
        return list(value) if len(value) <= limits.event_map_entries_max else None
    registration = registration_of(kind)
    if registration is not None:
        with suppress(Exception):  # the class is the user's; packing will raise it again, and say where
            return registration.values(value)
    return None


def _inside_of(level: Collection[Any], at_most: int) -> list[Any] | None:
    """Return what is inside the entries of a level. None if that is more than ``at_most``.

    A list may be there many times, and is then listed as often: so only a few values are looked into together. What is
    inside other objects than containers leads to their classes, and from there to everything: see ``_PLAIN``.
    """
    values: Any = level
    if len(values) <= _FEW:
        lists = [entry for entry in values if type(entry) not in _SCALARS]
        # A list that is the only container of its level is looked into without a copy.
        return lists[0] if len(lists) == 1 and type(lists[0]) is list else get_referents(*lists)
    below = get_referents(*values[:_FEW])
    start, count = _FEW, len(values)
    while start < count:
        if len(below) > at_most:
            return None
        end = start + (_MANY if below else 4 * _MANY)
        below += get_referents(*values[start:end])
        start = end
    return below


def _has_large_map(level: Iterable[Any], limits: WireLimits) -> bool:
    kinds = {dict, set, frozenset}
    return any(len(entry) > limits.event_map_entries_max for entry in level if type(entry) in kinds)


def _refuse_equal_hashes(members: Collection[Any]) -> None:
    if not _SCALARS.issuperset(map(type, members)):
        most = max(Counter(map(hash, members)).values())
        if most > _EQUAL_HASHES_MAX:
            raise _EqualHashes(
                f"{most} members of a set or keys of a dict have the same hash, and at most {_EQUAL_HASHES_MAX} may: "
                "send them as a list"
            )


class _EqualHashes(ValueError):
    """Too many members of a set, or keys of a dict, have the same hash."""


_Place = tuple["_Place | None", object]  # a linked list of keys: a path costs nothing until it is needed


def _check_value(root: object, limits: WireLimits) -> None:
    """Check types, nesting and counts, without recursion: a list may contain itself, or the same part many times.

    A flat event costs one pass in C.
    """
    pending: list[tuple[Any, int, _Place | None]] = [(root, 1, None)]
    containers, items = 1, 0
    while pending:
        value, depth, place = pending.pop()
        inner, marks = _inside(value, place, limits)
        items += len(inner) + marks
        if items > limits.event_items_max:
            raise EventEncodeError(_too_many_items(inner, place, limits))
        if depth > limits.event_nesting_max:
            raise EventEncodeError(f"{_EVENT} nests deeper than {limits.event_nesting_max}: flatten it")
        if type(value) in _MAPS and len(value) > limits.event_map_entries_max:
            raise EventEncodeError(_too_large_map(value, place, limits))
        below = len(pending)
        if type(value) is dict and not _SCALARS.issuperset(map(type, value)):
            odd = [key for key in value if type(key) not in _SCALARS]
            pending.extend((key, depth + 1, (place, _Key(key))) for key in odd if not _is_leaf(key, place, limits))
        if not _SCALARS.issuperset(map(type, inner)):
            pending.extend((entry, depth + 1, under) for entry, under in _containers_in(value, inner, place, limits))
        containers += len(pending) - below
        if containers > limits.event_containers_max:
            raise EventEncodeError(
                f"{_EVENT} has more than {limits.event_containers_max} lists and maps: send it in parts, "
                "or send what belongs together as one bytes value"
            )


def _containers_in(
    value: Any, inner: Collection[Any], place: _Place | None, limits: WireLimits
) -> Iterable[tuple[Any, _Place]]:
    """Yield each entry of a container that has something inside it, with its place."""
    for key, entry in zip(value, inner, strict=True) if type(value) is dict else enumerate(inner):
        if type(entry) not in _SCALARS and not _is_leaf(entry, (place, key), limits):
            yield entry, (place, key)


_MAPS = frozenset({dict, set, frozenset})


class _Key(NamedTuple):
    """In a path, a key itself rather than the value under it."""

    key: object

    def __repr__(self) -> str:
        return f"the key {self.key!r}"


def _inside(value: Any, place: _Place | None, limits: WireLimits) -> tuple[Collection[Any], int]:
    """Return what a container has, and how many entries its mark takes on the wire. Raise for what is none."""
    kind = type(value)
    if kind is list:
        return value, 0
    if kind is dict:
        return value.values(), 0
    if kind is tuple or kind in _SETS:
        return value, 1
    registration = registration_of(kind)
    if registration is not None:
        try:
            return registration.values(value), 2
        except Exception as error:
            raise EventEncodeError(f"{_path(place)} cannot be encoded: {describe(error)}") from error
    if place is None and _is_leaf(value, place, limits):
        return (), 0
    raise EventEncodeError(f"{_path(place)} is of type {full_name(kind)}, {_remedy(value)}")


def _is_leaf(value: Any, place: _Place | None, limits: WireLimits) -> bool:
    """Whether the value is sent without anything inside it. Raises for one that cannot be sent."""
    if type(value) in _BYTES_LIKE:
        return True
    if type(value) in _PLAIN or registration_of(type(value)) is not None:
        return False
    try:
        if _leaves().is_large_array(value, LEAF_BYTES, limits.event_bytes_max):
            return True
        return _leaves().encode_leaf(value, limits.event_bytes_max) is not None
    except Exception as error:
        raise EventEncodeError(f"{_path(place)} cannot be encoded: {text_of(error)}") from error


def _remedy(value: Any) -> str:
    kind = type(value)
    registrable = hasattr(kind, "__dataclass_fields__") or hasattr(kind, "_fields") or hasattr(kind, "__members__")
    if registrable and kind.__module__ != "msgpack.ext":
        base = next((name.name for name in map(registration_of, kind.__mro__) if name is not None), None)
        also = f" (only its base {base!r} is)" if base else ""
        return (
            f"which is not registered{also}: write @headgate.event above the class, or convert it to a dict or a list"
        )
    if issubclass(type(value), Awaitable):  # a value may lie when it is asked for its class
        return "which an event cannot have: await it first, and use its result"
    return (
        "which an event cannot have: convert it to a plain value, a list or a dict, or to an instance of a dataclass "
        "that is registered with @headgate.event"
    )


def _too_many_bytes(size: int, limits: WireLimits) -> EventEncodeError:
    raised = "raise event_bytes_max of SidecarLimits, " if limits.is_a_setting else ""
    return EventEncodeError(
        f"{_EVENT} takes {size} bytes, which exceeds the limit of {limits.event_bytes_max}: "
        f"{raised}send it in parts, or send a reference to it"
    )


def _too_many_items(inner: Collection[Any], place: _Place | None, limits: WireLimits) -> str:
    items_max = limits.event_items_max
    if len(inner) > items_max:
        return f"{_path(place)} has {len(inner)} entries, more than {items_max}: send it in parts"
    return f"the lists and maps of {_EVENT} have more than {items_max} entries altogether: send it in parts"


def _too_large_map(value: Any, place: _Place | None, limits: WireLimits) -> str:
    kind, instead = ("map", "a list of pairs") if type(value) is dict else ("set", "a list")
    return (
        f"{_path(place)} has {len(value)} entries, and a {kind} at most {limits.event_map_entries_max}: "
        f"send it in parts, or send {instead}"
    )


def _path(place: _Place | None) -> str:
    keys = ""
    while place is not None:
        place, key = place
        keys = f"[{show(key, 40)}]{keys}"
    return f"{_EVENT}{keys}"


def _unsendable(value: Any, error: Exception, limits: WireLimits) -> EventEncodeError:
    """Find what could not be packed, and name its place."""
    try:
        if type(value) not in _SCALARS:
            _check_value(value, limits)
        place, scalar = _odd_scalar(value, limits)
    except EventEncodeError as found:
        return found
    remedy = ""
    if type(scalar) is int:
        remedy = ". An integer has 64 bits: send a larger one as a str"
    elif type(scalar) is str:
        remedy = '. A str must be valid Unicode: send bytes, or text.encode("utf-8", "replace").decode()'
    return EventEncodeError(f"{_path(place)} cannot be encoded: {text_of(error)}: {show(scalar, 40)}{remedy}")


def _odd_scalar(root: object, limits: WireLimits) -> tuple[_Place | None, object]:
    """The number or the text that cannot be packed, and its place; or the whole."""
    pending: list[tuple[Any, _Place | None]] = [(root, None)]
    while pending:
        value, place = pending.pop()
        kind = type(value)
        if (kind is int and not -(2**63) <= value < 2**64) or (kind is str and not is_encodable(value)):
            return place, value
        if kind in _SCALARS or _is_leaf(value, place, limits):
            continue
        inner, _ = _inside(value, place, limits)
        if kind is dict:
            pending.extend((key, (place, _Key(key))) for key in value)
        entries = zip(value, inner, strict=True) if kind is dict else enumerate(inner)
        pending.extend((one, (place, key)) for key, one in entries)
    return None, root


# --- receiving ----------------------------------------------------------------------------------------------------


def decode_event(data: bytes, limits: WireLimits = CODEC_LIMITS) -> Any:
    """Decode the event in a payload. Raises ``RemoteProtocolError`` if it is not one, or exceeds a limit.

    The worst event takes a second. On an event loop, use ``decode_event_in_steps`` for more than ``EVENT_STEP_BYTES``.
    """
    size = len(data)
    if size > 4 and data[1] == _MARK_FIRST and size <= limits.event_bytes_uncounted:
        return _decode_marked(data, limits)
    if size <= limits.event_bytes_flat:
        try:
            # Without a maximum, msgpack would build its own timestamp without asking.
            return _unpack(data, strict_map_key=False, max_ext_len=0, ext_hook=_refuse_extension)
        except _UNPACK_ERRORS:
            return _decode_flat(data, limits)  # it has extension types, or is wrong
    if size > limits.event_bytes_uncounted:
        return run_steps(decode_event_in_steps(data, limits, size))
    try:
        event = _unpack(
            data, strict_map_key=False, max_array_len=CLAIMS_UNCHECKED, max_ext_len=0, ext_hook=_refuse_extension
        )
    except _UNPACK_ERRORS as error:
        return _decode_long_list(data, limits) if "max_array_len" in str(error) else _decode_extended(data, limits)
    if type(event) in _SCALARS:
        return event
    level = event if type(event) is list else event.values()
    if len(level) > _FEW:
        _check_nesting_of_all(level, limits)
        return event
    for entry in level:
        if type(entry) not in _SCALARS:
            _check_nesting_of_all(level, limits)
            break
    return event


def _decode_marked(data: bytes, limits: WireLimits) -> Any:
    """Decode an event of at most ``event_bytes_uncounted`` that is probably a list with a mark.

    A short tuple, or a value of a class with few fields, is often all there is: then what follows the mark is a list
    that plain msgpack can carry.
    """
    if 0x91 <= data[0] <= 0x9F and data[2] == 0 and data[3] in _MARKED_CODES:
        try:
            values = _unpack(
                _LIST_HEADS[data[0] - 0x91] + data[4:],
                strict_map_key=False,
                max_array_len=CLAIMS_UNCHECKED,
                max_ext_len=0,
                ext_hook=_refuse_extension,
            )
        except _UNPACK_ERRORS:
            pass  # it has other extension types, too, or is wrong
        else:
            if len(data) > limits.event_nesting_max:
                _check_nesting_of_all(values, limits)
            return tuple(values) if data[3] == _TUPLE_CODE else _build_registered(values)
    return _decode_extended(data, limits)


def _decode_flat(data: bytes, limits: WireLimits) -> Any:
    """Decode an event of at most ``event_bytes_flat`` that has extension types.

    It is too small to exceed a limit, and its maps are too small for keys of equal hashes to take long. So if its only
    extension types are leaves, they are all that is left to build.
    """
    if _MARK_START not in data and _TIMESTAMP_CODE not in data:
        try:
            return _unpack(data, strict_map_key=False, ext_hook=_leaves().decode_leaf)
        except _UNPACK_ERRORS:
            pass
    return _decode_extended(data, limits)


def _decode_long_list(data: bytes, limits: WireLimits) -> Any:
    """Decode a small event that claims a list of more than ``CLAIMS_UNCHECKED`` entries.

    msgpack may allocate a list when it reads its header, and lists can nest. So what is claimed is checked first.
    """
    try:
        _scan(data)
        event = _unpack(data, strict_map_key=False, max_ext_len=0, ext_hook=_refuse_extension)
    except _UNPACK_ERRORS:
        return _decode_extended(data, limits)
    _check_nesting_of_all(event if type(event) is list else event.values(), limits)
    return event


def _check_nesting_of_all(level: Any, limits: WireLimits) -> None:
    """As ``_check_nesting``, for the entries of a small list or dict without extension types."""
    for _ in range(limits.event_nesting_max - 1):
        if len(level) <= _FEW:
            lists = [entry for entry in level if type(entry) not in _SCALARS]
            if len(lists) == 1 and type(lists[0]) is list:
                level = lists[0]  # without a copy
                continue
            level = lists
        level = get_referents(*level)
        if not level:
            return
    if not _SCALARS.issuperset(map(type, level)):
        raise _nests_deeper(limits)


EVENT_STEP_BYTES = 8192
"""How many bytes of an event one step decodes: usually in a tenth of a millisecond, at worst in some ten."""

_STEP_VALUES = 65_536

EventSteps = Generator[None, None, Any]


def decode_event_in_steps(
    data: bytes, limits: WireLimits = CODEC_LIMITS, step_bytes: int = EVENT_STEP_BYTES
) -> EventSteps:
    """Decode like ``decode_event``, but yield after each step of bounded cost, and return the event at the end.

    So an event loop can do other work between the steps. The first step skips through the data, which builds nothing
    and shows whether the claimed entries are there: msgpack may allocate a list when it reads its header, and lists can
    nest. The next ones decode ``step_bytes`` each, and stop when the containers or their entries exceed a limit. The
    last ones check the nesting. Where msgpack has no C extension, one step decodes everything.

    If an extension type is met, decoding begins again, with a call for each container.
    """
    size = len(data)
    if size > limits.event_bytes_max:
        raise RemoteProtocolError(f"an event of {size} bytes exceeds the limit of {limits.event_bytes_max}")
    if size >= LARGE_EVENT_BYTES:
        return (yield from _unpack_large(data, limits, step_bytes))
    try:
        _scan(data)
        yield
        if _MARK_START not in data:
            with suppress(_ExtensionMet):
                return (yield from _unpack_plain(data, limits, step_bytes))
        return (yield from _unpack_extended(data, limits, step_bytes, _builders_for(data)))
    except _UNPACK_ERRORS as error:
        raise _not_an_event(error) from None


def run_steps(steps: EventSteps) -> Any:
    """Run all steps without a pause, and return the event."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _unpack_large(data: bytes, limits: WireLimits, step_bytes: int) -> EventSteps:
    """Decode a large event: its large leaves apart, the rest as any other."""
    try:
        leaves, codes = yield from skim(data, limits, LEAF_BYTES)
        kinds: tuple[type[_Builder], ...] = (_Builder, _NestingBuilder)
        if ExtensionType.REGISTERED in codes:
            kinds = (_NestingBuilder,)
        if leaves:
            reader = LeafReader()
            yield from reader.read(data, leaves)
            return (yield from _unpack_extended(reader.small, limits, step_bytes, kinds, reader))
        if codes:
            return (yield from _unpack_extended(data, limits, step_bytes, kinds))
        return (yield from _unpack_plain(data, limits, step_bytes))
    except _UNPACK_ERRORS as error:
        raise _not_an_event(error) from None


class _ExtensionMet(Exception):
    """The event has extension types: decoding it takes a call for each container."""


def _unpack_plain(data: bytes, limits: WireLimits, step_bytes: int) -> EventSteps:
    size = len(data)
    exceedable = size > min(limits.event_containers_max, limits.event_items_max)
    count = _Counts(limits).add if exceedable else None
    unpacker = _event_unpacker(
        size, limits, max_ext_len=0, ext_hook=_meet_extension, list_hook=count, object_hook=count
    )
    try:
        event = yield from _feed(unpacker, data, step_bytes)
    except ValueError as error:
        if "max_ext_len" in str(error):
            raise _ExtensionMet from None
        raise
    del unpacker, count
    if type(event) not in _SCALARS:
        yield from _check_nesting(event, limits)
    return event


def _check_nesting(event: Any, limits: WireLimits, kinds: frozenset[type] | None = None) -> Generator[None, None, None]:
    """Check the nesting of an event, in steps.

    The garbage collector shows exactly what is inside lists, tuples, dicts and sets. Of any other type but scalars and
    leaves it shows everything that can be reached: so if the event may have one, ``kinds`` are the types to accept.
    """
    level = [event]
    for _ in range(limits.event_nesting_max):
        if kinds is not None and not kinds.issuperset(map(type, level)):
            raise ValueError("an extension type that is not a value of an event")
        below: list[Any] = []
        for start in range(0, len(level), _STEP_VALUES):
            yield
            below += get_referents(*level[start : start + _STEP_VALUES])
        if not below:
            return
        level = below
    if not _flat.issuperset(map(type, level)):
        raise _nests_deeper(limits)


def _unpack_extended(
    data: bytes,
    limits: WireLimits,
    step_bytes: int,
    kinds: tuple[type[_Builder], ...],
    leaves: LeafReader | None = None,
) -> EventSteps:
    for kind in kinds:
        builder = kind(limits, counted=True)
        hooks = builder.hooks()
        if leaves is not None:
            hooks["ext_hook"] = leaves.hook(builder.take_extension)
        unpacker = _event_unpacker(len(data), limits, **hooks)
        with suppress(_OpaqueMet):
            event = yield from _feed(unpacker, data, step_bytes)
            yield from builder.check(event)
            return event


def _decode_extended(data: bytes, limits: WireLimits) -> Any:
    """Decode an event of at most ``event_bytes_uncounted`` that has extension types."""
    try:
        if len(data) > CLAIMS_UNCHECKED:
            _scan(data)
        if _nests_little(data, limits):
            return _ShallowBuilder(limits, counted=False).build(data)
        for kind in _builders_for(data):
            builder = kind(limits, counted=False)
            with suppress(_OpaqueMet):
                event = _unpack(data, strict_map_key=False, **builder.hooks())
                run_steps(builder.check(event))
                return event
    except _UNPACK_ERRORS as error:
        raise _not_an_event(error) from None


def _nests_little(data: bytes, limits: WireLimits) -> bool:
    """Whether an event is too small to nest too deep: it has at most as many containers as bytes that may begin one.

    Not if msgpack's own extension type may be there, which it builds without asking.
    """
    return len(data) - len(data.translate(None, _CONTAINER_FIRSTS)) <= limits.event_nesting_max and (
        _TIMESTAMP_CODE not in data
    )


def _builders_for(data: bytes) -> tuple[type[_Builder], ...]:
    """The builders to try: the second one takes all events, and longer."""
    return (_NestingBuilder,) if _REGISTERED_START in data else (_Builder, _NestingBuilder)


def _feed(unpacker: Any, data: bytes, step_bytes: int) -> EventSteps:
    size = len(data)
    step_bytes = step_bytes if _continues() else size
    event: Any = None
    for position in range(0, size, step_bytes):
        unpacker.feed(data[position : position + step_bytes])
        try:
            event = unpacker.unpack()
        except msgpack.OutOfData:
            yield
    return event


def _scan(data: bytes) -> None:
    """Skip through the data, which builds nothing. Raises unless what is claimed is there, and nothing follows it."""
    size = len(data)
    scan = _Unpacker(max_buffer_size=size)
    scan.feed(data)
    scan.skip()
    if scan.tell() != size:
        raise ValueError("bytes follow the value")


class _Counts:
    """The containers and entries of one event, as msgpack completes them."""

    __slots__ = ("_containers", "_items", "_limits")

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._containers = 0
        self._items = 0

    def add(self, container: Any) -> Any:
        self._containers += 1
        self._items += len(container)
        if self._containers > self._limits.event_containers_max:
            raise ValueError(f"more than {self._limits.event_containers_max} lists and maps")
        if self._items > self._limits.event_items_max:
            raise ValueError(f"more than {self._limits.event_items_max} entries in its lists and maps")
        return container


class _Mark:
    """Stands at the head of a list: what follows it makes a value of this kind."""

    __slots__ = ("code",)

    def __init__(self, code: ExtensionType) -> None:
        self.code = code


class _OpaqueMet(Exception):
    """The event has values of which the garbage collector shows more than what was sent, such as their class."""


_DECODED_MARKS = {int(code): _Mark(code) for code in CONTAINER_TYPES}
_TUPLE_MARK, _REGISTERED_MARK = _DECODED_MARKS[ExtensionType.TUPLE], _DECODED_MARKS[ExtensionType.REGISTERED]
_flat: set[type] = {_Mark, *_SCALARS}
"""Types of values that contain no others. Those of leaves are added when the first one arrives."""


class _Builder:
    """Builds the values of one event that has extension types, as msgpack completes what they are made of.

    msgpack hands over the entries of a map instead of a dict: a dict is made only of keys whose hashes are different.
    """

    __slots__ = ("_counts", "_limits", "_marks")

    def __init__(self, limits: WireLimits, *, counted: bool) -> None:
        self._limits = limits
        self._counts = _Counts(limits) if counted else None
        self._marks = 0

    def hooks(self) -> dict[str, Any]:
        """What msgpack calls."""
        return {
            "ext_hook": self.take_extension,
            "list_hook": self.take_list,
            "object_pairs_hook": self.take_pairs,
        }

    def take_extension(self, code: int, data: bytes) -> Any:
        if not data and (mark := _DECODED_MARKS.get(code)) is not None:
            if mark is _REGISTERED_MARK:
                raise _OpaqueMet
            self._marks += 1
            return mark
        leaf = _leaves().decode_leaf(code, data)
        if get_referents(leaf):
            raise _OpaqueMet
        _flat.add(type(leaf))
        return leaf

    def take_list(self, values: list[Any]) -> Any:
        if self._counts is not None:
            self._counts.add(values)
        if values:
            head = values[0]
            if head is _TUPLE_MARK:
                self._marks -= 1
                return tuple(values[1:])
            if type(head) is _Mark:
                return self._marked(values)
        return values

    def take_pairs(self, pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        pairs = pairs if type(pairs) is list else list(pairs)
        if self._counts is not None:
            self._counts.add(pairs)
        try:
            value = dict(pairs) if len(pairs) <= _EQUAL_HASHES_MAX else {}
            if not value:
                _refuse_equal_hashes([key for key, _ in pairs])
                value = dict(pairs)
        except BaseException as error:
            raise _unhashed([key for key, _ in pairs], error) from error
        return value

    def check(self, event: Any) -> Generator[None, None, None]:
        """Check what shows only at the end, in steps. Raises ``ValueError``, or ``RemoteProtocolError``."""
        self.check_marks()
        yield from _check_nesting(event, self._limits, _CONTAINERS.union(_flat))

    def check_marks(self) -> None:
        if self._marks:
            raise ValueError("an extension type in a place where it has no meaning")

    def _marked(self, values: list[Any]) -> Any:
        self._marks -= 1
        code = values[0].code
        if code is ExtensionType.REGISTERED:
            return _build_registered(values[1:])
        if code is ExtensionType.PART_EVENT:
            raise ValueError("an envelope with the name of a part, which only checkpoints of earlier releases have")
        members = values[1:]
        if len(members) > self._limits.event_map_entries_max:
            raise ValueError(f"a set of more than {self._limits.event_map_entries_max} members")
        try:
            _refuse_equal_hashes(members)
            return (set if code is ExtensionType.SET else frozenset)(members)
        except BaseException as error:
            raise _unhashed(members, error) from error


class _ShallowBuilder(_Builder):
    """Builds an event that ``_nests_little``: values of users' classes, too, and nothing has to be tracked."""

    __slots__ = ()

    def build(self, data: bytes) -> Any:
        """Raises what msgpack raises, or ``RemoteProtocolError``."""
        event = _unpack(
            data,
            strict_map_key=False,
            ext_hook=self.take_extension,
            list_hook=self.take_list,
            object_pairs_hook=self.take_pairs,
        )
        self.check_marks()
        return event

    def take_extension(self, code: int, data: bytes) -> Any:
        if not data and (mark := _DECODED_MARKS.get(code)) is not None:
            self._marks += 1
            return mark
        return _leaves().decode_leaf(code, data)


class _NestingBuilder(_Builder):
    """Builds values of users' classes too. They may show anything as their inside, so it tracks the nesting itself."""

    __slots__ = ("_depths",)

    def __init__(self, limits: WireLimits, *, counted: bool) -> None:
        super().__init__(limits, counted=counted)
        # The nesting of each container that has others inside and is not yet inside one, by its id.
        self._depths: dict[int, int] = {}

    def take_extension(self, code: int, data: bytes) -> Any:
        if not data and (mark := _DECODED_MARKS.get(code)) is not None:
            self._marks += 1
            return mark
        leaf = _leaves().decode_leaf(code, data)
        _flat.add(type(leaf))
        return leaf

    def take_list(self, values: list[Any]) -> Any:
        depth = self._depth_over(values)
        value = super().take_list(values)
        if depth > 1:
            self._depths[id(value)] = depth
        return value

    def take_pairs(self, pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        pairs = list(pairs)
        depth = self._depth_over([value for pair in pairs for value in pair])
        value = super().take_pairs(pairs)
        if depth > 1:
            self._depths[id(value)] = depth
        return value

    def check(self, event: Any) -> Generator[None, None, None]:
        if self._marks or type(event) is msgpack.Timestamp:
            raise ValueError("an extension type in a place where it has no meaning")
        yield from ()

    def _depth_over(self, inner: list[Any]) -> int:
        """All of a list in C, because it is one step: of all that is inside, only what is deeper is looked at here."""
        deepest = 0
        kinds = set(map(type, inner))
        if not _flat.issuperset(kinds):
            if msgpack.Timestamp in kinds:  # msgpack decodes this one by itself
                raise ValueError("extension type -1")
            deepest = 1
            if self._depths:
                deeper = self._depths.keys() & set(map(id, inner))
                deepest = max([1, *map(self._depths.pop, deeper)])
        if deepest >= self._limits.event_nesting_max:
            raise _nests_deeper(self._limits)
        return deepest + 1


def _build_registered(values: list[Any]) -> Any:
    """Build the value that is a name and fields."""
    try:
        return event_classes.find(values[0] if values else None).build(values[1:])
    except event_classes.NoFit as error:
        raise RemoteProtocolError(f"the event cannot be decoded: {_detail(error)}") from error
    except BaseException as error:  # whatever the user's class raises, an exit too
        raise RemoteProtocolError(
            f"the event cannot be decoded: its {values[0]!r:.100} cannot be built from {len(values) - 1} fields: "
            f"{type_name(error)}: {_detail(error)}. Correct the class: what it does when it is built, in "
            "__post_init__ for example, must succeed wherever its event arrives"
        ) from error


def _unhashed(members: list[Any], error: BaseException) -> Exception:
    """What to raise if a set of these members, or a dict with these keys, cannot be built. The classes are a user's."""
    if is_a(error, _EqualHashes):
        return error
    names = sorted({full_name(kind) for kind in set(map(type, members)) - _SCALARS})
    return RemoteProtocolError(
        f"the event cannot be decoded: a member of a set, or a key of a dict, of {', '.join(names)[:200]} cannot be "
        f"hashed or compared: {type_name(error)}: {_detail(error)}. Correct __hash__ and __eq__ of the class"
    )


def _continues() -> bool:
    """Whether msgpack continues within a value when more bytes arrive. Its decoder in Python begins again."""
    return bool(_Unpacker.__module__ != "msgpack.fallback")


def _event_unpacker(size: int, limits: WireLimits, **options: Any) -> Any:
    return _Unpacker(
        max_buffer_size=size,
        strict_map_key=False,
        max_str_len=size,
        max_bin_len=size,
        max_array_len=min(size, limits.event_items_max),
        max_map_len=min(size, limits.event_items_max, limits.event_map_entries_max),
        **options,
    )


def _not_an_event(error: BaseException) -> RemoteProtocolError:
    return RemoteProtocolError(f"an event that is not msgpack within the limits: {_detail(error)}")


def _nests_deeper(limits: WireLimits) -> RemoteProtocolError:
    return RemoteProtocolError(f"an event that nests deeper than {limits.event_nesting_max}")


def _detail(error: BaseException) -> str:
    return (text_of(error) or type_name(error))[:400]


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError  # decoding begins again


def _meet_extension(code: int, data: bytes) -> None:
    raise _ExtensionMet

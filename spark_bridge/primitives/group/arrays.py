# SPDX-License-Identifier: Apache-2.0

"""Adds up the NumPy arrays of all members of a group. The only module of a group that needs NumPy.

The order of the operations depends on the number of members and on the array's size alone, and each element is computed
in one place or in the same way everywhere. So all members get the same bits, and a training that was disturbed gets the
same ones as an undisturbed one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from spark_bridge.primitives.group.ring import Ring

_FEW_MEMBERS = 4


def direct_bytes(world_size: int) -> int:
    """Arrays of this size and larger travel directly between so many members, in a ring.

    Measured with ``benchmarks.all_reduce_routes``: the ring of 2 and of 4 is faster from the smallest array on, that of
    8 from 1 KiB on, because each step waits for the slowest member. To connect takes as long as some 20 small calls
    save. So a few numbers, such as a loss, go through the driver and need no connection.
    """
    return 256 if world_size <= _FEW_MEMBERS else 1024


ROUND_BYTES = 1 << 20
"""So many bytes of all members together are in the answer to one round through the driver."""

_FUNCTIONS: dict[str, Any] = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def all_reduce(
    array: ArrayLike,
    op: str,
    rank: int,
    world_size: int,
    gather: Callable[[str, bytes], Sequence[bytes]],
    ring: Callable[[], Ring | None],
) -> NDArray[Any]:
    """Return the reduction over the arrays of all members.

    ``gather``: all_gather of bytes, for calls of one kind. ``ring``: returns the ring, or None if there is none.
    """
    own = np.ascontiguousarray(array)
    function = _FUNCTIONS[op]
    if own.dtype.kind not in "biufc":
        raise TypeError(f"all_reduce takes arrays of numbers, not of {own.dtype}: convert it with array.astype(float)")
    kind = f"all_reduce({own.dtype}{list(own.shape)}, {op!r})"
    if world_size > 1 and own.nbytes >= direct_bytes(world_size) and (direct := ring()) is not None:
        return _around(direct, own, function, kind, rank, world_size).reshape(np.shape(array))
    result = np.empty_like(own)
    flat, out = own.reshape(-1), result.reshape(-1)
    count = max(1, ROUND_BYTES // world_size // own.itemsize)
    for first in range(0, own.size or 1, count):
        parts = gather(kind, flat[first : first + count].tobytes())
        piece = out[first : first + count]
        piece[:] = np.frombuffer(parts[0], own.dtype)
        for part in parts[1:]:
            function(piece, np.frombuffer(part, own.dtype), out=piece)
    return result.reshape(np.shape(array))


def _around(ring: Ring, own: NDArray[Any], function: Any, kind: str, rank: int, world_size: int) -> NDArray[Any]:
    """A ring all-reduce: each member adds up one part of the array, then each gets the parts of the others.

    A part is added up in the order of the ring, beginning with the member after the one that ends with it.
    """
    given, seen = blake2b(kind.encode()).digest(), bytearray(64)
    ring.exchange(memoryview(given), memoryview(seen))
    if seen != given:
        raise ValueError(
            f"the previous member in the ring did not call {kind}: shape, dtype and op must be the same in all"
        )
    result = own.reshape(-1).copy()
    bounds = [result.size * part // world_size for part in range(world_size + 1)]
    received = np.empty(max(end - begin for begin, end in pairwise(bounds)), own.dtype)

    def part(number: int) -> NDArray[Any]:
        number %= world_size
        return result[bounds[number] : bounds[number + 1]]

    for step in range(world_size - 1):
        mine = part(rank - step - 1)
        buffer = received[: mine.size]
        ring.exchange(_bytes(part(rank - step)), _bytes(buffer))
        function(buffer, mine, out=mine)
    for step in range(world_size - 1):
        ring.exchange(_bytes(part(rank - step + 1)), _bytes(part(rank - step)))
    return result


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.view(np.uint8).data

# SPDX-License-Identifier: Apache-2.0

"""The methods of a sidecar that make ready-made parts. They need no event loop: a part starts with its operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from protocol.arguments import AT_LEAST_1, NAME, POSITIVE, checked
from spark_bridge.driver.handle import StaysOnDriver
from spark_bridge.primitives.group.driver import Group
from spark_bridge.primitives.permits.driver import Permits
from spark_bridge.primitives.shared_value.driver import SharedValue
from spark_bridge.primitives.work_queue.driver import QUEUE_BYTES_MAX, WorkQueue
from spark_bridge.primitives.work_queue.task import ITEMS, KEY

__all__ = ["PartFactories"]

T = TypeVar("T")


class PartFactories(StaysOnDriver):
    """What ``Sidecar`` and ``SidecarRuntime`` have in common."""

    __slots__ = ()

    @checked(name=NAME)
    def shared(self, name: str, value: T) -> SharedValue[T]:
        """Return a new ``SharedValue``; see there. Give it to operators with ``uses=[value]``."""
        return SharedValue(name, value)

    @checked(name=NAME, per_s=POSITIVE, burst=AT_LEAST_1, concurrency=AT_LEAST_1)
    def permits(
        self, name: str, *, per_s: float | None = None, burst: int = 1, concurrency: int | None = None
    ) -> Permits:
        """Return new ``Permits``; see there for the arguments. Give them to operators with ``uses=[permits]``."""
        return Permits(name, per_s=per_s, burst=burst, concurrency=concurrency)

    @checked(name=NAME, roots=ITEMS, key=KEY, in_hand=AT_LEAST_1, bytes_max=AT_LEAST_1)
    def work_queue(
        self,
        name: str,
        roots: Iterable[T],
        *,
        key: Callable[[T], Any] | None = None,
        in_hand: int = 1,
        bytes_max: int = QUEUE_BYTES_MAX,
    ) -> WorkQueue[T]:
        """Return a new ``WorkQueue``; see there for the arguments. Give it to an operator with ``uses=[queue]``."""
        return WorkQueue(name, roots, key=key, in_hand=in_hand, bytes_max=bytes_max)

    @checked(name=NAME, size=AT_LEAST_1)
    def group(self, name: str, size: int | None = None, **settings: Any) -> Group:
        """Return a new ``Group``; see there for the arguments. Give it to an operator with ``uses=[group]``."""
        return Group(name, size, **settings)

# SPDX-License-Identifier: Apache-2.0

"""The map that the coordinators of one sidecar share.

A sidecar makes one store and gives it to every operator; a coordinator reaches it as ``context.store``. It holds live
objects of the driver's process, and no checkpoint contains it. In a new application it is empty, so return what must
outlive the driver from ``checkpoint_coordinator``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from protocol.arguments import checked
from protocol.describing import show
from protocol.errors import HeadgateError

T = TypeVar("T")


class StoreRevoked(HeadgateError, RuntimeError):
    """A write through a handle that was revoked; nothing was changed.

    The coordinator was replaced: let what still writes for it end.
    """


class CoordinatorStore:
    """A map from names to values that all coordinators of a sidecar share. Any thread may call any method.

    Each call is atomic: the value that a function sees does not change until its result is stored. Functions run on the
    caller's thread while all others wait, including the event loop. So keep them short, and never wait in them. A
    function that raises changes nothing.

    A value is never None, because None means that there is no value. ``get`` returns the object itself, not a copy:
    change it in place only inside ``apply``, and only if all others read it inside ``apply`` too.

    No checkpoint contains the store. In a new application it is empty. A coordinator that was replaced after a reset
    can only read: its writes raise ``StoreRevoked``.
    """

    # R100
    __slots__ = ("_lock", "_revoked", "_values")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._values: dict[str, Any] = {}
        self._revoked = False

    @checked()
    def contains(self, key: str) -> bool:
        """Whether there is a value."""
        with self._lock:
            return key in self._values

    @checked()
    def get(self, key: str) -> Any | None:
        """Return the value, or None if there is none."""
        with self._lock:
            return self._values.get(key)

    @checked()
    def put_if_absent(self, key: str, value: Any) -> Any | None:
        """Store ``value`` and return None if there is no value yet; otherwise return the present one, which stays."""
        if value is None:
            raise TypeError(
                f"cannot store None under {show(key)}: None means that there is no value: store another one, or "
                "let compute() return None to remove it"
            )
        with self._lock:
            present = self._values.get(key)
            if present is None:
                self._write(key, value)
            return present

    @checked()
    def compute_if_present(self, key: str, function: Callable[[Any], Any | None]) -> Any | None:
        """Replace a present value by ``function(value)`` and return that. If it is None, the value is removed."""
        with self._lock:
            present = self._values.get(key)
            return None if present is None else self._write(key, function(present))

    @checked()
    def compute(self, key: str, function: Callable[[Any | None], Any | None]) -> Any | None:
        """As ``compute_if_present``, but also without a value: then ``function`` gets None."""
        with self._lock:
            return self._write(key, function(self._values.get(key)))

    @checked()
    def apply(self, key: str, function: Callable[[Any | None], T]) -> T:
        """Return ``function(value)``, with None if there is no value. No other call comes in between."""
        with self._lock:
            return function(self._values.get(key))

    def view(self) -> CoordinatorStore:
        """Return another handle to the same values, which can be revoked separately."""
        view = CoordinatorStore()
        view._lock, view._values = self._lock, self._values
        return view

    def revoke(self) -> None:
        """Make this handle read-only permanently: later writes raise ``StoreRevoked``."""
        with self._lock:
            self._revoked = True

    def _write(self, key: str, value: Any | None) -> Any | None:
        if self._revoked:
            raise StoreRevoked(
                f"{show(key)} was not written: the coordinator that held this handle was replaced. Use the "
                "context that the new one got in start()"
            )
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = value
        return value

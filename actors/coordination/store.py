"""What the coordinators of one sidecar share with one another.

A sidecar makes one store and gives it to every operator; a coordinator reaches it as ``context.store``. It holds live
objects of the driver's process, and nothing of it is part of a checkpoint: after a restore it is empty, and what must
outlive the driver belongs into ``checkpoint_coordinator``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from protocol.errors import HeadgateError

T = TypeVar("T")


class StoreRevoked(HeadgateError, RuntimeError):
    """A write through a handle that was revoked; nothing was changed."""


class CoordinatorStore:
    """One map from names to values for all coordinators of a sidecar (R100). Every method may be called by any thread.

    Each call is atomic: what a function sees under its key stays so until its result is in. Functions run on the
    caller's thread while all others wait, the event loop too, so they must be short and must not wait for anything.
    One that raises changes nothing. A value is never None, which stands for "nothing there". What ``get`` returns is
    the object itself, not a copy: change it in place only inside ``apply`` and only if it is read there alone.
    """

    __slots__ = ("_lock", "_revoked", "_values")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._values: dict[str, Any] = {}
        self._revoked = False

    def contains(self, key: str) -> bool:
        """Whether there is a value."""
        with self._lock:
            return key in self._values

    def get(self, key: str) -> Any | None:
        """The value, None if there is none."""
        with self._lock:
            return self._values.get(key)

    def put_if_absent(self, key: str, value: Any) -> Any | None:
        """Put ``value`` where there is none, and return None; else return the value that is there, and stays."""
        if value is None:
            raise TypeError(f"no value for {key!r}: None means that nothing is there")
        with self._lock:
            present = self._values.get(key)
            if present is None:
                self._write(key, value)
            return present

    def compute_if_present(self, key: str, function: Callable[[Any], Any | None]) -> Any | None:
        """Where there is a value put ``function(value)`` in its place and return it; None takes the value away."""
        with self._lock:
            present = self._values.get(key)
            return None if present is None else self._write(key, function(present))

    def compute(self, key: str, function: Callable[[Any | None], Any | None]) -> Any | None:
        """As ``compute_if_present``, but ``function`` is called with None where there is no value."""
        with self._lock:
            return self._write(key, function(self._values.get(key)))

    def apply(self, key: str, function: Callable[[Any | None], T]) -> T:
        """Return ``function(value)``, of None where there is no value; no other call comes in between."""
        with self._lock:
            return function(self._values.get(key))

    def view(self) -> CoordinatorStore:
        """Another handle to the same values, which can be revoked by itself."""
        view = CoordinatorStore()
        view._lock, view._values = self._lock, self._values
        return view

    def revoke(self) -> None:
        """Make this handle read-only for ever: a write that has not happened yet raises ``StoreRevoked``."""
        with self._lock:
            self._revoked = True

    def _write(self, key: str, value: Any | None) -> Any | None:
        if self._revoked:
            raise StoreRevoked(f"{key!r} was not written: the coordinator that held this handle was replaced")
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = value
        return value

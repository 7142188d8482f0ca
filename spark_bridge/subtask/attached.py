# SPDX-License-Identifier: Apache-2.0

"""Lists the attempts in one Python worker, and manages what they share: the interpreter's switch interval.

Spark reuses workers, so globals, threads and sockets outlive a task (spark-facts 18), and operators may fork. This list
holds everything that must be gone before the next task starts. It is keyed by task attempt and has a lock, because
tests run several attempts in one process.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Protocol

__all__ = ["Attachable", "attach", "attached_keys", "detach"]


class Attachable(Protocol):
    """An attempt that holds a socket and a thread."""

    @property
    def key(self) -> tuple[int, str]: ...

    @property
    def sidecar(self) -> tuple[str, int]:
        """The address of its sidecar: two of them may have operators of one name."""
        ...

    @property
    def owner_thread(self) -> int: ...

    def close(self) -> None: ...

    def forget_after_fork(self) -> None: ...


_Whose = tuple[tuple[int, str], tuple[str, int]]


class _Process:
    """The state of one process. It is a class so that a forked child can start with a fresh instance."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.attached: dict[_Whose, Attachable] = {}
        self.usual_interval_s: float | None = None
        self.our_interval_s = 0.0


_process = _Process()


def attach(attempt: Attachable, switch_interval_s: float) -> None:
    """List ``attempt``, and close what an earlier task of the same thread has left behind.

    While anything is attached, the switch interval is at most ``switch_interval_s`` seconds; 0 leaves it alone. The
    I/O thread must confirm events while the task computes in pure Python. With CPython's 5 ms it would wait for the
    interpreter lock twice, 10 ms.

    Raises ``RuntimeError`` if the task already runs a subtask of the same operator.
    """
    me = threading.get_ident()
    with _process.lock:
        left_behind = [
            other for other in _process.attached.values() if other.owner_thread == me and other.key[0] != attempt.key[0]
        ]
    for other in left_behind:
        other.close()  # which detaches it
    whose = attempt.key, attempt.sidecar
    with _process.lock:
        if whose in _process.attached:
            raise RuntimeError(
                f"task {attempt.key[0]} already runs a subtask of operator {attempt.key[1]!r}, and an operator has one "
                "in each task: coordinate() another operator for the second function, or put both functions into one "
                "operator with headgate.chain()"
            )
        _process.attached[whose] = attempt
        if switch_interval_s > 0 and _process.usual_interval_s is None:
            usual = sys.getswitchinterval()
            if switch_interval_s < usual:
                _process.usual_interval_s = usual
                sys.setswitchinterval(switch_interval_s)
                _process.our_interval_s = sys.getswitchinterval()


def detach(attempt: Attachable) -> None:
    """Remove ``attempt`` from the list. The last one restores the switch interval, unless it was changed meanwhile."""
    with _process.lock:
        whose = attempt.key, attempt.sidecar
        if _process.attached.get(whose) is attempt:
            del _process.attached[whose]
        if not _process.attached and _process.usual_interval_s is not None:
            if sys.getswitchinterval() == _process.our_interval_s:
                sys.setswitchinterval(_process.usual_interval_s)
            _process.usual_interval_s = None


def attached_keys() -> list[tuple[int, str]]:
    """The ``(task_attempt_id, operator_id)`` of each attempt that is attached in this process, sorted."""
    with _process.lock:
        return sorted(key for key, _ in _process.attached)


def _in_the_child() -> None:
    """A forked child has copies of the sockets but none of the threads: it closes the copies silently."""
    global _process
    inherited, _process = _process, _Process()
    for attempt in inherited.attached.values():
        attempt.forget_after_fork()
    if inherited.usual_interval_s is not None:
        sys.setswitchinterval(inherited.usual_interval_s)


os.register_at_fork(after_in_child=_in_the_child)

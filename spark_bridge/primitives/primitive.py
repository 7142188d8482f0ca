# SPDX-License-Identifier: Apache-2.0

"""What every ready-made part has: a name, a half for the coordinator, and a half for the tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from actors.coordination import CoordinatorContext, OperatorCoordinator
from protocol.arguments import Rule
from protocol.attempts import FailureReason
from protocol.errors import GatewayFull, LocalProtocolError
from spark_bridge.primitives.counters.task import CountersPart
from spark_bridge.subtask.operator import SubtaskOperator
from spark_bridge.subtask.parts import COUNTERS

NAME_CHARS_MAX = 200
PARTS_OF_ALL: Mapping[str, Callable[[], SubtaskOperator]] = {COUNTERS: CountersPart}
"""What makes the parts that the tasks of every operator have."""


def checked_name(name: str) -> str:
    """Return the name of a part. Raises ``ValueError`` for one that no part can have."""
    given: object = name
    if not isinstance(given, str) or not 0 < len(name) <= NAME_CHARS_MAX:
        raise ValueError(f"the name must be a str of 1 to {NAME_CHARS_MAX} characters, not {name!r:.80}")
    if name.startswith("headgate."):
        raise ValueError(f"names that begin with 'headgate.' are reserved, so choose another one than {name!r}")
    return name


def not_the_state_of(kind: str, name: str) -> LocalProtocolError:
    """The error for a checkpoint in which ``name`` is that of another kind of part (H80)."""
    return LocalProtocolError(
        f"the checkpoint has a state of {name!r} that is not that of {kind}: another kind of part had this name when "
        'it was taken. Use that part again, or start without the checkpoint (restore="none")'
    )


def tell_all(context: CoordinatorContext, event: Any) -> None:
    """Send an urgent event to all attempts. If one of them is slow, the others do not wait for it."""
    try:
        context.gateways.broadcast_nowait(event, urgent=True)
    except GatewayFull:
        context.run_in_background(partial(context.gateways.broadcast, event, urgent=True), handler=raise_error)


async def raise_error(result: object, error: Exception | None) -> None:
    """The handler of work in the background whose failure is one of the coordinator."""
    if error is not None:
        raise error


USES = Rule(
    "a list of parts, uses=[part], as sidecar.shared(), sidecar.work_queue() and the like return them",
    lambda parts: True,
)


class Primitive(ABC):
    """A ready-made part that operators can use: ``coordinate(..., uses=[part])``.

    The same object is used in the tasks: a function that refers to it may be passed to ``handle.subtask``. There it
    stands for the part of that task.
    """

    outside_checkpoints: ClassVar[bool] = False
    """Whether its two halves exchange only facts about living attempts, which no checkpoint holds (H152)."""

    def __init__(self, name: str) -> None:
        self._name = checked_name(name)

    @property
    def name(self) -> str:
        """The name by which the driver's half and the tasks' halves find each other."""
        return self._name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}>"

    def figures(self) -> Mapping[str, float]:
        """Return what a status shows of this part: numbers by their names, which are few and fixed.

        Names are like ``entries``; a unit comes last (``bytes``), and what only grows ends with ``_total``. It is
        called on the sidecar's loop, for each status, so it must be cheap.
        """
        return {}

    @abstractmethod
    def coordinator(self, operator_id: str) -> OperatorCoordinator:
        """Return a new coordinator's half, for one operator."""

    @abstractmethod
    def task_part(self) -> Callable[[], SubtaskOperator]:
        """Return what makes a task's half. It is pickled; see ``elsewhere`` for a sidecar in another process."""


class Desk(Protocol):
    """What one part does for the tasks of all operators that use it. On the loop."""

    async def attach(self, half: Any, /) -> None: ...
    async def detach(self, half: Any, /) -> None: ...
    def forget(self, half: Any, subtask: int | None = None, attempt: int | None = None, /) -> None: ...


D = TypeVar("D", bound=Desk)


class Half(OperatorCoordinator, Generic[D]):
    """The half of one operator: passes on what its tasks want to a desk, which forgets attempts that are over (H176).

    It has no state in checkpoints. ``kind``: what the part is, with an article.
    """

    kind: ClassVar[str]

    def __init__(self, name: str, desk: D, operator_id: str) -> None:
        self._name = name
        self._desk = desk
        self.operator_id = operator_id
        self.context: CoordinatorContext

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context
        self.clock = context.clock
        await self._desk.attach(self)

    async def close(self) -> None:
        if hasattr(self, "clock"):
            await self._desk.detach(self)

    @property
    def now(self) -> float:
        """The time of the sidecar's clock."""
        return self.clock.now()

    def forget(self, subtask: int | None = None, attempt: int | None = None) -> None:
        """These attempts are over; by default all of the operator."""
        self._desk.forget(self, subtask, attempt)

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self.forget(subtask, attempt)

    async def subtask_finished(self, subtask: int, attempt: int) -> None:
        self.forget(subtask, attempt)

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self.forget()

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        if state:
            raise not_the_state_of(self.kind, self._name)
        if hasattr(self, "clock"):  # a restore comes before `start`
            self.forget()

# SPDX-License-Identifier: Apache-2.0

"""Which Spark jobs, and so which operators, belong to one call of ``Sidecar.run``.

While the action is called, a local property of Spark holds its id on the calling thread. Spark gives local properties
to every job that the thread starts, to the threads that Spark itself starts for it, to ``InheritableThread``, and to
each task of these jobs, which sends the id when it registers. So the action of a run is known as soon as the run is
known, even if facts are late or lost. The start of each job is a fact that has the id too, so the jobs of an action
that is cancelled are known before any task runs. Job tags are not touched, and job groups only to refuse the later jobs
of a cancelled action.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from py4j.clientserver import ClientServer
from pyspark import SparkContext

from actors.coordination.inputs import ActionId, check_input_id
from actors.logs import get_logger
from protocol.arguments import Rule, checked
from protocol.describing import describe
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.driver.interrupts import interrupts_held_back
from spark_bridge.task_entry import ACTION_PROPERTY

__all__ = ["ActionIds", "ActionMarks", "ActionRuns", "AwaitsActions", "names_of"]

log = get_logger("headgate.actions")

_GROUP = "spark.jobGroup.id"


class ActionMarks:
    """The threads that call actions now, with Spark's local properties of each. Any thread; all methods block."""

    def __init__(self, context: SparkContext | None) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._properties: dict[str, Any] = {}  # Java's, by the action
        self._forbidden: dict[str, str | None] = {}  # the job groups that the threads had before

    @contextmanager
    def marked(self, action_id: str) -> Iterator[None]:
        """Within the block, the jobs of this thread belong to the action.

        Has no effect if Python threads share JVM threads (``PYSPARK_PIN_THREAD=false``), whose local properties would
        mix, or if Spark cannot be asked.
        """
        context = self._context
        if context is None or not isinstance(context._gateway, ClientServer):
            yield
            return
        try:
            with interrupts_held_back():  # otherwise later jobs of this thread might belong to the action
                before = context.getLocalProperty(ACTION_PROPERTY)
                context.setLocalProperty(ACTION_PROPERTY, action_id)
                self._properties[action_id] = context._jsc.sc().getLocalProperties()
        except Exception as error:  # the context has stopped: the action reports that better
            log.warning("action property not set", error=describe(error))
            yield
            return
        try:
            yield
        finally:
            with interrupts_held_back(), suppress(Exception), self._lock:
                del self._properties[action_id]
                if action_id in self._forbidden:
                    context.setLocalProperty(_GROUP, self._forbidden.pop(action_id))  # type: ignore[arg-type]
                context.setLocalProperty(ACTION_PROPERTY, before)  # type: ignore[arg-type]  # None removes it

    def forbid(self, action_id: str, reason: str) -> None:
        """Have Spark refuse every job that the thread of this action submits from now on.

        The thread gets a job group that is cancelled together with its future jobs, until the action returns.
        """
        with self._lock:
            properties = self._properties.get(action_id)
            if properties is None or self._context is None:
                return
            group = f"headgate-cancelled-{action_id}"
            try:
                before = properties.getProperty(_GROUP)
                self._context._jsc.sc().cancelJobGroupAndFutureJobs(group, reason)
                properties.setProperty(_GROUP, group)
            except Exception as error:  # the context has stopped, and no job starts any more
                log.debug("jobs of action not forbidden", error=describe(error))
            else:
                self._forbidden[action_id] = before


@checked(operators=Rule("a list of handles or names", lambda operators: True))
def names_of(operators: Collection[OperatorHandle | str] | None) -> frozenset[str] | None:
    """The names of operators that are given as handles or names, or None."""
    if operators is None:
        return None
    return frozenset(operator if isinstance(operator, str) else operator.operator_id for operator in operators)


class ActionIds:
    """The ids of one call of ``run``, a new one for each time that the action is called. Unique over all processes.

    Raises:
        TypeError, ValueError: ``input_id`` cannot name an input.
    """

    def __init__(self, input_id: str | None) -> None:
        check_input_id(input_id)
        self._input_id = input_id
        self._call = secrets.token_hex(8)
        self._count = 0

    def next(self) -> str:
        """The id of the next call of the action."""
        self._count += 1
        return str(ActionId(self._call, self._count - 1, self._input_id))


class AwaitsActions(Protocol):
    """What ``ActionRuns`` needs from a sidecar. Loop only."""

    @property
    def fenced(self) -> Exception | None: ...

    def begin_action(self, action_id: str, operator_ids: frozenset[str] | None) -> None: ...

    def end_action(self, action_id: str) -> None: ...

    def action_failures(self, action_id: str) -> tuple[int, BaseException | None]: ...

    def action_ran(self, action_id: str) -> bool: ...

    async def settle_action(self, action_id: str) -> str: ...


class ActionRuns:
    """The ``Runs`` of one call of ``run``: only the operators of this action. Loop only."""

    def __init__(
        self, sidecar: AwaitsActions, operator_ids: frozenset[str] | None, input_id: str | None = None
    ) -> None:
        self._sidecar = sidecar
        self._operator_ids = operator_ids
        self._ids = ActionIds(input_id)
        self._action_id = ""

    @property
    def action_id(self) -> str:
        """The id of the current call; empty if there is none."""
        return self._action_id

    def begin(self) -> str:
        """The action is about to be called, for the first time or again; returns the id of this call."""
        self.end()
        self._action_id = self._ids.next()
        self._sidecar.begin_action(self._action_id, self._operator_ids)
        return self._action_id

    def end(self) -> None:
        """Nothing more is asked about it. Idempotent."""
        if self._action_id:
            self._sidecar.end_action(self._action_id)
            self._action_id = ""

    @property
    def failures(self) -> tuple[int, BaseException | None]:
        return self._sidecar.action_failures(self._action_id)

    @property
    def fenced(self) -> Exception | None:
        return self._sidecar.fenced

    @property
    def ran(self) -> bool:
        return self._sidecar.action_ran(self._action_id)

    async def settle(self) -> str:
        return await self._sidecar.settle_action(self._action_id)

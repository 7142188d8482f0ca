# SPDX-License-Identifier: Apache-2.0

"""Which Spark jobs, and so which operators, belong to one call of ``Sidecar.run``.

While the action is called, a local property of Spark holds its id on the calling thread. Spark gives local properties
to every job that the thread starts, to the threads that Spark itself starts for it, to ``InheritableThread``, and to
each task of these jobs, which sends the id when it registers. So the action of a run is known as soon as the run is
known, even if facts are late or lost. Job groups and job tags are not touched.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from py4j.clientserver import ClientServer
from pyspark import SparkContext

from actors.logs import get_logger
from protocol.arguments import Rule, checked
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.task_entry import ACTION_PROPERTY

__all__ = ["ActionRuns", "AwaitsActions", "marked", "names_of"]

log = get_logger("headgate.actions")


@contextmanager
def marked(context: SparkContext | None, action_id: str) -> Iterator[None]:
    """Within the block, the jobs of this thread belong to the action.

    Has no effect if Python threads share JVM threads (``PYSPARK_PIN_THREAD=false``), whose local properties would mix,
    or if Spark cannot be asked.
    """
    if context is None or not isinstance(context._gateway, ClientServer):
        yield
        return
    try:
        before = context.getLocalProperty(ACTION_PROPERTY)
        context.setLocalProperty(ACTION_PROPERTY, action_id)
    except Exception as error:  # the context has stopped: the action reports that better
        log.warning("action property not set", error=repr(error))
        yield
        return
    try:
        yield
    finally:
        with suppress(Exception):
            context.setLocalProperty(ACTION_PROPERTY, before)  # type: ignore[arg-type]  # None removes it


@checked(operators=Rule("a list of handles or names", lambda operators: True))
def names_of(operators: Collection[OperatorHandle | str] | None) -> frozenset[str] | None:
    """The names of operators that are given as handles or names, or None."""
    if operators is None:
        return None
    return frozenset(operator if isinstance(operator, str) else operator.operator_id for operator in operators)


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

    def __init__(self, sidecar: AwaitsActions, operator_ids: frozenset[str] | None) -> None:
        self._sidecar = sidecar
        self._operator_ids = operator_ids
        self._action_id = ""

    @property
    def action_id(self) -> str:
        """The id of the current call; empty if there is none."""
        return self._action_id

    def begin(self) -> str:
        """The action is about to be called, for the first time or again; returns the id of this call."""
        self.end()
        self._action_id = secrets.token_hex(8)
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

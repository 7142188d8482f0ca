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
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from actors import ActorError, ActorRef
from actors.coordination.engine.inputs import ActionId, check_input_id
from actors.logs import get_logger
from protocol.arguments import Rule, checked
from protocol.describing import describe
from spark_bridge.bridge.jvm_classes import has_stopped
from spark_bridge.bridge.messages import AwaitRunsOver, BridgeMessage, FailRuns, StopActions
from spark_bridge.bridge.runs import RunningJobs
from spark_bridge.common.errors import SidecarError
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.driver.interrupts import interrupts_held_back
from spark_bridge.driver.operators import Operators
from spark_bridge.task_entry import ACTION_PROPERTY

if TYPE_CHECKING:
    from pyspark import SparkContext

__all__ = ["ActionIds", "ActionMarks", "ActionRuns", "Actions", "names_of"]

log = get_logger("headgate.actions")

RUN_FAIL_S = 5.0
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

        Raises ``SidecarError`` in place of what Spark raises once the context has stopped, which says nothing of it.
        """
        with _explains_a_stop(self._context), self._marking(action_id):
            yield

    @contextmanager
    def _marking(self, action_id: str) -> Iterator[None]:
        context = self._context
        if context is None or not _pins_threads(context):
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
                # The second time, ``before`` is the cancelled group, in which the thread would stay.
                self._forbidden.setdefault(action_id, before)


@contextmanager
def _explains_a_stop(context: SparkContext | None) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        of_spark = isinstance(error, AttributeError) or type(error).__module__.startswith(("py4j.", "pyspark."))
        if context is None or not of_spark or not has_stopped(context):
            raise
        raise spark_stopped("SparkContext", "no action can run") from error


def spark_stopped(what: str, consequence: str) -> SidecarError:
    """The error of a call that needs the Spark of this sidecar, such as its "SparkContext"."""
    return SidecarError(
        f"the {what} of this sidecar has stopped, so {consequence}: call spark.stop() after the sidecar's `with` "
        "block, or make a new session and a new sidecar"
    )


def _pins_threads(context: SparkContext) -> bool:
    """Whether each Python thread has a separate JVM thread, and so separate local properties."""
    from py4j.clientserver import ClientServer

    return isinstance(context._gateway, ClientServer)


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


class Actions:
    """What calls of ``run`` ask of a sidecar, from this process or another one. Loop only.

    ``forbid(action_id, cause)`` keeps the thread of an action from starting jobs. ``lost`` returns why the Spark
    Connect server is gone, if it is.
    """

    def __init__(
        self,
        jobs: RunningJobs,
        bridge_ref: ActorRef[BridgeMessage],
        operators: Operators,
        forbid: Callable[[str, str], Awaitable[None]],
        settle_timeout_s: float,
        require_running: Callable[[], None],
        lost: Callable[[], Exception | None],
    ) -> None:
        self.jobs = jobs
        self._bridge_ref = bridge_ref
        self._operators = operators
        self._forbid = forbid
        self._settle_timeout_s = settle_timeout_s
        self._require_running = require_running
        self._lost = lost

    def runs(self, operators: Collection[OperatorHandle | str] | None, input_id: str | None = None) -> ActionRuns:
        """The runs of one call of ``run``. Raises ``SidecarError`` for an unknown operator."""
        self._require_running()
        operator_ids = names_of(operators)
        for operator_id in sorted(operator_ids or ()):
            self._operators.find(operator_id)
        return ActionRuns(self, operator_ids, input_id)

    def begin(self, action_id: str, operator_ids: frozenset[str] | None, *, found: bool = False) -> None:
        """See ``RunningJobs.begin_action``."""
        self._require_running()
        self.jobs.begin_action(action_id, operator_ids, found=found)

    def fail(self, action_id: str, cause: str) -> None:
        """Fail the runs of the action, as far as they are known, and cancel all its Spark jobs, now and later."""
        self._bridge_ref.tell(FailRuns(cause, self.jobs.operators_of(action_id)))
        self._bridge_ref.tell(StopActions(cause, frozenset([action_id])))

    async def stop(self, action_id: str, cause: str) -> None:
        """``fail``, and wait up to ``RUN_FAIL_S`` seconds until its jobs have ended. Its thread starts none."""
        operator_ids, action_ids = self.jobs.operators_of(action_id), frozenset([action_id])
        self.fail(action_id, cause)
        await self._forbid(action_id, cause)
        with suppress(ActorError):  # no answer in time, or the sidecar is being left
            await self._bridge_ref.ask(
                lambda reply_to: AwaitRunsOver(reply_to, operator_ids, action_ids), timeout_s=RUN_FAIL_S
            )

    async def settle(self, action_id: str) -> str:
        """Wait until the action's runs and their final checkpoints have ended; return why output is not committed.

        The result is empty if all output is committed. Raises ``NotSettled`` after ``SidecarLimits.settle_timeout_s``.
        """
        self._require_running()
        return await self._operators.settle(self._settle_timeout_s, self.jobs.operators_of(action_id))

    @property
    def fenced(self) -> Exception | None:
        """The error if this application cannot continue, else None.

        A later application has taken over the storage, the Spark Connect server is lost, or the context has stopped.
        """
        over = self.jobs.application_ended and SidecarError(
            "the SparkContext has stopped, so the action is not called again: make a new session and a new sidecar"
        )
        return self._operators.fenced or self._lost() or over or None


class ActionRuns:
    """The ``Runs`` of one call of ``run``: only the operators of this action. Loop only."""

    def __init__(self, actions: Actions, operator_ids: frozenset[str] | None, input_id: str | None = None) -> None:
        self._actions = actions
        self._operator_ids = operator_ids
        self._ids = ActionIds(input_id)
        self._action_id = ""

    def begin(self) -> str:
        """The action is about to be called, for the first time or again; returns the id of this call."""
        self.end()
        self._action_id = self._ids.next()
        self._actions.begin(self._action_id, self._operator_ids)
        return self._action_id

    def end(self) -> None:
        """Nothing more is asked about it. Idempotent."""
        if self._action_id:
            self._actions.jobs.end_action(self._action_id)
            self._action_id = ""

    @property
    def failures(self) -> tuple[int, BaseException | None]:
        return self._actions.jobs.failures_of(self._action_id)

    @property
    def rescaled(self) -> int | None:
        return self._actions.jobs.rescaled(self._action_id)

    @property
    def fenced(self) -> Exception | None:
        return self._actions.fenced

    @property
    def ran(self) -> bool:
        return self._actions.jobs.ran(self._action_id)

    async def settle(self) -> str:
        return await self._actions.settle(self._action_id)

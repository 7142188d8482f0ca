# SPDX-License-Identifier: Apache-2.0

"""The ledger's commands to Spark, repeated until Spark has accepted them.

If a kill or a cancellation were lost, an attempt that has been given up would stay alive and block its job, and no fact
would ever report it (H19, H25). So a failed command is repeated at growing intervals. A query of Spark's state is not
repeated here, because the ledger itself asks again as long as it needs the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from actors import ActorContext
from actors.repeated_lines import LimitedLog
from protocol.attempts import CancelJobs, KillTask, QueryStatus
from protocol.facts import TaskPlace
from spark_bridge.bridge.relay import Relay, RelayStopped

FIRST_REPEAT_S = 0.5
REPEAT_MAX_S = 10.0
"""The pause before a command is repeated doubles each time, up to this."""


@dataclass(frozen=True, slots=True)
class KillCommand:
    """Kill a task attempt. ``failures`` counts how often Spark has not accepted it yet.

    ``place``: what its registration claims to be; Spark kills it only there.
    """

    task_attempt_id: int
    reason: str
    place: TaskPlace | None = None
    failures: int = 0


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """Cancel a job. ``failures`` counts how often Spark has not accepted it yet."""

    job_id: int
    reason: str
    failures: int = 0


@dataclass(frozen=True, slots=True)
class WatchCommand:
    """Deliver the facts of a stage, and of a task. ``failures`` counts how often the relay has not accepted it yet."""

    stage_id: int
    task_attempt_id: int
    failures: int = 0


@dataclass(frozen=True, slots=True)
class CommandFailed:
    """Spark has not accepted a command, or not answered a query."""

    command: KillCommand | CancelCommand | WatchCommand | QueryStatus
    error: Exception


CommandMessage = KillCommand | CancelCommand | WatchCommand | CommandFailed


class SparkCommands:
    """Sends the bridge's commands to Spark. The calls end with the actor whose ``context`` is given. Loop only.

    A lost host can cause a line for each of its tasks, so ``log`` counts lines that repeat.
    """

    def __init__(self, relay: Callable[[], Relay], context: ActorContext[Any], log: LimitedLog) -> None:
        self._relay = relay
        self._context = context
        self._log = log

    def ask(self, effect: KillTask | CancelJobs | QueryStatus) -> None:
        """Send a command to Spark. The answer to a query reaches the actor as a fact."""
        match effect:
            case KillTask():
                _log_kill(self._log, effect)
                self._send(KillCommand(effect.task_attempt_id, effect.reason, effect.place))
            case CancelJobs(job_ids, reason):
                for job_id in job_ids:
                    self._log.info("job cancellation requested", job_id=job_id, reason=reason)
                    self._send(CancelCommand(job_id, reason))
            case QueryStatus(task_attempt_ids, job_ids):
                self._context.run(
                    self._relay().query_status,
                    task_attempt_ids,
                    job_ids,
                    on_result=lambda status: status,
                    on_error=lambda error: CommandFailed(effect, error),
                )

    def watch(self, stage_id: int, task_attempt_id: int) -> None:
        """Have the relay deliver the facts of a stage that runs an operator, and of a task that says it is in it."""
        self._send(WatchCommand(stage_id, task_attempt_id))

    def handle(self, message: CommandMessage) -> None:
        """Handle what ``ask`` has sent to the actor: a command that has failed, or one that is due again."""
        if isinstance(message, CommandFailed):
            self._repeat_later(message)
        else:
            self._send(message)

    def _send(self, command: KillCommand | CancelCommand | WatchCommand) -> None:
        def failed(error: Exception) -> CommandFailed:
            return CommandFailed(command, error)

        relay = self._relay()
        match command:
            case KillCommand(task_attempt_id, reason, place):
                self._context.run(relay.kill_task, task_attempt_id, reason, place, on_error=failed)
            case CancelCommand(job_id, reason):
                self._context.run(relay.cancel_job, job_id, reason, on_error=failed)
            case WatchCommand(stage_id, task_attempt_id):
                self._context.run(relay.watch, stage_id, task_attempt_id, on_error=failed)

    def _repeat_later(self, message: CommandFailed) -> None:
        command, error = message.command, message.error
        if isinstance(command, QueryStatus) or isinstance(error, RelayStopped):
            self._log.warning("Spark command failed", command=str(command), error=repr(error))
            return
        delay_s = min(FIRST_REPEAT_S * 2**command.failures, REPEAT_MAX_S)
        self._log.warning(
            "Spark command failed, retry scheduled", command=str(command), delay_s=delay_s, error=repr(error)
        )
        again = replace(command, failures=min(command.failures + 1, 32))
        self._context.timers.start(replace(again, failures=0), again, delay_s=delay_s)


def _log_kill(log: LimitedLog, kill: KillTask) -> None:
    """Log a kill, as a warning if it counts towards the limit at which the job fails (H69)."""
    who = {
        "operator_id": kill.operator_id,
        "subtask": kill.subtask,
        "attempt": kill.attempt,
        "task_attempt_id": kill.task_attempt_id,
        "reason": kill.reason,
    }
    if kill.count:
        log.warning("task kill requested", **who, kills=kill.count, kills_max=kill.limit)
    else:
        log.info("task kill requested", **who)

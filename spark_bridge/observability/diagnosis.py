# SPDX-License-Identifier: Apache-2.0

"""Says in words who waits for whom: a pure function of a ``SidecarStatus``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from spark_bridge.observability.status import (
    AttemptStatus,
    CheckpointProgress,
    OperatorStatus,
    SidecarStatus,
)

WAITING_S = 5.0
"""A shorter wait is normal and is not mentioned."""
NAMED_MAX = 5
"""How many subtasks one sentence names."""
BLOCKED_MS = 250.0
"""A loop that was later than this is mentioned."""


def explain(status: SidecarStatus, *, waiting_s: float = WAITING_S) -> tuple[str, ...]:
    """Return what ``waits`` returns, and sentences for operators whose last action was several jobs, and for displays
    that have failed."""
    several = (one for _, one in sorted(status.operators.items()) if one.jobs_of_last_action > 1)
    broken = sorted(status.display_failures.items())
    return (*waits(status, waiting_s=waiting_s), *map(_of_jobs, several), *map(_of_display, broken))


def _of_display(failures: tuple[str, int]) -> str:
    display, count = failures
    times = "once" if count == 1 else f"{count} times"
    return (
        f"the display {display!r} has failed {times}, so it was not available, or still is not: the log says why. Jobs "
        "are not affected"
    )


def _of_jobs(operator: OperatorStatus) -> str:
    return (
        f"the last action over {operator.operator_id!r} was {operator.jobs_of_last_action} jobs, each over some of the "
        "partitions, as of take(), first(), show(), isEmpty() or limit(). Each job is a run: a coordinator that is "
        "built for each run has seen only the last one, and counters have all. Use an action over all partitions, such "
        "as collect(), or cache() the output and count() it first"
    )


def waits(status: SidecarStatus, *, waiting_s: float = WAITING_S) -> tuple[str, ...]:
    """Return a sentence for everything that has waited for ``waiting_s`` seconds, with what it waits for.

    The result is empty if everything moves. Operators are in the order of their names; within one, the cause comes
    before what it holds up.
    """
    sentences: list[str] = []
    if status.loop_lag_max_ms >= BLOCKED_MS:
        sentences.append(
            f"the sidecar's event loop was blocked for up to {status.loop_lag_max_ms / 1e3:.1f} s in the last minute: "
            "a coordinator computes or waits without awaiting, which the log then names, or the machine is overloaded"
        )
    if status.relay.dropped:
        sentences.append(
            f"{status.relay.dropped} facts from Spark were lost, so failures and ends may be noticed late: raise "
            "spark.scheduler.listenerbus.eventqueue.capacity"
        )
    for name in sorted(status.operators):
        sentences.extend(_of_operator(status, status.operators[name], waiting_s))
    return tuple(sentences)


def _of_operator(status: SidecarStatus, operator: OperatorStatus, waiting_s: float) -> Iterator[str]:
    yield from _of_coordinator(status, operator, waiting_s)
    yield from _of_missing(status, operator, waiting_s)
    for checkpoint in operator.checkpoints:
        if checkpoint.phase_s >= waiting_s:
            yield _of_checkpoint(status, operator, checkpoint)
    yield from _of_attempts(status, operator, waiting_s)


def _of_coordinator(status: SidecarStatus, operator: OperatorStatus, waiting_s: float) -> Iterator[str]:
    call, waiting = operator.call, _waiting_for_coordinator(status, operator, waiting_s)
    if call is not None and call.running_s >= waiting_s:
        busy = f"the coordinator of {operator.operator_id!r} has been in {call.name} for {_seconds(call.running_s)}"
        cause = f"{busy}, awaiting at {call.waiting_at}"
    elif waiting:
        cause = f"{_messages(operator.queued)} in the mailbox of the coordinator of {operator.operator_id!r}"
    else:
        return
    if not waiting and operator.queued:
        cause = f"{cause}; {_messages(operator.queued)} behind it"
    yield "; ".join([*waiting, cause])


def _waiting_for_coordinator(status: SidecarStatus, operator: OperatorStatus, waiting_s: float) -> list[str]:
    since = status.taken_at - waiting_s
    asking = [one for one in operator.attempts if one.requested_at is not None and one.requested_at <= since]
    not_told = [
        one
        for one in operator.attempts
        if one.state == "ready" and one.connected and not one.known_to_coordinator and one.accepted_at <= since
    ]
    clauses = []
    if asking:
        longest = _longest(status, (one.requested_at for one in asking))
        clauses.append(f"{_have(asking)} waited {longest} for an answer to a request")
    if not_told:
        longest = _longest(status, (one.accepted_at for one in not_told))
        clauses.append(f"{_have(not_told)} waited {longest} for the coordinator's subtask_ready")
    return clauses


def _longest(status: SidecarStatus, points: Iterable[float | None]) -> str:
    return _seconds(status.taken_at - min(point for point in points if point is not None))


def _of_missing(status: SidecarStatus, operator: OperatorStatus, waiting_s: float) -> Iterator[str]:
    run = operator.run
    if run is None:
        return
    for registration in run.registrations:
        if registration.waiting_s >= waiting_s:
            yield (
                f"a task of subtask {registration.subtask} of {operator.operator_id!r} has waited "
                f"{_seconds(registration.waiting_s)} to be accepted: it waits for {registration.waits_for}"
            )
    missing = min(operator.parallelism, run.task_count or operator.parallelism) - run.subtasks_seen
    if missing <= 0 or status.taken_at - run.started_at < waiting_s:
        return
    have = (
        f"{operator.ready} of {operator.parallelism} subtasks of {operator.operator_id!r} {_are(operator.ready)} ready"
    )
    if run.tasks_started > run.subtasks_seen:
        silent = run.tasks_started - run.subtasks_seen
        they_have = (
            "1 task that Spark has started has" if silent == 1 else f"{silent} tasks that Spark has started have"
        )
        they_are = "it is" if silent == 1 else "they are"
        yield (
            f"{have}; {they_have} not registered yet: {they_are} still starting, or cannot reach "
            f"{status.host}:{status.port}"
        )
    elif status.cores is not None and status.cores < operator.parallelism:
        yield f"{have}; {missing} {_have_no(missing)} slot: the application has {_cores(status.cores)}"
    else:
        tasks = "its task" if missing == 1 else "their tasks"
        yield f"{have}; {missing} {_have_no(missing)} slot, because Spark has not started {tasks} yet"


def _of_checkpoint(status: SidecarStatus, operator: OperatorStatus, checkpoint: CheckpointProgress) -> str:
    kind = "savepoint" if checkpoint.savepoint else "checkpoint"
    name = f"{kind} {checkpoint.checkpoint_id} of {operator.operator_id!r}"
    waited = _seconds(checkpoint.phase_s)
    late = checkpoint.awaited
    unconfirmed = sorted(_unconfirmed_since(operator, status.taken_at - checkpoint.phase_s).intersection(late))
    match checkpoint.phase:
        case "waiting":
            return f"{name} has waited {waited} for the coordinator's snapshot of an earlier one"
        case "closing":
            return f"{name} waits for {_subtasks(late)}, whose {_connections(late)} not answered for {waited}"
        case "snapshotting":
            return f"{name} has waited {waited} for the coordinator: checkpoint_coordinator has not returned"
        case "acknowledging" if unconfirmed:
            return f"{name} has waited {waited} for {_subtasks(unconfirmed)} to confirm every event sent before it"
        case "acknowledging" if silent := _silent_since(operator, checkpoint.triggered_at).intersection(late):
            one = len(silent) == 1
            either = "its task computes" if one else "their tasks compute"
            return (
                f"{name} waits for {_subtasks(sorted(silent))}, which {'has' if one else 'have'} not answered for "
                f"{waited}: {either} without looking at the mailbox, or the process does not answer at all"
            )
        case "acknowledging" if len(late) == 1:
            return f"{name} waits for subtask {late[0]}, which has computed for {waited} without looking at its mailbox"
        case "acknowledging":
            without = "without looking at their mailboxes"
            return f"{name} waits for {_subtasks(late)}, which have computed for {waited} {without}"
        case "collecting":
            return f"{name} has waited {waited} for the coordinator to take what came before the snapshots"
        case "uploading":
            return f"{name} has waited {waited} for {_subtasks(late)} to store the files of their states"
        case _:
            return f"{name} has waited {waited} for the storage to write it"


def _unconfirmed_since(operator: OperatorStatus, since: float) -> set[int]:
    """The subtasks that have left an event unconfirmed since then, or for longer."""
    return {one.subtask for one in operator.attempts if one.is_live and _is_past(one.unconfirmed_since_at, since)}


def _silent_since(operator: OperatorStatus, since: float) -> set[int]:
    """The subtasks from whose process nothing has come since then."""
    return {
        one.subtask for one in operator.attempts if one.is_live and one.heard_at is not None and one.heard_at < since
    }


def _is_past(at: float | None, since: float) -> bool:
    return at is not None and at <= since


def _of_attempts(status: SidecarStatus, operator: OperatorStatus, waiting_s: float) -> Iterator[str]:
    since = status.taken_at - waiting_s
    live = [attempt for attempt in operator.attempts if attempt.is_live]
    if deferred := [one for one in live if _is_past(one.deferred_at, since)]:
        longest = _longest(status, (one.deferred_at for one in deferred))
        yield (
            f"{_have(deferred)} waited {longest} for an answer that the coordinator of {operator.operator_id!r} has "
            "deferred: it has not settled the Reply yet"
        )
    if cut_off := [one for one in live if not one.connected and _is_past(one.heard_at, since)]:
        longest = _longest(status, (one.heard_at for one in cut_off))
        yield f"{_have(cut_off)} had no connection to the sidecar for up to {longest}"
    yield from _of_unconfirmed(status, [one for one in live if one.connected], since)


def _of_unconfirmed(status: SidecarStatus, connected: Sequence[AttemptStatus], since: float) -> Iterator[str]:
    if late := [one for one in connected if _is_past(one.unconfirmed_since_at, since)]:
        first = min(late, key=lambda one: one.unconfirmed_since_at or 0.0)
        waited = _longest(status, [first.unconfirmed_since_at])
        yield (
            f"{_have(late)} not confirmed an event for {waited}: the process is "
            "stopped or holds the interpreter lock, or the mailbox is full; the last sign of life came "
            f"{_longest(status, [first.heard_at])} ago"
        )


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _have_no(count: int) -> str:
    return "has no" if count == 1 else "have no"


def _messages(count: int) -> str:
    return "1 message waits" if count == 1 else f"{count} messages wait"


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def _connections(subtasks: Sequence[int]) -> str:
    return "process has" if len(subtasks) == 1 else "processes have"


def _subtasks(subtasks: Sequence[int]) -> str:
    if len(subtasks) == 1:
        return f"subtask {subtasks[0]}"
    named = ", ".join(map(str, subtasks[:NAMED_MAX]))
    more = f" and {len(subtasks) - NAMED_MAX} more" if len(subtasks) > NAMED_MAX else ""
    return f"subtasks {named}{more}"


def _have(attempts: Sequence[AttemptStatus]) -> str:
    subtasks = sorted({attempt.subtask for attempt in attempts})
    return f"{_subtasks(subtasks)} {'has' if len(subtasks) == 1 else 'have'}"

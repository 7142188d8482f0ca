# SPDX-License-Identifier: Apache-2.0

"""One attempt that runs a real ``SubtaskOperator``.

An operator blocks while it waits, so it has a separate thread. That thread and the event loop take turns: the loop
stops while the operator computes, and the operator stops until the world has something for it. So the order is as
deterministic as without a thread.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn

from actors.clock import Clock
from headgate.testing._stepped_loop import SteppedTaskLoop
from headgate.testing._task import MemoryConnection, Task
from protocol.arguments import ANY, check_attributes, checked
from protocol.describing import describe
from protocol.errors import AttemptOver, GatewayFull, LocalProtocolError
from protocol.file_retention import LAST_STATE
from protocol.ids import ExecutionAttempt
from protocol.parts import OWN_PART, PartTable
from protocol.subtask.types import (
    BarrierArrived,
    EndAttempt,
    EventSubmitted,
    MailboxEvent,
    MailboxItem,
    OperatorFinished,
    OperatorOpened,
    RequestAbandoned,
    RequestSubmitted,
    SnapshotRefused,
    SnapshotTaken,
    StartUpload,
    StateUploaded,
    StopUpload,
    SubtaskEffect,
    SubtaskInput,
    UploadFailed,
)
from protocol.wire.keys import KEY_BYTES, NO_IDENTITY, Key
from protocol.wire.messages import Downward, Registered, RestoreMode
from protocol.wire.state_handles import StateHandle
from spark_bridge.common.endpoint import TaskEndpoint, TaskIdentity
from spark_bridge.subtask.channel import DECLINED_WHILE_WAITING, AwaitedRequest, ChannelStatistics
from spark_bridge.subtask.errors import NO_ANSWER, RegistrationFailed, TimedOut, for_unknown_reasons, request_failure
from spark_bridge.subtask.mailbox import MailboxCall, OperatorMailbox
from spark_bridge.subtask.operator import SubtaskOperator
from spark_bridge.subtask.parts import OperatorParts
from spark_bridge.subtask.runner import run_subtask_with
from spark_bridge.subtask.task_channel import TaskChannel
from spark_bridge.subtask.uploads import Upload

if TYPE_CHECKING:
    from headgate.testing._state_files import FilesOfTests
    from spark_bridge.storage.state_files.snapshot import Snapshot

TURN_LIMIT_S = 30.0
"""How long, in real seconds, an operator may compute before it waits for a record, an event or its coordinator."""

_UNUSED_KEY = Key(NO_IDENTITY, bytes(KEY_BYTES))  # there is no connection


class ProcessKilled(BaseException):
    """Raised in an operator's thread where it waits, when its task was killed. Let it pass."""


@check_attributes(upload_error=ANY)
class OperatorTask(Task):
    """One attempt that runs a real operator over records. ``World.launch_operator`` makes it.

    Times of the operator's context, such as ``request(..., timeout_s=5.0)``, are virtual; ``time.sleep`` is not. A kill
    raises ``ProcessKilled`` where the operator waits, so that its thread ends. After that, nothing that it does has an
    effect outside the task. The context must be used on the task's own thread.

    The coroutines of an async stage run in virtual time as well: ``asyncio.sleep``, time-outs and anyio follow the
    world's clock. They go on one step at a time wherever the operator waits or looks for news, in an order that the
    world's ``seed`` decides. A kill cancels them.

    ``StateFiles`` that the operator returns are stored in a temporary folder: one state whenever the world moves, in
    the order of the snapshots, also while the operator is ``busy``.
    """

    uploads_wait: bool
    upload_error: Exception | None

    def __init__(
        self,
        attempt: ExecutionAttempt,
        connection: MemoryConnection,
        clock: Clock,
        make_operator: Callable[[], SubtaskOperator] | None,
        records: Iterable[Any] | None,
        parallelism: int,
        mode: RestoreMode,
        parts: Mapping[str, Callable[[], SubtaskOperator]],
        stages: Sequence[str],
        dice: Random,
    ) -> None:
        super().__init__(attempt, connection, clock)
        self.dice = dice
        self.loops: list[SteppedTaskLoop] = []  # those of async stages
        self._stepping = False
        self._make_parts, self._stages = parts, stages
        self._parts: OperatorParts
        self.opens_immediately = False
        self.operator: SubtaskOperator
        """The operator, once it is built. A chain has its stages instead."""
        self.stages: Mapping[str, SubtaskOperator] = {}
        """The operators of a chain by the names of their stages, once they are built."""
        self.outputs: list[Any] = []
        """The outputs of ``process``, in order."""
        self.error: BaseException | None = None
        """The operator's exception, or the reason why its run ended."""
        self.records_left: deque[Any] = deque() if records is None else deque(records)
        """The records that the operator has not asked for yet."""
        self._more_records = records is None
        self.uploads_wait = False
        """Whether nothing is uploaded for the time being. When it is False again, uploads go on."""
        self.upload_error: Exception | None = None
        """The exception with which uploads fail; None if they succeed."""
        self.uploads: deque[Upload] = deque()
        self.make_operator = make_operator
        self._endpoint = TaskEndpoint(
            "test", 0, _UNUSED_KEY, attempt.operator_id, parallelism, mode, kill_wait_s=0.0, switch_interval_s=0.0
        )
        self._identity = TaskIdentity(attempt.task_attempt_id, attempt.subtask, 0, 0)
        self._thread = threading.Thread(target=self._run, name=f"operator of {attempt}", daemon=True)
        self._operators_turn = threading.Semaphore(0)
        self._loops_turn = threading.Semaphore(0)
        self._wants: Callable[[], bool] = lambda: True
        self._deadline = inf
        self._done = False
        self._killed = False
        self._channel: _Channel

    def feed(self, *records: Any) -> None:
        """Give the operator more records. It gets them when the world moves next.

        Raises:
            LocalProtocolError: the records have ended, or were given to ``launch_operator``.
        """
        if not self._more_records:
            raise LocalProtocolError(
                f"{self!r} gets no more records, because its input has ended: feed() comes before end_records(), "
                "and needs records=None"
            )
        self.records_left.extend(records)

    def end_records(self) -> None:
        """End the records. An operator that reads to the end of its input then finishes."""
        self._more_records = False

    @checked(failure=ANY)
    def finish(self, failure: str = "", state: bytes | None = None) -> NoReturn:
        """Not for a real operator, which ends with its input or an exception: see ``end_records``.

        Raises:
            LocalProtocolError: always, so that what was fed is not lost.
        """
        raise LocalProtocolError(
            f"{self!r} runs a real operator, which ends by itself: call end_records() and await world.settle() to let "
            "it finish, raise an exception in it to let it fail, or await world.kill(task)"
        )

    # --- for the world, on the loop -------------------------------------------------------------------------------

    def read(self) -> bool:
        moved = super().read()
        if not self.uploads or self.uploads_wait or self.unresponsive:
            return moved
        upload = self.uploads.popleft()
        upload.stopped |= self.upload_error is not None
        result = upload.run()
        result = self.upload_error or result
        if upload.checkpoint_id == LAST_STATE:
            self._channel.last = result
        elif isinstance(result, BaseException):
            self._drive(UploadFailed(upload.checkpoint_id, describe(result)))
        else:
            self._drive(StateUploaded(upload.checkpoint_id, result))
        return True

    def exit_status(self) -> tuple[bool, str] | None:
        if not self._done:
            return None
        return (True, "") if self.error is None else (False, describe(self.error))

    def stop(self) -> None:
        """Kill the process: the operator's thread ends where it waits."""
        super().stop()
        self._killed = True
        if self._thread.is_alive() and not self._done:
            self._give_turn()

    def _handle_mailbox(self) -> bool:
        if self._done or self.unresponsive or self.busy:
            return False
        if not (self._wants() or self._clock.now() >= self._deadline):
            return False
        self._give_turn()
        return True

    def _give_turn(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()
        self._operators_turn.release()
        if not self._loops_turn.acquire(timeout=TURN_LIMIT_S):
            frame = sys._current_frames().get(self._thread.ident or 0)
            where = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else ""
            raise RuntimeError(
                f"the operator of {self.attempt} has computed for {TURN_LIMIT_S:g} s without waiting for a record, an "
                f"event or its coordinator. If it waits for something else, replace that in the test. It is at\n{where}"
            )

    # --- on the operator's thread ---------------------------------------------------------------------------------

    def wait(self, wants: Callable[[], bool], deadline: float = inf) -> bool:
        """Let the world move until ``wants`` is true or the clock reaches ``deadline``; returns ``wants()``."""
        while not wants() and self._clock.now() < deadline:
            self._pause(wants, deadline)
        return wants()

    def pause(self) -> None:
        """Let the world move once."""
        self._pause(lambda: True, inf)

    def _pause(self, wants: Callable[[], bool], deadline: float) -> None:
        if self._killed:
            raise ProcessKilled
        self._wants, self._deadline = lambda: wants() or bool(self._steppable), deadline
        timer = None if deadline == inf else self._clock.call_later(deadline - self._clock.now(), lambda: None)
        self._loops_turn.release()
        self._operators_turn.acquire()
        if timer is not None:
            timer.cancel()
        if self._killed:
            raise ProcessKilled
        if (loops := self._steppable) and (not wants() or self.dice.random() < 0.5):
            self._stepping = True
            try:
                self.dice.choice(loops).step()
            finally:
                self._stepping = False

    @property
    def _steppable(self) -> list[SteppedTaskLoop]:
        """Those in which something is ready; none inside of a step, which may wait in a call that it should not use."""
        return [] if self._stepping else [loop for loop in self.loops if loop.loop.has_ready]

    def _run(self) -> None:
        self._operators_turn.acquire()
        try:
            if not self._killed:
                self._run_operator()
        except BaseException as error:
            self.error = error
        finally:
            self._done = True
            self._loops_turn.release()

    def _run_operator(self) -> None:
        def make_channel() -> TaskChannel:
            self._channel = _Channel(self, self._endpoint)
            return self._channel

        def make_parts() -> OperatorParts:
            parts = OperatorParts(self.make_operator, self._make_parts, self._stages)
            self.stages = {name: parts.operators[name] for name in self._stages}
            if not self._stages:
                self.operator = parts.operators[""]
            self._parts = parts
            return parts

        for output in run_subtask_with(make_channel, make_parts, self._endpoint, self._identity, self._open_records):
            self.outputs.append(output)

    def _open_records(self, parts: OperatorParts) -> Iterator[Any]:
        """The records. While the operator waits for one, it handles its mailbox, as it does between records."""
        while True:
            self.wait(lambda: bool(self.records_left or not self._more_records or self._channel.has_news))
            if self._channel.has_news:
                parts.calls.handle_pending()
            elif self.records_left:
                yield self.records_left.popleft()
            elif not self._more_records:
                return

    # --- what the machine says ------------------------------------------------------------------------------------

    def _take(self, message: Downward) -> None:
        super()._take(message)
        if self.loops:
            self._channel.send_awaited()

    def _carry_out(self, effect: SubtaskEffect) -> None:
        super()._carry_out(effect)
        if isinstance(effect, StartUpload):
            self.uploads.append(self._channel.upload_of(effect.checkpoint_id, effect.target))
        elif isinstance(effect, StopUpload):
            for upload in self.uploads:
                upload.stopped |= upload.checkpoint_id == effect.checkpoint_id
        if isinstance(effect, EndAttempt) and self.loops:
            self._channel.end_awaited()

    def _put(self, item: MailboxItem) -> None:
        self._channel.put(item)

    def _handle_urgent(self, payload: bytes, part: int) -> bool:
        """Handle it on a separate thread, as a real task does, while the operator's thread and the loop stand still."""
        thread = threading.Thread(target=self._channel.handle_urgent, args=(payload, part), name="urgent", daemon=True)
        thread.start()
        thread.join(TURN_LIMIT_S)
        if thread.is_alive():
            raise RuntimeError(
                f"handle_urgent() of {self.attempt} has not returned within {TURN_LIMIT_S:g} s: let it do short "
                "work only, and wait in process() instead"
            )
        return self._channel.failure is None

    def _resolve(self, request_id: int, error: str, payload: bytes) -> None:
        self._channel.resolve(request_id, error, payload)


class _Channel:
    """A ``TaskChannel`` in memory, whose methods mean the same as those of ``SubtaskChannel``."""

    def __init__(self, task: OperatorTask, endpoint: TaskEndpoint) -> None:
        self.key = (task.attempt.task_attempt_id, endpoint.operator_id)
        self.mailbox = OperatorMailbox(sys.maxsize, sys.maxsize)
        self.statistics = ChannelStatistics()
        self.at_barrier: Callable[[bool], bool] = lambda may_decline: may_decline
        self.stepped_loop: Callable[[TaskChannel], Any] | None = partial(SteppedTaskLoop, task=task, dice=task.dice)
        self._task = task
        self._endpoint = endpoint
        self._thread = threading.get_ident()
        self._answers: dict[int, tuple[str, bytes] | None] = {}
        self._requests = 0
        self._awaited: dict[int, AwaitedRequest] = {}
        self._unsent: list[AwaitedRequest] = []  # of coroutines, without capacity
        self._at_end: list[Callable[[], None]] = []
        self._closed = ""
        self._urgent: Callable[[bytes, int], None] = lambda payload, part: None
        self._urgent_thread: int | None = None
        self.failure: BaseException | None = None
        self.last: StateHandle | BaseException | None = None
        self._files: FilesOfTests | None = None
        self._frozen: dict[int, Snapshot] = {}
        self._succeeded = False

    @property
    def over(self) -> str | None:
        if self._task._killed:
            return "the task was killed"
        return self._closed or (self._task.ended[0] if self._task.ended else None)

    @property
    def table(self) -> PartTable:
        return self._task.table

    @property
    def has_news(self) -> bool:
        return bool(self.mailbox) or self.cancelled

    @property
    def cancelled(self) -> bool:
        return self.over is not None or self.failure is not None

    @property
    def on_urgent_thread(self) -> bool:
        return threading.get_ident() == self._urgent_thread

    @property
    def on_task_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def now(self) -> float:
        return self._task._clock.now()

    def put(self, item: MailboxItem) -> None:
        self.mailbox.put(item)
        self.statistics.events_received += isinstance(item, MailboxEvent)

    def handle_urgent(self, payload: bytes, part: int) -> None:
        """Call the operator, on the thread for urgent events. After a failure no more of them are handled."""
        if self.failure is not None or self.over is not None:
            return
        self.statistics.events_received += 1
        self._urgent_thread = threading.get_ident()
        try:
            self._urgent(payload, part)
        except BaseException as error:
            self.failure = error
        finally:
            self._urgent_thread = None

    def resolve(self, request_id: int, error: str, payload: bytes) -> None:
        if request_id in self._answers:
            self._answers[request_id] = (error, payload)
        elif (request := self._awaited.pop(request_id, None)) is not None:
            request.deliver(request_failure(error, payload) if error else payload)

    def end_awaited(self) -> None:
        """The attempt is over: no request of a coroutine has an answer any more, and who wants to know is told."""
        awaited, calls = [*self._awaited.values(), *self._unsent], self._at_end
        self._awaited, self._unsent, self._at_end = {}, [], []
        for request in awaited:
            request.deliver(AttemptOver(self.over or ""))
        for call in calls:
            call()

    # --- the life of the attempt ---

    def open(self, serve: object) -> Registered:
        task = self._task
        task.wait(lambda: bool(task.registered or task._refusal or task.ended))
        if task.registered is None:
            raise RegistrationFailed(task._refusal or task.ended[0])
        return task.registered

    def close(self) -> None:
        self._closed = self._closed or "the task has closed its end"
        self.end_awaited()
        files, self._files = self._files, None
        if files is not None:
            self._task.uploads.clear()
            files.close(succeeded=self._succeeded)

    def check(self) -> None:
        if (over := self.over) is not None:
            raise AttemptOver(over)
        if self.failure is not None and not self.on_urgent_thread:
            raise self.failure

    def operator_opened(
        self,
        *,
        awaits_start: bool,
        handle_urgent: Callable[[bytes, int], None] | None = None,
        parts_without_urgent: frozenset[int] = frozenset(),
    ) -> None:
        self._urgent = handle_urgent or self._urgent
        self._submit(OperatorOpened(awaits_start, handle_urgent is not None, parts_without_urgent))

    # --- what the task says ---

    def submit_event(self, payload: bytes, part: int = OWN_PART, *, in_snapshot: bool = False) -> None:
        submitted = EventSubmitted(payload, in_snapshot, self.on_urgent_thread, part)
        if not self.on_urgent_thread:
            self._submit_with_capacity(submitted, self._endpoint.send_timeout_s)
            return
        try:
            self._submit(submitted)
        except GatewayFull as full:  # nothing moves meanwhile, so no capacity would become available
            raise TimedOut(f"no capacity to send inside handle_urgent(), so send from process(): {full}") from full

    def submit_event_nowait(self, payload: bytes, part: int = OWN_PART) -> None:
        self._submit(EventSubmitted(payload, part=part))

    def ask(self, payload: bytes, timeout_s: float, part: int = OWN_PART) -> bytes:
        deadline = self.now() + timeout_s
        self._requests += 1
        request_id = self._requests
        self._answers[request_id] = None
        try:
            self._submit_with_capacity(RequestSubmitted(request_id, payload, part), timeout_s)
            failure = for_unknown_reasons(f"{NO_ANSWER} {request_id} within {timeout_s:g} s")
            try:
                while (answer := self._answers[request_id]) is None:
                    self._wait_serving(lambda: self._answers[request_id] is not None, deadline, failure, part)
            except BaseException:
                if self.over is None:
                    self._submit(RequestAbandoned(request_id))
                raise
        finally:
            del self._answers[request_id]
        self.check()
        error, answered = answer
        if error:
            raise request_failure(error, answered)
        return answered

    def ask_soon(self, requests: Sequence[AwaitedRequest]) -> None:
        self.check()
        self._unsent += requests
        self.send_awaited()

    def send_awaited(self) -> None:
        """Those that have capacity leave. Called also when something has come, which may have made some."""
        unsent, self._unsent = self._unsent, []
        for request in unsent:
            self._requests += 1
            self._awaited[self._requests] = request
            try:
                self._task._drive(RequestSubmitted(self._requests, request.payload, request.part))
            except GatewayFull:
                del self._awaited[self._requests]
                self._unsent.append(request)
            else:
                request.request_id = self._requests

    def abandon(self, request: AwaitedRequest) -> None:
        if request in self._unsent:
            self._unsent.remove(request)
        elif self._awaited.pop(request.request_id, None) is not None and self.over is None:
            self._task._drive(RequestAbandoned(request.request_id))

    def at_end(self, call: Callable[[], None]) -> None:
        if self.over is None:
            self._at_end.append(call)
        else:
            call()

    def barrier_arrived(self, checkpoint_id: int, events_before: int) -> None:
        self._submit(BarrierArrived(checkpoint_id, events_before))

    def wants_snapshot(self, checkpoint_id: int) -> bool:
        self.check()
        return self._task.machine.wants_snapshot(checkpoint_id)

    def snapshot_taken(self, checkpoint_id: int, state: bytes, files: Snapshot | None = None) -> None:
        if files is not None:
            self._frozen[checkpoint_id] = files
        self._submit(SnapshotTaken(checkpoint_id, state, files is not None))
        if (unwanted := self._frozen.pop(checkpoint_id, None)) is not None:
            unwanted.remove()

    def snapshot_refused(self, checkpoint_id: int, reason: str) -> None:
        self._submit(SnapshotRefused(checkpoint_id, reason))

    # --- states in files ---

    def files(self) -> FilesOfTests:
        if self._files is None:
            from headgate.testing._state_files import FilesOfTests, storage_of_tests  # as in a real task

            endpoint = replace(self._endpoint, state_storage=storage_of_tests())
            self._files = FilesOfTests(endpoint, self._task._identity, self._count_uploaded)
        return self._files

    def _count_uploaded(self, size: int) -> None:
        self.statistics.uploaded_bytes = size

    def upload_of(self, checkpoint_id: int, target: str) -> Upload:
        return self.files().upload(self._frozen.pop(checkpoint_id), target)

    def checkpoint_ended(self, checkpoint_id: int, *, completed: bool) -> None:
        if self._files is not None:
            (self._files.completed if completed else self._files.aborted)(checkpoint_id)

    def store_last(self, files: Snapshot) -> None:
        self.last = None
        self._task.uploads.append(self.files().upload(files))

    def wait_for_uploads(self) -> bool:
        self.check()
        uploads = self._task.uploads
        self._task.wait(lambda: not uploads or self.has_news)
        self.check()
        return not uploads

    def last_files(self) -> StateHandle:
        if isinstance(self.last, BaseException):
            raise self.last
        assert self.last is not None
        return self.last

    def decline_barriers(self) -> None:
        for barrier in self.mailbox.take_barriers():
            self.snapshot_refused(barrier.checkpoint_id, DECLINED_WHILE_WAITING)

    def wait_until_urgent_are_handled(self, deadline: float) -> int | None:
        self.check()
        machine = self._task.machine
        return machine.urgent_came if machine.urgent_idle or not self.mailbox.barriers else None

    def stop_urgent(self, timeout_s: float) -> None:
        self.failure = None
        self._urgent = lambda payload, part: None

    def try_finish(self, state: bytes, deadline: float, urgent_came: int = 0, files: StateHandle | None = None) -> bool:
        machine = self._task.machine
        while not self.mailbox:
            self.check()
            if machine.urgent_came != urgent_came:
                return False
            if machine.may_finish:
                self._submit(OperatorFinished("", state, files))
                self._succeeded = True
                return True
            failure = "events are held back by a checkpoint that does not end"
            self._wait(
                lambda: machine.may_finish or bool(self.mailbox) or machine.urgent_came != urgent_came,
                deadline,
                failure,
            )
        return False

    def finish_with_failure(self, failure: str) -> None:
        self._submit(OperatorFinished(failure, b""))

    def wait_until_finish_is_confirmed(self, deadline: float) -> None:
        machine = self._task.machine
        while not machine.all_confirmed:
            self._wait(lambda: machine.all_confirmed, deadline, "the coordinator has not taken all that this task sent")

    # --- what the task takes ---

    def poll(self) -> None:
        if self.on_task_thread:
            self._task.pause()

    def post(self, call: Callable[[], object]) -> None:
        self.mailbox.put(MailboxCall(call))

    def take(self, *, events_only: bool = False) -> MailboxItem | MailboxCall | None:
        self.check()
        return self.mailbox.take(events_only=events_only)

    def wait_for_item(self, timeout_s: float | None) -> bool:
        deadline = inf if timeout_s is None else self.now() + timeout_s
        self._task.wait(lambda: self.has_news, deadline)
        self.check()
        return bool(self.mailbox)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        self._task.wait(lambda: self.has_news or ready())
        self.check()

    def nudge(self) -> None:
        """Everything happens on one thread at a time, and ``wait_until`` looks at each turn."""

    def timed_out(self, failure: str) -> TimedOut:
        return TimedOut(failure)

    # --- waiting ---

    def _submit(self, fact: SubtaskInput) -> None:
        if not (self.on_task_thread or self.on_urgent_thread):
            raise LocalProtocolError("in headgate.testing an operator uses its context on the task's own thread only")
        self.check()
        self._task._drive(fact)

    def _submit_with_capacity(self, fact: EventSubmitted | RequestSubmitted, timeout_s: float) -> None:
        deadline = self.now() + timeout_s
        while True:
            try:
                return self._submit(fact)
            except GatewayFull as full:
                failure = f"no capacity to send within {timeout_s:g} s: {full}"
            moved = self._task.machine.statistics()
            self._wait_serving(
                lambda before=moved: self._task.machine.statistics() != before,  # type: ignore[misc]
                deadline,
                failure,
                fact.part,
            )

    def _wait_serving(self, wants: Callable[[], bool], deadline: float, failure: str, part: int) -> None:
        outside = self.table.outside[part]  # no checkpoint waits for what it waits for
        if self.mailbox.barriers and self.at_barrier(not outside):
            return
        met = len(self.mailbox)
        self._wait(lambda: wants() or (bool(self.mailbox.barriers) and len(self.mailbox) > met), deadline, failure)

    def sleep(self, seconds: float) -> None:
        self._task.wait(lambda: self.cancelled, self.now() + seconds)
        self.check()

    def _wait(self, wants: Callable[[], bool], deadline: float, failure: str) -> None:
        self.check()
        if not self._task.wait(lambda: wants() or self.cancelled, deadline):
            raise TimedOut(failure)

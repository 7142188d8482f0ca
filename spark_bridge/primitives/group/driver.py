# SPDX-License-Identifier: Apache-2.0

"""The driver's half of a group: carries out what ``protocol.group`` decides, and keeps the last checkpoint.

A member waits for its generation, for its round and for the judgement of an error in a request whose answer comes
later. So it has at most one open at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import Any

from actors.coordination import CoordinatorContext, OperatorCoordinator, Reply, SubtaskGateway
from actors.coordination.user_calls import in_turns
from protocol.arguments import AT_LEAST_1, NAME, WAIT, checked
from protocol.attempts import FailureReason
from protocol.enumerations import CurrentEnumeration
from protocol.errors import LocalProtocolError
from protocol.gateway.types import CONNECTION_GONE
from protocol.group import (
    Admit,
    AdmitAlone,
    Answer,
    BlameMember,
    Called,
    ErrorMet,
    Finished,
    GaveUp,
    GroupConfig,
    GroupEffect,
    GroupInput,
    GroupMachine,
    Joined,
    KeepCheckpoint,
    Left,
    Lost,
    Member,
    RefuseCall,
    RejectCall,
    Suspected,
    TellBroken,
)
from protocol.kept_bytes import KeptBytes
from protocol.machine import TimePassed
from protocol.wire.messages import RestoreMode
from protocol.wire.state import decode_state_in_steps, encode_state_in_steps
from spark_bridge.primitives.group.messages import (
    Admitted,
    Blob,
    Broken,
    Call,
    Fetch,
    GiveUp,
    Join,
    Leave,
    Question,
    Values,
    Yours,
    parse_event,
    parse_request,
)
from spark_bridge.primitives.group.task import PIECE_BYTES, GroupCheckpoint, GroupInTask, GroupPart
from spark_bridge.primitives.primitive import Primitive, not_the_state_of
from spark_bridge.subtask.operator import SubtaskOperator

_GROUP = "a group"
BLOB_BYTES_MAX = 1 << 30
"""A larger blob of a checkpoint is refused. The driver holds one, and a second one while it arrives."""
ROUND_BYTES_MAX = 1 << 30
"""The values of a collective through the driver have at most so many bytes. All must fit into one event anyway."""


class Group(GroupInTask, Primitive):
    """Tasks that work together in collectives, such as the workers of a training, and survive the loss of any of them.

    ``sidecar.group(name, size=4)`` makes it, and ``coordinate(..., uses=[group])`` gives it to an operator. In the
    function that the tasks run, ``with group as member:`` waits until all have come, and gives a ``GroupMember`` with
    ``rank``, ``world_size`` and the collectives. If a member is lost, each call of the others raises ``PeerLost``,
    whatever it waits for. They enter the ``with`` block again, which waits for the retry of the lost task, and continue
    from ``member.checkpoint``.

    Each entrance of all members is a *generation* with a number that increases. Ranks follow the subtasks. All tasks
    of a group run at the same time, so Spark needs a slot for each.

    An *elastic* group, with a ``min_size`` below its ``max_size``, continues with those that are left, and takes others
    in when its members next enter the block: see ``GroupMember.waiting``.

    A checkpoint of Headgate's that begins while a member waits for the others is taken when the task is done with its
    record. So a task that is to be part of checkpoints enters the block, or calls, for each record or a few of them.

    In batch mode, a new action begins without a checkpoint, unless Spark computes again only what it has lost. In
    streaming mode, the group's checkpoint is part of Headgate's, and a run with other input begins without one.

    Args:
        name: the name of the part, at most 200 characters.
        size: how many members a generation has; by default as many as the operator has subtasks.
        min_size: the least number of members of an elastic group; by default ``size``.
        max_size: the greatest number; by default ``size``.
        timeout_s: how long a member waits for others, in seconds, until ``TimedOut`` is raised: to join, and for each
            collective as a whole. Losses need no timeout.
        join_wait_s: how long an elastic group that has ``min_size`` members waits for more, after a loss.
        start_wait_s: the same for the first generation, whose tasks may start at different times, and for members that
            have left without an error and may come back.
        error_grace_s: how long ``GroupMember.guard`` waits for news of a loss before it believes that an error was the
            member's own.
        resume: whether an action that follows a failed one continues from its checkpoint, in batch mode. That is what
            ``sidecar.run`` needs for barrier stages, which Spark does not retry.

    Raises:
        ValueError: a size or a time is out of range, or the name is unsuitable.
    """

    # What members say concerns the generation that they are in, which ends with their attempts. The group's checkpoint
    # is in the coordinator's state.
    outside_checkpoints = True

    @checked(
        name=NAME,
        size=AT_LEAST_1,
        min_size=AT_LEAST_1,
        max_size=AT_LEAST_1,
        join_wait_s=WAIT,
        start_wait_s=WAIT,
        error_grace_s=WAIT,
    )
    def __init__(
        self,
        name: str,
        size: int | None = None,
        *,
        min_size: int | None = None,
        max_size: int | None = None,
        timeout_s: float = 600.0,
        join_wait_s: float = 0.1,
        start_wait_s: float = 10.0,
        error_grace_s: float = 5.0,
        resume: bool = False,
    ) -> None:
        GroupInTask.__init__(self, name)
        Primitive.__init__(self, name)
        self._min_size = size if min_size is None else min_size
        self._max_size = size if max_size is None else max_size
        if self._max_size is not None and self._max_size < (self._min_size or 1):
            raise ValueError(f"max_size must be at least min_size ({self._min_size or 1}), not {self._max_size}")
        self._timeout_s = timeout_s
        self._times = {
            "join_wait_s": join_wait_s,
            "start_wait_s": start_wait_s,
            "error_grace_s": error_grace_s,
            "join_timeout_s": timeout_s,
        }
        self._resume = resume
        self._latest: _GroupCoordinator | None = None

    def __reduce__(self) -> Any:
        return GroupInTask, (self._name,)

    @property
    def checkpoint(self) -> GroupCheckpoint | None:
        """The last checkpoint of the latest action; None if there is none. For any thread of the driver."""
        return None if self._latest is None else self._latest.checkpoint

    @property
    def generation(self) -> int:
        """The number of the last generation; 0 before the first one. For any thread of the driver."""
        return 0 if self._latest is None else self._latest.machine.generation

    def coordinator(self, operator_id: str) -> OperatorCoordinator:
        self._latest = _GroupCoordinator(self._name, self._config, self._resume)
        return self._latest

    def task_part(self) -> Callable[[], SubtaskOperator]:
        return partial(GroupPart, self._name, self._timeout_s)

    def _config(self, parallelism: int) -> GroupConfig:
        config = GroupConfig(parallelism, self._min_size or parallelism, self._max_size or parallelism, **self._times)
        if config.min_size > parallelism:
            raise ValueError(
                f"the group {self._name!r} needs {config.min_size} members, but its operator has only {parallelism} "
                "subtasks: raise the parallelism, or make the group smaller"
            )
        return config


class _ArrivingBlob(BytesIO):
    """What has come of a blob. ``getvalue`` copies nothing."""

    def __len__(self) -> int:
        return self.tell()


class _GroupCoordinator(OperatorCoordinator):
    """The shell of the machine. On the event loop."""

    def __init__(self, name: str, make_config: Callable[[int], GroupConfig], resume: bool) -> None:
        self.checkpoint: GroupCheckpoint | None = None
        self._name = name
        self._make_config = make_config
        self._resume = resume
        self.machine = GroupMachine(GroupConfig(1, 1, 1))
        self._context: CoordinatorContext
        self._replies: dict[Member, Reply] = {}
        self._blobs: dict[Member, tuple[int, _ArrivingBlob]] = {}  # of rank 0
        self._values = KeptBytes(
            ROUND_BYTES_MAX, f"the values of a collective of the group {name!r}", "send less in each call"
        )
        self._timer: float | None = None
        self._enumeration = CurrentEnumeration()
        self._met_run = False
        self._past: bool | None = None  # whether the run before succeeded, until the next one is met

    async def start(self, context: CoordinatorContext) -> None:
        self._context = context
        self.machine = GroupMachine(self._make_config(context.parallelism))

    # --- what tasks say -----------------------------------------------------------------------------------------------

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        member, parsed = Member(subtask, attempt), parse_request(request)
        if isinstance(parsed, Fetch):
            return self._piece(parsed)
        if isinstance(parsed, Join) and member in self._replies:
            await self._tell(Left(member, 0))  # it does not wait any more for what it has asked before
        self._replies[member] = reply = Reply()
        try:
            match parsed:
                case Join():
                    await self._tell(Joined(member, parsed))
                case Call(generation, round_, kind, value):
                    self._values.charge(member, len(value) if isinstance(value, bytes) else 0)
                    await self._tell(Called(member, generation, round_, kind, value))
                case Question(generation):
                    await self._tell(ErrorMet(member, generation))
        except Exception:
            self._reply(member)
            raise
        return reply

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        member = Member(subtask, attempt)
        match parse_event(event):
            case Leave(generation, error):
                self._blobs.pop(member, None)
                await self._tell(Left(member, generation, error))
            case GiveUp(generation):
                await self._tell(GaveUp(member, generation))
            case Blob(generation, offset, size, data):
                self._take_blob(member, generation, offset, size, data)

    def _take_blob(self, member: Member, generation: int, offset: int, size: int, data: bytes) -> None:
        """Keep a piece. Only rank 0 of the current generation has a blob, so there is at most one (H157)."""
        if not self.machine.is_first(member, generation):
            self._blobs.pop(member, None)
            return
        if max(size, offset + len(data)) > BLOB_BYTES_MAX:
            raise ValueError(
                f"the blob of a checkpoint has {max(size, offset + len(data))} bytes, and at most {BLOB_BYTES_MAX} are "
                "allowed: store it elsewhere, and save its place"
            )
        if offset == 0:
            self._blobs[member] = generation, _ArrivingBlob()
        of_generation, blob = self._blobs.get(member, (0, _ArrivingBlob()))
        if of_generation != generation or len(blob) != offset or offset + len(data) > size:
            raise ValueError(
                f"subtask {member.subtask} sent the bytes {offset} to {offset + len(data)} of a blob of {size} bytes "
                f"after {len(blob)} bytes of it: its pieces must follow each other"
            )
        blob.write(data)

    def _piece(self, fetch: Fetch) -> bytes:
        checkpoint = self.checkpoint
        if checkpoint is None or checkpoint.step != fetch.step:
            raise ValueError(f"the checkpoint of step {fetch.step} was replaced by a later one: enter the group again")
        return checkpoint.blob[fetch.offset : fetch.offset + PIECE_BYTES]

    # --- what becomes of attempts and runs ----------------------------------------------------------------------------

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        if not self._met_run:
            await self._meet_run()

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        member = Member(subtask, attempt)
        self._forget(member)
        await self._tell(Lost(member, str(reason)))

    async def subtask_finished(self, subtask: int, attempt: int) -> None:
        member = Member(subtask, attempt)
        self._forget(member)
        await self._tell(Finished(member))

    async def subtask_suspected(self, subtask: int, attempt: int, reason: str) -> None:
        if reason == CONNECTION_GONE:  # a process that is only silent may be busy, and would break each generation
            await self._tell(Suspected(Member(subtask, attempt)))

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self._met_run, self._past = False, succeeded
        self._begin_anew()

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        if state is not None and (self._is_batch or self._context.input_begins_again):
            step, blob = await self._decoded(state) if state else (0, None)
            self.checkpoint = None if blob is None else GroupCheckpoint(step, blob)
        elif not self._is_batch:
            self.checkpoint = None  # a training with other input does not continue this one (H174)
        # In batch mode the tasks of a barrier stage continue, and the first task of a new run shows what that computes.
        self._begin_anew()

    async def _decoded(self, state: bytes) -> tuple[int, bytes]:
        try:
            match await in_turns(decode_state_in_steps(_GROUP, state, list)):
                case {"step": int(step), "blob": bytes(blob)} | {"": [int(step), bytes(blob)]}:
                    return step, blob
        except LocalProtocolError as error:
            raise not_the_state_of(_GROUP, self._name) from error
        raise not_the_state_of(_GROUP, self._name)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        if self._is_batch or self.checkpoint is None:
            return b""
        fields = {"step": self.checkpoint.step, "blob": self.checkpoint.blob}
        return await in_turns(encode_state_in_steps(_GROUP, fields))

    @property
    def _is_batch(self) -> bool:
        context = getattr(self, "_context", None)  # a restore comes before `start`
        return context is None or context.mode is RestoreMode.BATCH

    def _begin_anew(self) -> None:
        self.machine = GroupMachine(self.machine.config, self.machine.generation)
        self._replies, self._blobs = {}, {}
        self._values.clear()

    def _forget(self, member: Member) -> None:
        self._reply(member)
        self._blobs.pop(member, None)

    async def _meet_run(self) -> None:
        """The first attempt of a run: which subtasks does it compute, and does it continue with the run before?"""
        past, self._past, self._met_run = self._past, None, True
        if not self._is_batch:
            return
        look = await self._context.look_at_run()
        goes_on = self._enumeration.meet(look)
        if past is not None and not goes_on and not (self._resume and not past):
            self.checkpoint = None
        config = self.machine.config
        absent = set(range(config.parallelism)) - look.partitions if look.partition_count else set()
        if goes_on:
            for subtask in absent:  # Spark has kept their results
                await self._tell(Finished(Member(subtask, -1)))
        elif config.parallelism - len(absent) < config.min_size:
            self._context.fail_job(
                f"the group {self._name!r} needs {config.min_size} members, but this action computes only "
                f"{len(look.partitions)} of {config.parallelism} partitions, as take() and first() do: use an action "
                "that computes all of them, such as collect()"
            )

    # --- the machine --------------------------------------------------------------------------------------------------

    async def _tell(self, input: GroupInput) -> None:
        for effect in self.machine.handle(input, self._context.clock.now()):
            await self._carry_out(effect)
        self._arm()

    def _arm(self) -> None:
        deadline = self.machine.next_deadline()
        if deadline is not None and (self._timer is None or deadline < self._timer):
            self._timer = deadline
            self._context.call_later(max(0.0, deadline - self._context.clock.now()), self._wake)

    async def _wake(self) -> None:
        self._timer = None
        await self._tell(TimePassed())

    async def _carry_out(self, effect: GroupEffect) -> None:
        match effect:
            case Admit(generation, members, details):
                self._admit(generation, members, details)
            case AdmitAlone(generation, member, rank, world_size, details):
                self._answer(member, self._admitted(generation, rank, world_size, details, b""))
            case KeepCheckpoint(member, step):
                _, blob = self._blobs.pop(member, (0, _ArrivingBlob()))
                self.checkpoint = GroupCheckpoint(step, blob.getvalue())
            case Answer(members, values, waiting):
                answer = Values(tuple(one for one in values if isinstance(one, bytes)), waiting).as_event()
                for member in members:
                    self._answer(member, answer)
            case RefuseCall(member, generation, reason):
                self._answer(member, Broken(generation, reason).as_event())
            case RejectCall(member, reason):
                self._reply(member).fail(f"the group {self._name!r}: {reason}")
            case BlameMember(member):
                self._answer(member, Yours().as_event())
            case TellBroken(generation, members, reason):
                await self._tell_broken(generation, members, reason)

    def _admit(self, generation: int, members: tuple[Member, ...], details: tuple[Join, ...]) -> None:
        key = os.urandom(32)
        self._context.log.info("generation formed", generation=generation, world_size=len(members))
        for rank, member in enumerate(members):
            self._answer(member, self._admitted(generation, rank, len(members), details[0], key))

    def _admitted(self, generation: int, rank: int, world_size: int, first: Join, key: bytes) -> list[Any]:
        checkpoint = self.checkpoint
        step, size = (-1, 0) if checkpoint is None else (checkpoint.step, len(checkpoint.blob))
        return Admitted(generation, rank, world_size, first.host, first.port, key, step, size).as_event()

    async def _tell_broken(self, generation: int, members: tuple[Member, ...], reason: str) -> None:
        self._context.log.warning("generation broken", generation=generation, reason=reason)
        self._blobs.clear()  # nobody completes it
        broken = Broken(generation, reason).as_event()
        for member in members:
            await self._context.gateways.send(member.subtask, broken, attempt=member.attempt, urgent=True)

    def _reply(self, member: Member) -> Reply:
        """The reply to what the member has asked. It is over, so nothing that came with it is kept."""
        self._values.release(member)
        return self._replies.pop(member, None) or Reply()

    def _answer(self, member: Member, answer: list[Any]) -> None:
        self._reply(member).answer(answer)

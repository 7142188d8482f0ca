# SPDX-License-Identifier: Apache-2.0

"""The task's half of a group: what user code sees of it there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from protocol.arguments import INT64, Rule, checked
from protocol.describing import describe, type_name
from protocol.errors import AttemptOver, LocalProtocolError
from protocol.group import SAVE
from protocol.wire.codec import decode_event, encode_argument, encode_event
from spark_bridge.primitives.group.guard import SocketGuard, addresses_of
from spark_bridge.primitives.group.messages import (
    ERROR_CHARS_MAX,
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
    parse_answer,
    parse_broken,
)
from spark_bridge.primitives.group.ring import Ring, listen
from spark_bridge.subtask.errors import PeerLost, TimedOut
from spark_bridge.subtask.parts import ON_DRIVER, PartInTask, TaskPart

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from spark_bridge.subtask.context import SubtaskContext

PIECE_BYTES = 240 * 1024
"""A blob travels in pieces of this size, between which other messages pass."""


@dataclass(frozen=True, slots=True)
class GroupCheckpoint:
    """What all members have saved: the number of the step, and the blob of rank 0."""

    step: int
    blob: bytes = field(repr=False)


BLOB = Rule("bytes, so encode it first", lambda blob: True)


class GroupMember:
    """This task as a member of one generation of a ``Group``: what ``with group as member:`` gives.

    All members make the same calls in the same order, each from one thread at a time. A call waits for those of the
    others. If another member is lost or leaves, it raises ``PeerLost``, and so does every later call: enter the block
    again, for the next generation. After the end of the block every call raises ``LocalProtocolError``.

    Attributes:
        rank: the place of this member, from 0. Ranks follow the subtasks.
        world_size: how many members there are.
        generation: the number of the generation. It increases with each one.
        store_address: host and port at rank 0 that was free a moment ago, for a store such as torch's ``TCPStore``.
        checkpoint: the last step that all members had saved when the generation began; None if there is none. It is
            the same for all members.
        waiting: how many of the tasks that wait to join could be admitted beside the present members, as of the last
            call. The number is the same for all members. In an elastic group, leave the block and enter it again to let
            them in. A spare task of a group that is full does not count.
    """

    def __init__(self, part: GroupPart, admitted: Admitted, checkpoint: GroupCheckpoint | None) -> None:
        self.rank = admitted.rank
        self.world_size = admitted.world_size
        self.generation = admitted.generation
        self.store_address = admitted.host, admitted.port
        self.checkpoint = checkpoint
        self.waiting = 0
        self._part = part
        self._round = 0
        self._over = ""  # why no call is possible any more
        self._key = admitted.key
        self._ring: Ring | None = None
        self._through_driver = False

    def __repr__(self) -> str:
        return f"<GroupMember rank={self.rank} world_size={self.world_size} generation={self.generation}>"

    def barrier(self) -> None:
        """Wait until all members have called this.

        Raises:
            PeerLost: another member is lost, or has left the block.
            RequestFailed: the others make another call, or have finished and cannot call any more.
            TimedOut: the others did not come within the group's ``timeout_s``.
            AttemptOver: this attempt is over.
        """
        self._call("barrier()", None)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all members, in the order of their ranks. Raises as ``barrier``.

        ``value`` is anything that an event can carry. All values together must fit into one event.
        """
        return [decode_event(one) for one in self._call("all_gather()", encode_argument("value", value))]

    @checked()
    def broadcast(self, value: Any = None, root: int = 0) -> Any:
        """Return the value of the member whose rank is ``root``; the others' are not used. Raises as ``barrier``.

        ``value`` is anything that an event can carry.
        """
        if root >= self.world_size:
            raise ValueError(f"root must be a rank from 0 to {self.world_size - 1}, not {root}")
        (sent,) = self._call(f"broadcast(root={root})", encode_argument("value", value) if self.rank == root else None)
        return decode_event(sent)

    @checked()
    def all_reduce(self, array: ArrayLike, op: Literal["sum", "prod", "max", "min"] = "sum") -> NDArray[Any]:
        """Return the elementwise reduction over the NumPy arrays of all members, with their shape and dtype.

        All members get the same bits. The order of the operations depends only on the number of members and the size
        of the array, so the bits are the same in each generation with as many members. Needs NumPy. Raises as
        ``barrier``.

        Args:
            array: an array of numbers; the same shape and dtype in all members. It is not changed.
            op: "sum", "prod", "max" or "min".
        """
        from spark_bridge.primitives.group.arrays import all_reduce

        try:
            rounds = partial(self._call, until=self._part.context.now() + self._part.timeout_s)
            return all_reduce(array, op, self.rank, self.world_size, rounds, self._connected)
        except (OSError, TimedOut) as error:
            self._over = f"an earlier call ended with {type_name(error)}"
            if not isinstance(error, TimedOut):
                self._part.judge(self.generation, error)
            self._part.give_up(self.generation)
            raise

    def guard(self) -> AbstractContextManager[None]:
        """Run foreign code that waits for other members on separate connections, such as a collective of a library.

        If a member is lost, the connections that were opened inside the block are shut down, until it is left. The code
        then fails with its own error, and the block raises ``PeerLost`` from that error. An error that is not
        the consequence of a loss leaves the block unchanged, after the group's ``error_grace_s``. Sockets that listen,
        and those that were opened before, are not touched.
        """
        self._check()
        return self._part.guard(self.generation)

    def xgboost(self) -> AbstractContextManager[None]:
        """Run XGBoost with all members as its workers: ``with member.xgboost():`` around ``xgboost.train(...)``.

        All members enter it together. Inside, each is the XGBoost worker of its rank: a ``DMatrix`` has this member's
        part of the data, and every member gets the same model. If a member is lost, the others leave the collective,
        and the block raises ``PeerLost``, as ``guard`` does. At the end the members wait for each other. Use it from
        one thread, and not inside ``guard()``.

        If XGBoost does not return 3 s after its connections were shut down, and the thread uses no processor time, the
        process is killed on Linux, and Spark retries the task.

        Needs the package: ``pip install 'headgate[xgboost]'`` for the Python of Spark's workers. XGBoost's connections
        are not encrypted, and nothing proves who connects: use it in a network that you trust. Raises as ``barrier``,
        and ``LocalProtocolError`` with TLS, or without the package.
        """
        self._check()
        self._part.check_foreign("xgboost()")
        try:
            from spark_bridge.primitives.group.xgboost_group import NO_BAD_NEWS, Tracker, Worker
        except ImportError as error:
            raise LocalProtocolError(
                "xgboost() needs the package xgboost in the Python of Spark's workers: pip install 'headgate[xgboost]'"
            ) from error

        @contextmanager
        def communicate() -> Iterator[None]:
            part, arguments = self._part, None
            if self.rank == 0:
                tracker = Tracker(self.store_address[0], self.world_size)
                part.keep(tracker.free)
                arguments = tracker.arguments()
            arguments = self.broadcast(arguments)
            # The tracker listens already, so the guard does not disturb it: only its connections are shut down.
            with part.freeing(wake_with=NO_BAD_NEWS, may_end=True) as guard:
                with Worker(arguments, self.rank, part.timeout_s, guard) as worker, part.judging(self.generation):
                    worker.begin()
                    yield
                    worker.end()
                self.barrier()  # all have left, so nobody needs the tracker
            part.free_kept()

        return communicate()

    def torch(self) -> AbstractContextManager[None]:
        """Run ``torch.distributed`` with all members as its processes: ``with member.torch():`` around the training.

        All members enter it together. Inside, the default process group has the members' ranks and the backend gloo:
        use ``torch.distributed.all_reduce``, ``DistributedDataParallel`` and the like. If a member is lost, the others
        leave the collective, and the block raises ``PeerLost``, as ``guard`` does. At the end the members wait for each
        other, and the process group is destroyed. Use it from one thread, and not inside ``guard()``.

        If torch does not return 3 s after its connections were shut down, and the thread uses no processor time, the
        process is killed on Linux, and Spark retries the task.

        Needs the package: ``pip install 'headgate[torch]'`` for the Python of Spark's workers. Gloo's connections are
        not encrypted, and nothing proves who connects: use it in a network that you trust. It uses the address to which
        the host's name resolves, or that of the interface named in ``GLOO_SOCKET_IFNAME``. Raises as ``barrier``, and
        ``LocalProtocolError`` with TLS, or without the package.
        """
        self._check()
        self._part.check_foreign("torch()")
        try:
            from spark_bridge.primitives.group.torch_group import ProcessGroup, Store, check_installed

            check_installed()
        except ImportError as error:
            raise LocalProtocolError(
                "torch() needs the package torch in the Python of Spark's workers: pip install 'headgate[torch]'"
            ) from error

        @contextmanager
        def communicate() -> Iterator[None]:
            part, (host, _) = self._part, self.store_address
            store = Store(host, self.world_size, part.timeout_s) if self.rank == 0 else None
            port = self.broadcast(None if store is None else store.port)
            with part.freeing(may_end=True):
                with ProcessGroup(self.rank, self.world_size, part.timeout_s) as group, part.judging(self.generation):
                    group.begin(host, port)
                    yield
                    self.barrier()  # nobody waits for data of this member any more
                    group.end()

        return communicate()

    @checked(step=INT64, blob=BLOB)
    def save(self, step: int, blob: bytes | None = None) -> None:
        """Keep a checkpoint on the driver, from which the next generation continues. Raises as ``barrier``.

        All members call it with the same ``step``. The checkpoint is complete when all have, and replaces the one
        before. The blob of rank 0 is kept; the others may pass theirs or None. If the call raises ``PeerLost``, the
        next generation shows whether it was complete.
        """
        if self.rank == 0:
            if blob is None:
                raise TypeError("blob must be bytes at rank 0, not None: encode what the next generation needs")
            self._check()
            data = bytes(blob)
            for offset in range(0, len(data) or 1, PIECE_BYTES):
                piece = Blob(self.generation, offset, len(data), data[offset : offset + PIECE_BYTES])
                self._part.context.send_event(piece.as_event())
        self._call(SAVE, step)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._over:
            raise LocalProtocolError(
                f"this member cannot call any more: {self._over}; enter the group again with `with group as member:`"
            )
        self._part.check(self.generation)

    def _call(self, kind: str, value: bytes | int | None, *, until: float | None = None) -> tuple[Any, ...]:
        """``until``: the end of a collective of several rounds; None for ``timeout_s`` from now on."""
        self._check()
        try:
            answer = self._part.ask(Call(self.generation, self._round, kind, value), until)
        except BaseException as error:
            self._over = f"an earlier call ended with {type_name(error)}"
            self._part.give_up(self.generation)
            raise
        if not isinstance(answer, Values):
            self._part.lose(answer)
        self._round += 1
        self.waiting = answer.waiting
        return answer.values

    def _end(self) -> None:
        self._over = "its `with` block has ended: enter one again, and use the member that it gives"
        if self._ring is not None:
            self._ring.close()

    def _connected(self) -> Ring | None:
        """The connections to the other members, made when they are first needed. None if they cannot be used."""
        if self._through_driver:
            return None
        if self._ring is None:
            with self._part.listen() or nullcontext() as listener:
                own = None if listener is None else listener.getsockname()[:2]
                addresses = [decode_event(one) for one in self._call("all_reduce(), connecting", encode_event(own))]
                if listener is None or None in addresses:
                    self._through_driver = True
                    return None
                ring = Ring(self.rank, self.world_size, self._key, self._part.timeout_s)
                self._part.use(ring)
                self._ring = ring
                ring.connect(listener, [(host, port) for host, port in addresses])
        self._ring.begin()
        return self._ring


class GroupPart(TaskPart):
    """The state of a group in one task."""

    waits_for_subtask_ready = False

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self.timeout_s = timeout_s
        self._guard: SocketGuard | None = None
        self._ring: Ring | None = None
        self._lock = threading.Lock()
        self._broken = Broken(0, "")  # the last generation of which this task was told
        self._asks = False
        self._to_free: list[Callable[[], None]] = []
        self.member: GroupMember | None = None
        self.context: SubtaskContext

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def close(self) -> None:
        self.free_kept()

    def handle_urgent(self, event: Any) -> None:
        self._hear(parse_broken(event))

    def _hear(self, broken: Broken) -> None:
        with self._lock:
            if broken.generation > self._broken.generation:
                self._broken = broken
            self._free()

    def _free(self) -> None:
        """Free the task's thread, if it waits in a generation that is broken. Under the lock."""
        member = self.member
        if member is None or self._broken.generation < member.generation:
            return
        if self._ring is not None:
            self._ring.cancel()
        if self._guard is not None:
            self._guard.free()

    def use(self, ring: Ring) -> None:
        with self._lock:
            self._ring = ring
            self._free()

    def listen(self) -> socket.socket | None:
        """A listening socket for another member, or None if the members must not connect to each other."""
        endpoint = self.task.endpoint
        if not endpoint.port or endpoint.certificate_sha256:  # a simulated task, or one whose data must be encrypted
            return None
        return listen(address_towards(endpoint.host, endpoint.port))

    @contextmanager
    def guard(self, generation: int) -> Iterator[None]:
        with self.freeing(), self.judging(generation):
            yield

    @contextmanager
    def freeing(self, *, wake_with: bytes | None = None, may_end: bool = False) -> Iterator[SocketGuard]:
        """Shut down the connections that are opened in the block as soon as the generation is broken.

        ``may_end``: whether the process may be ended if that does not free its thread.
        """
        self.check_guarded()
        endpoint = self.task.endpoint
        keep = addresses_of(endpoint.host, endpoint.port) if endpoint.port else frozenset()
        allowed = self._is_in_foreign_code if may_end and endpoint.port else None
        guard = SocketGuard(keep, wake_with=wake_with, may_end=allowed)
        with self._lock:
            self._guard = guard
            self._free()
        try:
            yield guard
        finally:
            with self._lock:
                self._guard = None
            guard.leave()

    @contextmanager
    def judging(self, generation: int) -> Iterator[None]:
        """Raise ``PeerLost`` from an error that is the consequence of a loss."""
        try:
            yield
        except (PeerLost, AttemptOver):
            raise
        except Exception as error:
            self.judge(generation, error)
            raise

    def _is_in_foreign_code(self) -> bool:
        return not self._asks  # otherwise it waits for the sidecar

    def check_guarded(self) -> None:
        if self._guard is not None:
            raise LocalProtocolError("this task is inside guard() already: leave that block first")

    def check_foreign(self, what: str) -> None:
        """Raise if the members must not connect to each other with another library."""
        self.check_guarded()
        if self.task.endpoint.certificate_sha256:
            raise LocalProtocolError(
                f"{what} would send the data of this group over connections that are not encrypted, but the sidecar "
                "uses TLS: use the group's own collectives, which go through the driver, or a sidecar without TLS in a "
                "network that you trust"
            )

    def keep(self, free: Callable[[], None]) -> None:
        """Call ``free`` when the next generation has begun, or the task ends.

        What other members may still wait for must not go before they are out of this generation.
        """
        self._to_free.append(free)

    def free_kept(self) -> None:
        kept, self._to_free = self._to_free, []
        for free in kept:
            free()

    def judge(self, generation: int, error: Exception) -> None:
        """Raise ``PeerLost`` if the error is the consequence of a loss, as far as the driver knows within its time."""
        with self._lock:
            known = self._broken
        if known.generation >= generation:
            raise PeerLost(generation, known.reason) from error
        answer = self.ask(Question(generation))
        if isinstance(answer, Broken):
            self._hear(answer)
            raise PeerLost(generation, answer.reason) from error

    # --- for user code ------------------------------------------------------------------------------------------------

    def enter(self) -> GroupMember:
        if self.member is not None:
            raise LocalProtocolError(f"this task is inside the group {self._name!r} already: leave its block first")
        host, port = free_address(self.task.endpoint.host, self.task.endpoint.port)
        try:
            admitted = self.ask(Join(host, port))
            if not isinstance(admitted, Admitted):
                self.lose(admitted)
            self.free_kept()  # nobody is inside the generation before any more
            member = GroupMember(self, admitted, self._fetch(admitted))
            with self._lock:
                self.member, self._ring = member, None
        except BaseException as error:
            self._send_leave(0, describe(error))
            raise
        return member

    def leave(self, error: BaseException | None) -> None:
        with self._lock:
            member, self.member, self._ring = self.member, None, None
        if member is None:
            return
        member._end()
        own = describe(error) if isinstance(error, Exception) and not isinstance(error, PeerLost) else ""
        self._send_leave(member.generation, own, error)

    def give_up(self, generation: int) -> None:
        """Tell the others, who may call later, that this member waits for them no longer. The first error counts."""
        with suppress(Exception):
            self.context.send_event(GiveUp(generation).as_event())

    def _send_leave(self, generation: int, text: str, error: BaseException | None = None) -> None:
        with suppress(AttemptOver, *(() if error is None else (Exception,))):
            self.context.send_event(Leave(generation, text[:ERROR_CHARS_MAX]).as_event())

    def _fetch(self, admitted: Admitted) -> GroupCheckpoint | None:
        if admitted.step < 0:
            return None
        blob = bytearray()
        while len(blob) < admitted.size:
            blob += self.context.request(Fetch(admitted.step, len(blob)).as_event(), self.timeout_s)
        return GroupCheckpoint(admitted.step, bytes(blob))

    def ask(self, request: Join | Call | Question, until: float | None = None) -> Admitted | Values | Broken | Yours:
        self._asks = True
        left_s = self.timeout_s if until is None else max(0.0, until - self.context.now())
        try:
            return parse_answer(self.context.request(request.as_event(), left_s))
        except TimedOut as error:
            what = "join it" if isinstance(request, Join) else "make the same call"
            raise TimedOut(
                f"the other members of the group {self._name!r} did not {what} within {self.timeout_s:g} s. All tasks "
                f"of a group run at the same time: check that Spark has a slot for each ({error})"
            ) from error
        finally:
            self._asks = False

    def check(self, generation: int) -> None:
        """Raise ``PeerLost`` if this task was told that the generation is broken."""
        with self._lock:
            broken = self._broken
        if broken.generation >= generation:
            raise PeerLost(generation, broken.reason)

    def lose(self, answer: object) -> NoReturn:
        if not isinstance(answer, Broken):
            raise LocalProtocolError(f"unexpected answer of the group {self._name!r}: {answer!r:.80}")
        self._hear(answer)
        raise PeerLost(answer.generation, answer.reason)


class GroupInTask(PartInTask):
    """A ``Group`` in a task."""

    _kind = "group"
    _on_driver = ON_DRIVER | {"checkpoint", "generation"}

    def __enter__(self) -> GroupMember:
        """In a task: wait until the next generation begins, and return this task's ``GroupMember``.

        Raises:
            TimedOut: too few tasks have joined within ``timeout_s``.
            LocalProtocolError: outside a function that ``handle.subtask`` runs in tasks, or inside the block already.
            AttemptOver: this attempt is over.
        """
        member: GroupMember = self._part().enter()
        return member

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the generation. The others continue as long as they make no call."""
        self._part().leave(error)


def free_address(driver_host: str, driver_port: int) -> tuple[str, int]:
    """This host's address as the driver's machine sees it, and a port that is free now. None in a simulated task."""
    if not driver_port:
        return "", 0
    host = address_towards(driver_host, driver_port)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.bind((host, 0))
        return host, one.getsockname()[1]


def address_towards(host: str, port: int) -> str:
    """The address of this machine's interface towards another one. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as one:
        one.connect(address)
        found: str = one.getsockname()[0]
        return found

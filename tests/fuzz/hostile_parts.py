# SPDX-License-Identifier: Apache-2.0

"""A hostile task at the coordinator of each ready-made part, source and sink (H157).

The task has its operator's key, so the codec and the gateway let it say whatever is an event. It sends the messages of
its part with random content, messages that are nearly right, and some without sense, out of order and again and again.
The actors around the coordinator are the real ones; only Spark is simulated.

What fails may be a request, the task, or the job of its operator, each with an error that the product itself raises.
The coordinator keeps no more than its bounds, and no step of its methods does more than so much work.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from linecache import getline
from math import inf, nan
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, Literal, TypeVar
from unittest.mock import patch

import numpy as np
import pyarrow

from actors.coordination import (
    OperatorCoordinator,
    SourceCoordinator,
    SplitEnumerator,
    StaticSplitEnumerator,
    user_calls,
)
from actors.coordination.engine import coordinator as shell
from headgate import Budget, Cache, Group, Permits, SharedValue, SplitReader, WorkQueue
from headgate.sources import FileSource, HybridSource, KafkaSource, PostgresSource, RedisStreamsSource, Source, SplitAt
from headgate.testing import PartEvent, Task, World, running_operator
from protocol.errors import EventEncodeError, GatewayFull
from spark_bridge.primitives.primitive import Primitive
from spark_bridge.sinks.delta.driver import DeltaCommitter
from spark_bridge.sinks.files.driver import FileCommitter
from spark_bridge.sinks.iceberg.driver import IcebergCommitter
from spark_bridge.sinks.postgres.driver import PreparedCommitter, StagedCommitter
from spark_bridge.sinks.redis.driver import RedisCommitter
from spark_bridge.sinks.two_phase import driver as two_phase
from spark_bridge.sinks.two_phase.driver import TwoPhaseSinkCoordinator
from spark_bridge.sinks.two_phase.errors import SinkDataLost
from spark_bridge.sinks.two_phase.parts import PartName, token_of
from spark_bridge.sinks.two_phase.sink import TwoPhaseCommitter
from spark_bridge.streams.driver import FormatEnumerator, StreamPlanner, _State
from spark_bridge.subtask.parts import COUNTERS
from tests.fuzz import samples
from tests.fuzz.target import Target
from tests.spark_bridge.sinks.memory import MemoryCommitter, MemorySink, Server

T = TypeVar("T")
Mode = Literal["batch", "streaming"]
MODES: tuple[Mode, ...] = ("batch", "streaming")

HOSTILE, HONEST = 0, 1
PARALLELISM = 3
STEP_CALLS_MAX = 40_000
"""How many functions one step of a coordinator's method may call: some milliseconds. A list of 1,000 parts needs most.
"""
PRODUCT = str(Path(__file__).parents[2])
OURS = (
    "actors.coordination.sources.source",
    "actors.coordination.sources.enumerators",
    "actors.coordination.sources.pending_splits",
)
PACKAGES = ("spark_bridge", "protocol", "tests.fuzz", "tests.spark_bridge.sinks", "collections", "builtins", "_io")
KEPT_BYTES_MAX = 2 * 2**20
"""What the coordinators here may keep: their bounds, where they have a setting, are far below."""


@dataclass(frozen=True)
class Part:
    """One coordinator, and what a hostile task says to it: functions that make an event, or a request."""

    name: str
    make: Callable[[], OperatorCoordinator | Primitive]
    events: tuple[Callable[[Random], Any], ...]
    requests: tuple[Callable[[Random], Any], ...] = ()
    mode: Mode = "batch"


# --- what is said -------------------------------------------------------------------------------------------------

EDGES = (0, 1, 2, 7, -1, -2, 3, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1)
NAMES = ("", "a", "x\x00y", "é" * 300, "headgate.counters", "0", "9" * 5000, "part-s00000-e0000000000-a00000-00-0")


def number(random: Random) -> int:
    return random.choice(EDGES) if random.random() < 0.7 else random.randrange(50)


def word(random: Random) -> str:
    return random.choice(NAMES)


def nested(random: Random) -> Any:
    value: Any = []
    for _ in range(random.choice((5, 50))):
        value = random.choice(([value], {0: value}, (value,)))
    return value


def anything(random: Random) -> Any:
    """A value that an event can be, and that no message has here."""
    return random.choice(
        (
            None, True, 0.5, nan, inf, -inf, b"", b"\xc1", number(random), word(random), [], {}, (), set(),
            nested(random), Decimal("sNaN"), np.zeros(3), np.float32(1), np.arange(4), {1: [2]}, [[[]]],
            samples.event(random), list(range(random.choice((3, 3000)))),
        )
    )  # fmt: skip


def nearly(random: Random, message: Any) -> Any:
    """The message with one thing wrong, somewhere inside."""
    if isinstance(message, list) and message and random.random() < 0.9:
        place = random.randrange(len(message))
        changed = list(message)
        match random.randrange(6):
            case 0:
                del changed[place]
            case 1:
                changed.insert(place, anything(random))
            case 2:
                changed.append(changed[place])
            case _:
                changed[place] = nearly(random, changed[place])
        return changed
    if isinstance(message, dict) and message and random.random() < 0.7:
        key = random.choice(list(message))
        return {**message, key: nearly(random, message[key])}
    return anything(random)


def many(random: Random) -> int:
    return random.choice((0, 1, 3, 40, 2000))


def a_report(random: Random) -> Any:
    found = [[number(random), number(random), anything(random)] for _ in range(many(random))]
    ids = [[number(random) for _ in range(many(random))] for _ in range(2)]
    return ["headgate/work-report", ids[0], found, ids[1], number(random), random.random() < 0.2, number(random)]


def new_items(random: Random) -> Any:
    return ["headgate/work-report", [], [[random.getrandbits(62), 0, "x"] for _ in range(300)], [], 1, False, 0]


def new_priorities(random: Random) -> Any:
    found = [[random.getrandbits(62), random.getrandbits(62), 1] for _ in range(100)]
    return ["headgate/work-report", [], found, [], 1, False, 0]


def many_reports(random: Random) -> Any:
    item = [1, 0, None]
    ids = list(range(100_000))
    return [
        "headgate/work-report",
        *random.choice(((ids, [], []), ([], [item] * 60_000, []), ([], [], ids))),
        1,
        False,
        0,
    ]


def some_counts(random: Random) -> Any:
    buckets = {random.choice(("0", "+1", "--3", "+35844", "x")): number(random) for _ in range(3)}
    counts = {word(random): random.choice((number(random), 0.5, nan, "0xff", "-0x1"))}
    return [random.choice((None, number(random))), [counts, {word(random): [1, 2.0, 1, 1, buckets]}]]


def new_counts(random: Random) -> Any:
    return [random.getrandbits(60), [{str(random.getrandbits(60)): 1 for _ in range(100)}, {}]]


def new_cuts(random: Random) -> Any:
    """Counts for endless checkpoints, which the coordinator would keep for each."""
    return [random.getrandbits(60), [{f"{random.randrange(900):0150}": 1 for _ in range(100)}, {}]]


def new_buckets(random: Random) -> Any:
    buckets = {f"+{random.randrange(30_000)}": 1 for _ in range(8000)}
    return [None, [{}, {f"{random.randrange(900)}": [1, 1.0, 1.0, 1.0, buckets] for _ in range(8)}]]


def a_join(random: Random) -> Any:
    return ["join", word(random), number(random)]


def a_call(random: Random) -> Any:
    kind = random.choice(("save", "barrier", word(random)))
    return ["call", number(random), number(random), kind, random.choice((None, b"x" * 100, number(random)))]


def a_blob(random: Random) -> Any:
    offset = random.choice((0, number(random)))
    return ["blob", number(random), offset, number(random), bytes(random.choice((0, 1, 100_000)))]


def a_prepared(random: Random) -> Any:
    proof = random.choice(("proof", word(random)))
    subtask, after, attempt = random.choice((HOSTILE, number(random))), number(random), random.choice((0, 1, 2))
    names = [PartName(subtask, after, attempt, token_of(proof), abs(number(random))) for _ in range(many(random))]
    entries = [[str(name), random.choice(([1, 2], 1, None, anything(random)))] for name in names]
    return ["headgate/prepared", "sink", "memory", proof, number(random), random.random() < 0.5, entries]


def new_parts(random: Random) -> Any:
    """Parts for checkpoints that never come."""
    first = random.randrange(10**9)
    names = [PartName(HOSTILE, -1, 0, token_of("proof"), first + number) for number in range(500)]
    return ["headgate/prepared", "sink", "memory", "proof", 2**62, True, [[str(name), [1, 2]] for name in names]]


def many_parts(random: Random) -> Any:
    name = str(PartName(HOSTILE, -1, 0, token_of("proof"), 1))
    return ["headgate/prepared", "sink", "memory", "proof", 5, True, [[name, [1, 2]]] * 30_000]


def a_backlog(random: Random) -> Any:
    return ["headgate/split-backlog", [[anything(random), number(random)] for _ in range(many(random))]]


def many_backlogs(random: Random) -> Any:
    return ["headgate/split-backlog", [[random.getrandbits(60), 1]] * 60_000]


def a_large_backlog(random: Random) -> Any:
    return ["headgate/split-backlog", [[random.randbytes(100_000), 1] for _ in range(40)]]


def a_range(random: Random) -> Any:
    low, high = (random.choice((None, "10", "20", word(random))) for _ in range(2))
    return ["headgate/postgres-range-read", low, high, random.choice(("1:1:", word(random)))]


def new_ranges(random: Random) -> Any:
    return ["headgate/postgres-range-read", str(random.getrandbits(60)), None, "x" * 20_000]


SPLIT_EVENTS: tuple[Callable[[Random], Any], ...] = (
    lambda random: ["headgate/split-request"],
    a_backlog,
    many_backlogs,
    a_large_backlog,
    lambda random: ["headgate/splits", [anything(random)]],
    lambda random: ["headgate/stream-batch", random.choice(("s", word(random))), number(random), number(random)],
    lambda random: ["headgate/stream-batch", "s", 0, 1],
)
COUNTS: tuple[Callable[[Random], Any], ...] = (some_counts, new_counts, new_cuts, new_buckets)
PERMIT_EVENTS: tuple[Callable[[Random], Any], ...] = (
    lambda random: ["more", number(random)],
    lambda random: ["give up", number(random)],
    lambda random: ["release", [number(random) for _ in range(many(random))]],
    lambda random: ["release", list(range(100_000))],
)

LARGE = frozenset((many_reports, new_buckets, many_parts, many_backlogs, a_large_backlog, new_parts))

# --- to whom ------------------------------------------------------------------------------------------------------


class _Postgres(PostgresSource):
    """Three ranges, and then changes, without a server."""

    def create_slot(self) -> None: ...

    def ranges(self) -> Iterator[list[Any]]:
        yield from (["range", None, "10"], ["range", "10", "20"], ["range", "20", None])


class _Kafka(KafkaSource):
    def splits(self, *, found_later: bool = False) -> list[SplitAt]:
        return [SplitAt(["topic", partition, 9 if self._bounded else None], 0) for partition in range(6)]


class _Redis(RedisStreamsSource):
    def splits(self) -> list[Any]:
        return [[key, "9-0" if self._bounded else None] for key in self._streams]


class _Files(FileSource):
    def splits(self) -> Iterator[list[Any]]:
        yield from ([f"/data/{name}", 0, 10] for name in "abc")

    @property
    def file_format(self) -> str:
        return "csv"


class _Main(OperatorCoordinator):
    """The coordinator beside a part."""

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None: ...

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return b""


class _Numbers(Source):
    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> SplitEnumerator:
        return StaticSplitEnumerator(range(20), state, batch_size=3)

    @property
    def operator(self) -> Callable[[], SplitReader]:
        return SplitReader


def postgres() -> Source:
    return _Postgres("host=nowhere", "table", "id", changes="slot")


def files() -> Source:
    return _Files("/data", discover_every_s=1.0)


def kafka(*, bounded: bool = False) -> Source:
    return _Kafka("nowhere:1", ["topic"], bounded=bounded)


def redis(*, bounded: bool = False) -> Source:
    return _Redis("redis://nowhere", ["a", "b", "c", "d"], pyarrow.schema([("x", pyarrow.int64())]), bounded=bounded)


def stream() -> OperatorCoordinator:
    planner = StreamPlanner("source", _Numbers(), lambda _: Any, 10)  # type: ignore[arg-type, return-value]  # it stores nothing here
    planner._first.state = _State("s", 0, ((b"\x01", b"\x02"), (b"\x03",)))
    return SourceCoordinator(lambda state: FormatEnumerator(_Numbers(), planner))


class _Sink(MemorySink):
    """A sink in memory, whose committer looks at what is listed as that of a real sink does."""

    def __init__(self, real: type[TwoPhaseCommitter], *, atomic: bool) -> None:
        super().__init__(Server(), "sink", atomic=atomic)
        self._real = real

    def committer(self, context: Any) -> MemoryCommitter:
        committer = super().committer(context)
        committer.check_payload = partial(self._real.check_payload, committer)  # type: ignore[method-assign]
        return committer


def source(name: str, make: Callable[[], Source], *events: Callable[[Random], Any], mode: Mode = "streaming") -> Part:
    return Part(name, lambda: SourceCoordinator(make().enumerator), (*SPLIT_EVENTS, *events), mode=mode)


def sink(name: str, real: type[TwoPhaseCommitter], *, atomic: bool = False) -> Part:
    def make() -> OperatorCoordinator:
        with patch.object(two_phase, "LISTED_BYTES_MAX", 400_000):
            return TwoPhaseSinkCoordinator(_Sink(real, atomic=atomic))

    return Part(f"sink-{name}", make, (a_prepared, new_parts, many_parts), mode="streaming")


PARTS = (
    *(
        Part(
            f"queue-{mode}",
            lambda: WorkQueue("part", range(20), in_hand=4, bytes_max=400_000),
            (a_report, new_items, new_priorities, many_reports),
            mode=mode,
        )
        for mode in MODES
    ),
    *(Part(f"counters-{mode}", _Main, COUNTS, mode=mode) for mode in MODES),
    Part(
        "group",
        lambda: Group("part", 2, join_wait_s=0.01, start_wait_s=0.01),
        (
            a_blob,
            lambda random: ["leave", number(random), word(random) * 100],
            lambda random: ["give up", number(random)],
        ),
        (
            a_join,
            a_call,
            lambda random: ["question", number(random)],
            lambda random: ["fetch", number(random), number(random)],
        ),
    ),
    Part(
        "cache",
        lambda: Cache("part", bytes_max=200_000, lease_s=2.0),
        (
            lambda random: ["end", number(random), random.random() < 0.5],
            lambda random: ["hits", random.choice((number(random), 0.5, nan, 2**63 - 1))],
        ),
        (
            lambda random: ["get", number(random), random.choice((b"", b"a", b"b", random.randbytes(100)))],
            lambda random: ["get", random.getrandbits(40), random.randbytes(20)],
            lambda random: ["put", number(random), random.choice((b"a", b"b", random.randbytes(9))), b"x" * 1000],
            lambda random: ["put", number(random), b"a" * random.choice((1, 40_000)), bytes(1_000_001)],
        ),
    ),
    Part(
        "permits",
        lambda: Permits("part", per_s=50.0, burst=3, concurrency=2),
        PERMIT_EVENTS,
        (
            lambda random: [
                *("acquire", number(random), random.random() < 0.5, random.choice((0, 0.5, nan, inf, 2**60))),
                random.choice((1, 2, 3, 4, number(random))),
            ],
        ),
    ),
    Part(
        "budget",
        lambda: Budget("part", 100.0),
        (
            lambda random: ["settle", number(random), random.choice((0, 1, number(random), 2**62))],
            lambda random: ["refund", number(random)],
        ),
        (
            lambda random: [
                *("reserve", number(random), random.choice((1, 10**9, number(random), 2**62))),
                random.choice((0, 0.5, nan, inf)),
            ],
        ),
    ),
    Part(
        "shared",
        lambda: SharedValue("part", {"a": list(range(20_000))}),
        (
            lambda random: ["applied", number(random)],
            lambda random: ["want", number(random), random.random() < 0.5],
        ),
    ),
    source("static", _Numbers, mode="batch"),
    source("files", files),
    source("kafka", kafka),
    source("kafka-bounded", partial(kafka, bounded=True)),
    source("redis", redis),
    source("redis-bounded", partial(redis, bounded=True)),
    source(
        "postgres", postgres, a_range, new_ranges, lambda random: ["headgate/postgres-changes-read", number(random)]
    ),
    source(
        "hybrid",
        lambda: HybridSource(_Numbers(), postgres()),
        lambda random: [number(random), a_range(random)],
        lambda random: [number(random), anything(random)],
    ),
    Part("stream", stream, SPLIT_EVENTS),
    sink("files", FileCommitter),
    sink("delta", DeltaCommitter, atomic=True),
    sink("iceberg", IcebergCommitter, atomic=True),
    sink("postgres-staged", StagedCommitter, atomic=True),
    sink("postgres-prepared", PreparedCommitter),
    sink("redis", RedisCommitter, atomic=True),
)


# --- what must hold -----------------------------------------------------------------------------------------------


class _Watched:
    """Calls of a coordinator's methods: what they raise, and how much work a step of them is."""

    def __init__(self) -> None:
        self.raised: list[BaseException] = []
        self.most = 0
        self._calls = 0

    async def call_user(self, method: str, call: Callable[..., Any], *args: Any) -> Any:
        """Stands for the function of this name."""
        try:
            return await _Counted(self, original_call_user(method, call, *args))
        except Exception as error:
            self.raised.append(error)
            raise

    def step(self, send: Callable[[Any], T], value: Any) -> T:
        self._calls = 0
        sys.setprofile(self._count)
        try:
            return send(value)
        finally:
            sys.setprofile(None)
            self.most = max(self.most, self._calls)

    def _count(self, frame: object, event: str, argument: object) -> None:
        self._calls += event in ("call", "c_call")


class _Counted:
    def __init__(self, watched: _Watched, coroutine: Any) -> None:
        self._watched = watched
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        send, value = self._coroutine.send, None
        while True:
            try:
                yielded = self._watched.step(send, value)
            except StopIteration as stop:
                return stop.value
            try:
                value, send = (yield yielded), self._coroutine.send
            except BaseException as error:
                value, send = error, self._coroutine.throw


original_call_user = user_calls.call_user


@contextmanager
def watching() -> Iterator[_Watched]:
    watched = _Watched()
    with patch.object(shell, "call_user", watched.call_user):
        yield watched


def is_said(error: BaseException) -> bool:
    """Whether the product itself raised it, with a text that it has written."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return True
    file = traceback.tb_frame.f_code.co_filename
    return file.startswith(PRODUCT) and getline(file, traceback.tb_lineno).lstrip().startswith("raise ")


def kept_bytes(root: object) -> int:
    """What an object keeps: itself and its containers, without what belongs to the actors and to the system."""
    seen: set[int] = set()
    waiting, total = [root], 0
    while waiting:
        one = waiting.pop()
        kind = type(one)
        module = kind.__module__
        if id(one) in seen or isinstance(one, type | ModuleType | BaseException) or callable(one):
            continue
        if not (module.startswith(PACKAGES) or module in OURS):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        waiting += gc.get_referents(one)
    return total


class _Play:
    """One world, with an honest task that is silent, and a hostile one."""

    def __init__(self, part: Part, name: str, random: Random, world: World, watched: _Watched) -> None:
        self._part = part
        self._name = name
        self._random = random
        self._world = world
        self._coordinator: Any = world._composed.parts.named(name).coordinator
        self._watched = watched
        self._told = 0
        self._hostile: Task
        self._honest: Task

    async def go(self) -> None:
        self._hostile, self._honest = await self._launched(HOSTILE), await self._launched(HONEST)
        with suppress(SinkDataLost):  # a checkpoint has a part that nobody has written, so the operator cannot go on
            for _ in range(self._random.choice((3, 30))):
                await self._act()
                await self._check()

    async def _act(self) -> None:
        random, world = self._random, self._world
        chance = random.random()
        if chance < 0.05:
            await world.advance(random.choice((0.1, 2.0)))
        elif chance < 0.15:
            world.begin_checkpoint()
            await world.settle()
        elif self._part.requests and chance < 0.5:
            make = random.choice(self._part.requests)
            self._say(self._hostile.request, [make(random) for _ in range(random.choice((1, 5)))])
        else:
            make = random.choice(self._part.events)
            if make in LARGE:
                make = random.choice(self._part.events)  # more seldom, because it takes long
            count = 1 if make in LARGE else random.choice((1, 5))
            self._say(self._hostile.send, [make(random) for _ in range(count)])
        await world.settle()

    def _say(self, send: Callable[[Any], Any], messages: Sequence[Any]) -> None:
        for message in messages:
            said = nearly(self._random, message) if self._random.random() < 0.3 else message
            with suppress(EventEncodeError, GatewayFull):
                send(PartEvent(self._name, said) if self._name else said)

    async def _check(self) -> None:
        world, watched = self._world, self._watched
        for error in watched.raised:
            if not is_said(error):
                raise AssertionError(f"{error!r:.300} names no reason") from error
            assert len(str(error)) < 20_000
        for failure in world.failures[self._told :]:
            assert failure in watched.raised, f"{failure!r:.300} is not what a method of the coordinator has raised"
        assert watched.most <= STEP_CALLS_MAX, f"a step has called {watched.most} functions"
        kept = kept_bytes(self._coordinator)
        assert kept <= KEPT_BYTES_MAX, f"{kept} bytes are kept"
        if self._honest.outcome:
            assert len(world.failures) > self._told or world.cancelled_jobs, "an honest task has ended"
        self._told = len(world.failures)
        watched.raised.clear()
        if self._hostile.outcome:
            self._hostile = await self._launched(HOSTILE)
        if self._honest.outcome:
            self._honest = await self._launched(HONEST)

    async def _launched(self, subtask: int) -> Task:
        """The next attempt. The first ones may be refused while the job before it ends."""
        for _ in range(10):
            task = await self._world.launch(subtask)
            if task.registered is not None and not task.outcome:
                return task
            await self._world.advance(1.0)
        if subtask == HOSTILE and self._world.failures and isinstance(self._world.failures[-1], SinkDataLost):
            raise self._world.failures[-1]
        raise AssertionError(f"no attempt of subtask {subtask} is accepted any more: {self._world.tasks[-1]._refusal}")


def quiet_main() -> OperatorCoordinator:
    """The coordinator of an operator beside its parts."""
    return _Main()


def name_of_part(part: Part) -> str:
    """The name in its events; empty for an operator's main coordinator."""
    if part.events is COUNTS:
        return COUNTERS
    return "part" if isinstance(part.make(), Primitive) else ""


async def play(part: Part, random: Random) -> None:
    made, name = part.make(), name_of_part(part)
    uses, main = ([made], quiet_main()) if isinstance(made, Primitive) else ([], made)
    with watching() as watched:
        async with running_operator(
            main, parallelism=PARALLELISM, uses=uses, mode=part.mode, attempts_max=10**6, seed=random.randrange(1000)
        ) as world:
            await _Play(part, name, random, world, watched).go()


TARGETS = tuple(
    Target(
        f"part-{part.name}",
        f"a hostile task at the coordinator of {part.name}",
        lambda random, part=part: asyncio.run(play(part, random)),  # type: ignore[misc]
    )
    for part in PARTS
)

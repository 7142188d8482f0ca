# SPDX-License-Identifier: Apache-2.0

"""Events between a coordinator and a task of a real Spark job, compared with bare frames between the same processes.

``event_confirm``: ``send_event`` until its confirmation, which comes once the event is in the operator's mailbox.
``event_echo``: ``send_event`` until the event with which the operator's ``handle_event`` answers has reached
``handle_event_from_operator``. Both have one event in flight; their baseline is a frame there and a frame back.
``event_confirm_busy``: as the first, while the task computes pure Python. ``event_pipelined``: time for one confirmed
event if many are in flight; the baseline joins its frames into as few writes. ``event_flood_up``: time for one event
of many that a task sends in a row, each in a separate write, as far as the window allows.

Each of the first two has two floors, which take turns with it: a bare socket whose thread sleeps in its read, and one
whose thread stays awake for as long as a task of Headgate does before it sleeps.

``event_confirm_tls`` and ``event_flood_up_tls`` compare the first and the last with themselves: encrypted connections
with plain ones, of two tasks that run beside each other.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.harness import Figure, Progress, Rounds, interleave_async, interleave_floors_async, percentile
from benchmarks.raw_frames import ECHO, EVENT, FLOOD
from benchmarks.spark_pair import MASTER, Pair, running_pair
from benchmarks.spark_session import spark_session
from benchmarks.task_side import ALONE
from spark_bridge.driver.config import SidecarConfig

PAYLOAD_BYTES = 100
PAYLOAD = b"." * PAYLOAD_BYTES
IN_FLIGHT = (64, 1024)
NAIVE_INTERVAL_S = 0.005
"""CPython's own switch interval. While Headgate is attached to a task, it is shorter."""
PAUSE_S = (0.0005, 0.003)
PARAMS = {"payload_bytes": PAYLOAD_BYTES, "master": MASTER, "cores": "driver and task on one each"}
BARE = "asyncio.Protocol on the driver's loop, msgpack frames, a blocking socket in a thread of the same task"
BARE_AWAKE = f"{BARE}, which polls for as long as Headgate's task does before it sleeps"


def measured(measure: Callable[[SparkSession], Coroutine[None, None, list[Figure]]]) -> list[Figure]:
    with spark_session(MASTER) as spark:
        return asyncio.run(measure(spark))


async def one_at_a_time(count: int, once: Callable[[], Awaitable[object]]) -> list[float]:
    """Microseconds of each of ``count`` calls, one after the other."""
    samples = []
    for _ in range(count):
        began = time.perf_counter()
        await once()
        samples.append((time.perf_counter() - began) * 1e6)
    return samples


def _alone(name: str, kind: int, answer: str, quick: bool, progress: Progress) -> list[Figure]:
    """One event at a time. ``kind``: what the other end does with it; ``answer``: the baseline's answer, in words.

    Beside both bare sockets, in turn: one whose thread sleeps immediately, and one that stays awake.
    """
    rounds, count = (2, 100) if quick else (12, 1000)

    async def measure(spark: SparkSession) -> list[Figure]:
        async with running_pair(spark) as pair:
            once = pair.echo if kind == ECHO else pair.confirm
            samples, floors = await interleave_floors_async(
                rounds,
                [
                    lambda: one_at_a_time(count, lambda: pair.raw.send(kind, PAYLOAD)),
                    lambda: one_at_a_time(count, lambda: pair.other.send(kind, PAYLOAD)),
                ],
                lambda: one_at_a_time(count, lambda: once(kind, PAYLOAD)),
                progress,
            )
        params = {**PARAMS, "in_flight": 1, "events": count, "rounds": rounds}
        return [
            Figure(name, "µs", samples, floor, {**params, "case": {"floor": which}, "baseline": f"{answer}: {bare}"})
            for which, floor, bare in zip(("asleep", "awake"), floors, (BARE, BARE_AWAKE), strict=True)
        ]

    return measured(measure)


def event_confirm(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds from ``send_event`` to the confirmation, one at a time, compared with a frame and its answer."""
    return _alone("event_confirm", EVENT, "a small answer", quick, progress)


def event_echo(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds from ``send_event`` until the operator's answer is in the coordinator's method.

    The baseline is a frame there and one of the same size back.
    """
    return _alone("event_echo", ECHO, "the frame sent back", quick, progress)


async def _now_and_then(count: int, once: Callable[[], Awaitable[object]]) -> list[float]:
    """Microseconds of each of ``count`` calls, with a pause before each.

    Without the pause, a reader thread would keep the interpreter's lock, and the task would compute nothing.
    """
    samples = []
    for _ in range(count):
        await asyncio.sleep(random.uniform(*PAUSE_S))
        samples += await one_at_a_time(1, once)
    return samples


def event_confirm_busy(quick: bool, progress: Progress) -> list[Figure]:
    """As ``event_confirm``, while the task's own thread computes and checks its mailbox between records.

    The baseline is a bare socket that the same task polls between the same records. ``details`` has the times of a
    reader thread with CPython's own switch interval, while that task checks nothing; they are measured after the
    rest.
    """
    rounds, count, naive_count = (2, 20, 20) if quick else (8, 400, 1000)

    async def measure(spark: SparkSession) -> list[Figure]:
        async with running_pair(spark, busy=True) as pair:
            samples, baseline = await interleave_async(
                rounds,
                lambda: _now_and_then(count, lambda: pair.raw.send(EVENT, PAYLOAD)),
                lambda: _now_and_then(count, lambda: pair.confirm(EVENT, PAYLOAD)),
                progress,
            )
            naive = await _naive_reader(pair, naive_count)
        params = {**PARAMS, "in_flight": 1, "events": count, "rounds": rounds, "pause_s": PAUSE_S}
        polled = "asyncio.Protocol on the driver's loop, msgpack frames, a socket that the same busy task polls"
        details = {"naive_reader_thread": {"switch_interval_s": NAIVE_INTERVAL_S, "unit": "µs", **naive}}
        return [Figure("event_confirm_busy", "µs", samples, baseline, {**params, "baseline": polled}, details)]

    return measured(measure)


async def _naive_reader(pair: Pair, count: int) -> dict[str, float]:
    threaded = pair.other
    await pair.echo(ALONE, NAIVE_INTERVAL_S)
    samples = await _now_and_then(count, lambda: threaded.send(EVENT, PAYLOAD))
    threaded.close()
    return {"p50": percentile(samples, 0.5), "p99": percentile(samples, 0.99), "samples": len(samples)}


async def windows(send: Callable[[], Awaitable[Any]], in_flight: int, events: int, batches: int) -> list[float]:
    """Microseconds for one event, averaged over each batch; ``in_flight`` are unanswered at any time."""
    samples = []
    for _ in range(batches):
        began = time.perf_counter()
        window = [await send() for _ in range(in_flight)]
        for number in range(in_flight, events):
            place = number % in_flight
            await window[place]
            window[place] = await send()
        for answer in window:
            await answer
        samples.append((time.perf_counter() - began) / events * 1e6)
    return samples


async def _pipelined(pair: Pair, in_flight: int, quick: bool, progress: Progress) -> Figure:
    rounds, batches, events = (2, 1, 4 * in_flight) if quick else (8, 3, max(4096, 8 * in_flight))

    async def raw() -> Any:
        return pair.raw.send_joined(EVENT, PAYLOAD)

    async def subject() -> Any:
        return await pair.gateway.send_event([EVENT, 0, PAYLOAD])

    samples, baseline = await interleave_async(
        rounds,
        lambda: windows(raw, in_flight, events, batches),
        lambda: windows(subject, in_flight, events, batches),
        lambda text: progress(f"{in_flight} in flight, {text}"),
    )
    params = {**PARAMS, "case": {"in_flight": in_flight}, "events": events, "rounds": rounds}
    return Figure("event_pipelined", "µs", samples, baseline, {**params, "baseline": f"joined writes: {BARE}"})


def event_pipelined(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds for one confirmed event with many in flight: the inverse of the throughput of one gateway.

    The figures are averages over a batch. The baseline has as many frames in flight, and writes all frames of one
    turn of the loop together.
    """

    async def measure(spark: SparkSession) -> list[Figure]:
        async with running_pair(spark) as pair:
            return [await _pipelined(pair, in_flight, quick, progress) for in_flight in IN_FLIGHT]

    return measured(measure)


async def _floods(send: Callable[[], Awaitable[object]], events: int, batches: int) -> list[float]:
    samples = []
    for _ in range(batches):
        began = time.perf_counter()
        await send()
        samples.append((time.perf_counter() - began) / events * 1e6)
    return samples


async def _flood(pair: Pair, events: int) -> None:
    last = pair.awaited(0)
    await pair.gateway.send_event([FLOOD, 0, PAYLOAD, events])
    await last


def event_flood_up(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds for one event from the task to the coordinator's method, many in a row, each in a separate write.

    The figures are averages over a batch. The baseline sends as many bare frames, also each in a separate write.
    """
    rounds, events, batches = (2, 256, 1) if quick else (8, 4096, 2)

    async def measure(spark: SparkSession) -> list[Figure]:
        async with running_pair(spark) as pair:
            samples, baseline = await interleave_async(
                rounds,
                lambda: _floods(lambda: pair.raw.send_flood(events, PAYLOAD), events, batches),
                lambda: _floods(lambda: _flood(pair, events), events, batches),
                progress,
            )
        params = {**PARAMS, "events": events, "rounds": rounds, "baseline": f"a write for each frame: {BARE}"}
        return [Figure("event_flood_up", "µs", samples, baseline, params)]

    return measured(measure)


async def _with_and_without_tls(
    spark: SparkSession, rounds: int, measure: Callable[[Pair], Awaitable[list[float]]], progress: Progress
) -> tuple[Rounds, Rounds]:
    """The samples with TLS and without, of two tasks beside each other.

    Each is the first to start in half of the rounds: the second one is always slower, by a third.
    """
    encrypted_rounds: list[Sequence[float]] = []
    plain_rounds: list[Sequence[float]] = []
    for encrypted_first in (False, True):
        async with (
            running_pair(spark, config=SidecarConfig(tls=encrypted_first)) as first,
            running_pair(spark, config=SidecarConfig(tls=not encrypted_first)) as second,
        ):
            encrypted, plain = (first, second) if encrypted_first else (second, first)
            subject, baseline = await interleave_async(
                max(1, rounds // 2), partial(measure, plain), partial(measure, encrypted), progress
            )
        encrypted_rounds += subject
        plain_rounds += baseline
    return encrypted_rounds, plain_rounds


def event_confirm_tls(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds from ``send_event`` to the confirmation over TLS, one at a time, compared with no TLS."""
    rounds, count = (2, 100) if quick else (10, 1000)

    async def measure(spark: SparkSession) -> list[Figure]:
        samples, baseline = await _with_and_without_tls(
            spark, rounds, lambda pair: one_at_a_time(count, lambda: pair.confirm(EVENT, PAYLOAD)), progress
        )
        params = {**PARAMS, "in_flight": 1, "events": count, "rounds": rounds, "baseline": "event_confirm without TLS"}
        return [Figure("event_confirm_tls", "µs", samples, baseline, params)]

    return measured(measure)


def event_flood_up_tls(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds for one event of many from the task to the coordinator's method over TLS, compared with no TLS.

    The figures are averages over a batch.
    """
    rounds, events, batches = (2, 256, 1) if quick else (8, 4096, 2)

    async def measure(spark: SparkSession) -> list[Figure]:
        samples, baseline = await _with_and_without_tls(
            spark, rounds, lambda pair: _floods(lambda: _flood(pair, events), events, batches), progress
        )
        params = {**PARAMS, "events": events, "rounds": rounds, "baseline": "event_flood_up without TLS"}
        return [Figure("event_flood_up_tls", "µs", samples, baseline, params)]

    return measured(measure)

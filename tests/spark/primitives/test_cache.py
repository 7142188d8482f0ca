# SPDX-License-Identifier: Apache-2.0

"""A cache on a real Spark: coroutines, killed workers, a killed driver, and figures (H183)."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headgate import Cache, Sidecar, SidecarConfig, SubtaskContext
from headgate.errors import SidecarError
from tests.spark.faults.waiting import wait_until
from tests.spark.operators import kill_once
from tests.spark.program import Program

pytestmark = pytest.mark.spark

KEYS = 900


def note(file: Path, line: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def noted(file: Path) -> list[list[str]]:
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def asking(cache: Cache, calls: Path, fatal: int, killed: Path) -> Any:
    """Each task wants all keys three times, 50 coroutines at a time. One worker is killed in the middle."""

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        async def make(key: int) -> int:
            note(calls, f"{key} began")
            await asyncio.sleep(0.002)
            if key == fatal:
                kill_once(killed)
            return key + 1

        async def want(key: int, places: asyncio.Semaphore) -> int:
            async with places:
                value: int = await cache.get_async(key, partial(make, key))
                note(calls, f"{key} returned")
                return value

        async def main() -> int:
            places = asyncio.Semaphore(50)
            first = context.subtask * KEYS // 2  # the tasks begin elsewhere, and meet
            keys = [(first + number) % KEYS for number in range(KEYS)] * 3
            return sum(await asyncio.gather(*(want(key, places) for key in keys)))

        yield asyncio.run(main())

    return work


def test_each_key_is_asked_for_once_though_a_worker_is_killed(spark: SparkSession, tmp_path: Path) -> None:
    calls, killed = tmp_path / "calls", tmp_path / "killed"
    with Sidecar(spark) as sidecar:
        cache = sidecar.cache("geocode")
        job = sidecar.coordinate("ask", parallelism=2, uses=[cache])
        fatal = KEYS // 2 + 120
        sums = job.run(job.subtask(asking(cache, calls, fatal, killed)))
        figures = sidecar.status().operators["ask"].parts["geocode"]
    assert sums == [3 * sum(range(1, KEYS + 1))] * 2
    assert killed.exists()
    began: Counter[str] = Counter()
    returned: set[str] = set()
    for key, what in noted(calls):
        if what == "returned":
            returned.add(key)
        else:
            assert key not in returned, f"{key} was paid for, and is computed again"
            began[key] += 1
    assert len(began) == KEYS
    twice = [key for key, count in began.items() if count > 1]
    assert str(fatal) in twice
    assert len(twice) <= 50, "at most what the killed worker had in flight"
    assert sum(began.values()) == KEYS + len(twice)
    # The killed worker may have been told to compute keys that it had not begun.
    assert sum(began.values()) <= figures["computed_total"] <= sum(began.values()) + 50
    assert (figures["entries"], figures["computing"], figures["waiting"]) == (KEYS, 0, 0)
    assert figures["hit_share"] > 0.5


def test_two_sessions_of_one_program_share_what_is_durable(spark: SparkSession, tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def ask(cache: Cache) -> Any:
        def make(key: Any) -> Any:
            note(calls, "call")
            return {"of": key}

        def work(records: Iterator[Any]) -> Iterator[Any]:
            for key in (("Long Lane", 1), ("Long Lane", 2)):
                yield cache.get(key, partial(make, key))

        return work

    with Sidecar(spark, SidecarConfig(storage=str(tmp_path / "storage"))) as sidecar:
        cache = sidecar.cache("geocode", durable=True)
        job = sidecar.coordinate("ask", parallelism=2, uses=[cache])
        first = job.run(job.subtask(ask(cache)))
        again = sidecar.cache("geocode", durable=True)
        with pytest.raises(SidecarError, match="another durable part of this kind and name is in use"):
            sidecar.coordinate("other", parallelism=1, uses=[again])
        sidecar.release("ask")
        job = sidecar.coordinate("other", parallelism=1, uses=[again])
        assert job.run(job.subtask(ask(again))) == first[:2]
    with Sidecar(spark, SidecarConfig(storage=str(tmp_path / "storage"))) as sidecar:
        cache = sidecar.cache("geocode", durable=True)
        job = sidecar.coordinate("ask", parallelism=2, uses=[cache])
        assert job.run(job.subtask(ask(cache))) == first
        assert cache.figures()["entries"] == 2
    assert len(noted(calls)) == 2


def test_without_a_storage_nothing_is_durable(spark: SparkSession) -> None:
    with Sidecar(spark) as sidecar:
        with pytest.raises(SidecarError, match=r"'geocode' cannot be durable.* set SidecarConfig\(storage=\.\.\.\)"):
            sidecar.cache("geocode", durable=True)


def test_what_was_paid_for_survives_a_killed_driver(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    arguments = ("-m", "tests.spark.primitives.cache_program", str(tmp_path / "storage"), str(calls))
    with Program(*arguments) as program:
        wait_until(lambda: len(noted(calls)) >= 15, "some keys are computed")
        program.process.kill()
        program.process.wait()
    with Program(*arguments) as program:
        program.ends_with(0)
    assert f"sum {2 * sum(number * number for number in range(40))}\n" in program.said
    counts = Counter(key for (key,) in noted(calls))
    assert len(counts) == 40
    twice = [key for key, count in counts.items() if count > 1]
    assert len(twice) <= 2, "what the two tasks had in flight"

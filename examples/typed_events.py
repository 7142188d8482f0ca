# SPDX-License-Identifier: Apache-2.0

"""The coordinator sends limits, with an array and a date; the tasks report what exceeds them. Both are dataclasses.

The classes are defined in the program itself, so they travel to the tasks with the operator. It needs
``headgate[pyspark,dataframe]``, for NumPy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

import headgate
from headgate import OperatorCoordinator, Request, Sidecar, SubtaskContext, SubtaskGateway, SubtaskOperator

SUBTASKS = 2
READINGS = 1000


@headgate.event
@dataclass(frozen=True)
class Limits:
    """To the tasks: the highest reading of each sensor."""

    valid_from: datetime
    highest: Any  # a NumPy array


@headgate.event("alarm")
@dataclass(frozen=True)
class Alarm:
    """From a task: the sensors that exceeded their limits."""

    sensors: frozenset[int]
    seen_by: int = 0


@headgate.event
@dataclass(frozen=True)
class OffsetOf(Request[float]):
    """From a task: how much too high are the readings of a sensor? The answer is a float."""

    sensor: int


class Watch(OperatorCoordinator[Alarm, Limits]):
    """In the driver: sends the limits, and collects the alarms."""

    def __init__(self, alarms: Counter[int]) -> None:
        self._alarms = alarms

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway[Limits]) -> None:
        await gateway.send_event(Limits(datetime.now(UTC), np.array([90.0, 95.0, 200.0])))

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Alarm) -> None:
        self._alarms.update(event.sensors)

    async def handle_request(self, subtask: int, attempt: int, request: OffsetOf) -> float:
        return 0.5 if request.sensor == 0 else 0.0


class Compare(SubtaskOperator[Limits, Alarm]):
    """In the tasks: compares its readings with the limits."""

    def open(self, context: SubtaskContext[Alarm], state: bytes | None) -> None:
        self.context = context

    def handle_event(self, event: Limits) -> None:
        self.limits = event

    def process(self, records: Iterator[tuple[int, float]]) -> None:
        offsets = [self.context.request(OffsetOf(sensor)) for sensor in range(3)]
        high = frozenset(
            sensor for sensor, reading in records if reading - offsets[sensor] > self.limits.highest[sensor]
        )
        self.context.send_event(Alarm(high, seen_by=self.context.subtask))


alarms: Counter[int] = Counter()
spark = SparkSession.builder.master(f"local[{SUBTASKS}]").getOrCreate()
with Sidecar(spark) as sidecar:
    watch = sidecar.coordinate("watch", lambda: Watch(alarms), parallelism=SUBTASKS)
    watch.run(Compare, [(number % 3, number % 100) for number in range(READINGS)])
spark.stop()
print("sensors above their limits:", *sorted(alarms))

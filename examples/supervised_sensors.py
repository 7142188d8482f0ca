# SPDX-License-Identifier: Apache-2.0

"""Supervision without Spark: a reader that fails is restarted with growing pauses, and in the end replaced.

A ``Station`` has one ``Reader`` at a time, as its child, and watches it. The reader's policy decides what happens
after a failure: a reading that is not a number is skipped; after a broken connection the reader restarts, and waits
longer each time; after the third restart it stops. Then the station gets ``Terminated`` and continues with the next
sensor. It needs ``headgate`` alone.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from headgate.actors import (
    Actor,
    ActorContext,
    ActorRef,
    ActorSystem,
    Decision,
    Directive,
    Hook,
    Signal,
    Supervision,
    Terminated,
)

PERIOD_S = 0.05

POLICY = Supervision(
    on_failure=Directive.RESTART,
    rules=((ValueError, Directive.RESUME),),
    max_restarts=3,
    within_s=60.0,
    backoff_s=0.1,
    when_exhausted=Directive.STOP,
)


@dataclass
class Sensor:
    """A device that answers with ``readings``, one after another, and then breaks, unless it is reliable."""

    name: str
    readings: list[str] = field(default_factory=list)
    reliable: bool = False

    def read(self) -> str:
        if self.reliable:
            return "17.0"
        if not self.readings:
            raise ConnectionError(f"{self.name} does not answer")
        return self.readings.pop(0)


@dataclass(frozen=True)
class Reading:
    sensor: str
    value: float


class Reader(Actor[str]):
    """Reads one sensor repeatedly, and tells the station."""

    def __init__(self, sensor: Sensor, station: ActorRef[Reading]) -> None:
        self.sensor = sensor
        self.station = station

    async def started(self, context: ActorContext[str]) -> None:
        context.timers.start("period", "read", delay_s=0.0, every_s=PERIOD_S)

    async def receive(self, context: ActorContext[str], message: str) -> None:
        value = float(self.sensor.read())
        self.station.tell(Reading(self.sensor.name, value))


class Station(Actor[Reading]):
    """Collects readings, from the first sensor that works."""

    def __init__(self, sensors: Sequence[Sensor], wanted: int, enough: asyncio.Event) -> None:
        self.sensors = list(sensors)
        self.wanted = wanted
        self.enough = enough

    async def started(self, context: ActorContext[Reading]) -> None:
        self.use_next_sensor(context)

    async def receive(self, context: ActorContext[Reading], message: Reading) -> None:
        print(f"  {message.sensor}: {message.value}")
        self.wanted -= 1
        if self.wanted == 0:
            self.enough.set()

    async def signal(self, context: ActorContext[Reading], signal: Signal) -> None:
        match signal:
            case Terminated(reader, cause) if cause is not None:
                print(f"  the station lost {reader.name}: {cause}")
                self.use_next_sensor(context)

    def use_next_sensor(self, context: ActorContext[Reading]) -> None:
        if not self.sensors:
            raise LookupError("no sensor is left")
        sensor = self.sensors.pop(0)
        reader = context.spawn(lambda: Reader(sensor, context.self_ref), name=sensor.name, supervision=POLICY)
        context.watch(reader)


class Report(Hook):
    """Prints each decision of a supervisor, with the time at which it was taken."""

    def __init__(self) -> None:
        self.began_at = time.monotonic()

    def actor_failed(self, ref: ActorRef[object], cause: BaseException, decision: Decision) -> None:
        at_s = time.monotonic() - self.began_at
        wait = f" after {decision.delay_s:.1f} s" if decision.directive is Directive.RESTART else ""
        print(f"{at_s:5.2f} s  {ref.name} failed ({cause!r}): {decision.directive.value}{wait}")


async def run(readings: int) -> None:
    sensors = [Sensor("primary", ["17.2", "n/a", "17.3"]), Sensor("backup", reliable=True)]
    enough = asyncio.Event()
    async with ActorSystem("weather", hooks=[Report()]) as system:
        system.spawn(lambda: Station(sensors, readings, enough), name="station")
        await enough.wait()
    print(f"{readings} readings, and every actor has stopped")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Read a sensor that breaks; restart its reader, then replace it.")
    parser.add_argument("--readings", type=int, default=5, help="how many readings to wait for (default: %(default)s)")
    options = parser.parse_args(arguments)
    # The runtime logs each failure with its traceback; here the hook reports it in one line.
    logging.getLogger("headgate").setLevel(logging.ERROR)
    asyncio.run(run(max(1, options.readings)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

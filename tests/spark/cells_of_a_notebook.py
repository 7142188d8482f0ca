# SPDX-License-Identifier: Apache-2.0

"""A notebook without Jupyter: its cells are run one after the other in ``__main__``, and have no file.

``test_event_classes.py`` runs this and reads what it prints.
"""

from __future__ import annotations

CELLS = """
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Any
import numpy as np
import headgate
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").config("spark.log.level", "OFF").getOrCreate()
--------
@headgate.event
class Kind(Enum):
    FIRST = 1
    SECOND = 2

@headgate.event
@dataclass(frozen=True)
class Rules:
    day: date
    limits: np.ndarray
    kind: Kind

    def allows(self, number):
        return number < self.limits.sum()

@headgate.event("found")
@dataclass(frozen=True)
class Found:
    numbers: frozenset
--------
@headgate.event
@dataclass
class Unsendable:
    n: int

    def context(self):
        return spark
--------
class Sender(headgate.OperatorCoordinator):
    async def subtask_ready(self, subtask, gateway):
        await gateway.send_event(make_rules())

    async def handle_event_from_operator(self, subtask, attempt, event):
        assert type(event) is Found, event
        found[subtask] = event.numbers

    async def handle_request(self, subtask, attempt, request):
        return Unsendable(1)

class Apply(headgate.SubtaskOperator):
    '''Names no class of an event but the one that it sends.'''

    def open(self, context, state):
        self.context = context

    def handle_event(self, event):
        self.rules = event

    def process(self, records):
        self.context.send_event(Found(frozenset(n for n in records if self.rules.allows(n))))
        try:
            self.context.request("unsendable")
        except Exception as error:
            yield f"{self.rules.kind.name} {type(self.rules).__name__} {error}"

found = {}
def make_rules():
    return Rules(date(2026, 1, 1), np.arange(4), Kind.FIRST)

def run(name):
    with headgate.Sidecar(spark) as sidecar:
        handle = sidecar.coordinate(name, Sender, parallelism=1)
        texts = spark.sparkContext.parallelize(range(10), 1).mapPartitions(handle.subtask(Apply)).collect()
    print(sorted(found[0]), texts[0])
--------
run("first")
--------
@headgate.event
@dataclass(frozen=True)
class Rules:
    day: date
    limits: np.ndarray
    kind: Kind
    also: int = 0

    def allows(self, number):
        return number == self.also

def make_rules():
    return Rules(date(2026, 1, 1), np.arange(4), Kind.SECOND, 7)
--------
run("second")
spark.stop()
"""

if __name__ == "__main__":
    for number, cell in enumerate(CELLS.split("--------")):
        exec(compile(cell, f"<cell {number}>", "exec"), globals())

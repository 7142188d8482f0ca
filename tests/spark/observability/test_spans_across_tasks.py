# SPDX-License-Identifier: Apache-2.0

"""Spans of the driver and of tasks, in other processes, belong to one trace, also if a connection breaks between."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pyspark.sql import SparkSession

from headgate import CoordinatorContext, OperatorCoordinator, Sidecar, SubtaskContext, SubtaskOperator
from tests.spark.actions import Action, one_task_each
from tests.spark.faults.network import WAIT_S, Line

pytestmark = pytest.mark.spark

TRACER = trace.get_tracer("tests")


def in_one_line(span: ReadableSpan) -> str:
    return json.dumps(json.loads(span.to_json(indent=None))) + "\n"


class Clerk(SubtaskOperator):
    """In the task: asks in a span, makes one for each event, and sends that back inside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.handled: list[str] = []

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.file = (self.folder / f"{context.task_attempt_id}.jsonl").open("w")
        exporter = ConsoleSpanExporter(out=self.file, formatter=in_one_line)
        provider = TracerProvider()  # its own: the process of the worker may have had another task
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        self.tracer = provider.get_tracer("task")

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        with self.tracer.start_as_current_span("task asks"):
            yield self.context.request("question")
        while "last" not in self.handled:
            self.context.wait_for_event()
        yield from self.handled

    def handle_event(self, event: str) -> None:
        with self.tracer.start_as_current_span(f"task handles {event}"):
            self.context.send_event(event)
        self.handled.append(event)

    def close(self) -> None:
        self.file.close()


class Desk(OperatorCoordinator):
    """On the driver: a span in each method, and what it sends leaves inside."""

    def __init__(self) -> None:
        self.heard_first = threading.Event()

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context

    async def handle_request(self, subtask: int, attempt: int, request: str) -> str:
        with TRACER.start_as_current_span("coordinator answers"):
            await self.context.gateways.send(subtask, "first")
            return "answer"

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: str) -> None:
        TRACER.start_span(f"coordinator handles {event}").end()
        self.heard_first.set()

    async def handle_client_request(self, request: str) -> None:
        with TRACER.start_as_current_span(f"coordinator sends {request}"):
            self.context.gateways.broadcast_nowait(request)


def spans_of(exporter: InMemorySpanExporter, folder: Path) -> dict[str, dict[str, Any]]:
    """All spans of the driver and of the tasks, by name, in the form of OpenTelemetry's JSON."""
    lines = [line for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]
    driver = [json.loads(span.to_json()) for span in exporter.get_finished_spans()]
    return {span["name"]: span for span in (*driver, *map(json.loads, lines))}


def test_spans_on_both_sides_are_children_of_each_other_over_a_reconnect_too(
    spark: SparkSession, exporter: InMemorySpanExporter, tmp_path: Path
) -> None:  # H179, H24
    desk = Desk()
    with Line() as line, Sidecar(spark, line.config()) as sidecar:
        handle = sidecar.coordinate("spans", desk, parallelism=1)
        action = Action(one_task_each(spark, 1).mapPartitions(handle.subtask(Clerk, tmp_path)).collect)
        assert desk.heard_first.wait(WAIT_S)
        line.cut()
        with TRACER.start_as_current_span("program"):
            sidecar.request("spans", "on the way")
        line.break_off()  # what was on the way is lost, and is sent again
        with TRACER.start_as_current_span("program, later"):
            sidecar.request("spans", "last")
        line.heal()
        assert action.result() == ["answer", "first", "on the way", "last"]
    spans = spans_of(exporter, tmp_path)
    for chain in (
        ["task asks", "coordinator answers", "task handles first", "coordinator handles first"],
        ["program", "coordinator sends on the way", "task handles on the way", "coordinator handles on the way"],
        ["program, later", "coordinator sends last", "task handles last", "coordinator handles last"],
    ):
        first, *others = (spans[name] for name in chain)
        assert first["parent_id"] is None
        assert {span["context"]["trace_id"] for span in others} == {first["context"]["trace_id"]}
        parents = [span["context"]["span_id"] for span in (first, *others[:-1])]
        assert [span["parent_id"] for span in others] == parents

# SPDX-License-Identifier: Apache-2.0

"""The span in which something was sent is the parent of what its handler does, on both sides (H179)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext, get_current_span

from headgate import CoordinatorContext, OperatorCoordinator, Reply, SubtaskContext, SubtaskGateway, SubtaskOperator
from headgate.testing import Answer, RecordingCoordinator, running_operator
from protocol.subtask.types import EventSubmitted, RequestSubmitted
from protocol.wire.codec import encode_event
from protocol.wire.traces import TRACED_START

EXPORTER = InMemorySpanExporter()
PROVIDER = TracerProvider()
PROVIDER.add_span_processor(SimpleSpanProcessor(EXPORTER))
TRACER = PROVIDER.get_tracer("tests")


@pytest.fixture(autouse=True)
def _no_spans_of_other_tests() -> None:
    EXPORTER.clear()


def span_named(name: str) -> ReadableSpan:
    (found,) = (span for span in EXPORTER.get_finished_spans() if span.name == name)
    return found


def is_child(name: str, of: str) -> bool:
    child, parent = span_named(name), span_named(of).get_span_context()
    assert parent is not None
    return child.parent is not None and (child.parent.trace_id, child.parent.span_id) == (
        parent.trace_id,
        parent.span_id,
    )


class Desk(OperatorCoordinator):
    """Makes a span in each method, and sends inside it."""

    def __init__(self) -> None:
        self.gateways: dict[int, SubtaskGateway[Any]] = {}
        self.reply: Reply = Reply()

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway[Any]) -> None:
        self.gateways[subtask] = gateway

    async def handle_request(self, subtask: int, attempt: int, request: str) -> Any:
        with TRACER.start_as_current_span(f"coordinator: {request}"):
            if request == "defer":
                return self.reply
            await self.gateways[subtask].send_event(f"after {request}")
            return request

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: str) -> None:
        with TRACER.start_as_current_span(f"coordinator: {event}"):
            if event == "raise":
                raise ValueError("raised on purpose")

    async def handle_client_request(self, request: str) -> None:
        with TRACER.start_as_current_span(f"coordinator: {request}"):
            if request == "urgent":
                self.gateways[0].send_event_nowait(request, urgent=True)
            else:
                await self.context.gateways.broadcast(request)


class Clerk(SubtaskOperator):
    """Sends what its records say, each in a span, and makes a span for what it handles."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[str]) -> Iterator[str]:
        for record in records:
            with TRACER.start_as_current_span(f"task: {record}"):
                if record.startswith("ask"):
                    self.context.request(record)
                else:
                    self.context.send_event(record)
            yield record

    def handle_event(self, event: str) -> None:
        TRACER.start_span(f"task: {event}").end()

    def handle_urgent(self, event: str) -> None:
        self.handle_event(event)


async def test_a_request_and_an_event_of_a_task_are_handled_below_its_span_and_answers_below_those() -> None:  # H179
    async with running_operator(Desk, parallelism=1) as world:
        task = await world.launch_operator(0, Clerk, ["ask", "tell"])
        await world.settle()
        assert task.outputs == ["ask", "tell"]
    assert is_child("coordinator: ask", of="task: ask")
    assert is_child("coordinator: tell", of="task: tell")
    assert is_child("task: after ask", of="coordinator: ask")
    assert get_current_span().get_span_context() == INVALID_SPAN_CONTEXT  # each is the current one in its handler only


@pytest.mark.parametrize("request_", ["broadcast", "urgent"])
async def test_a_request_of_the_program_goes_on_to_the_tasks(request_: str) -> None:  # H179
    async with running_operator(Desk, parallelism=1) as world:
        await world.launch_operator(0, Clerk)
        with TRACER.start_as_current_span("program"):
            await world.request(request_)
        await world.settle()
    assert is_child(f"coordinator: {request_}", of="program")
    assert is_child(f"task: {request_}", of=f"coordinator: {request_}")


class Witness(RecordingCoordinator):
    """Notes which span is current in its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[SpanContext] = []

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.spans.append(get_current_span().get_span_context())

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        self.spans.append(get_current_span().get_span_context())


async def test_what_is_sent_again_after_a_reconnect_carries_the_same_span() -> None:  # H24, H179
    witness = Witness()
    async with running_operator(witness, parallelism=1) as world:
        task = await world.launch(0)
        await world.break_connection(task)
        with TRACER.start_as_current_span("sent") as sent:
            task.send("while there is no connection")
        assert witness.spans == []
        await world.restore_connection(task)
        task.send("outside of the span")
        await world.settle()
    assert [span.span_id for span in witness.spans] == [sent.get_span_context().span_id, 0]


async def test_what_a_restored_checkpoint_holds_carries_the_same_span() -> None:  # H31, H179
    witness = Witness()
    async with running_operator(witness, parallelism=1, mode="streaming") as world:
        task = await world.launch(0)
        task.busy = True
        world.begin_checkpoint()
        await world.settle()
        with TRACER.start_as_current_span("held") as held:
            task.send("behind the valve")
        await world.settle()
        assert witness.spans == []
        task.busy = False
        await world.settle()
        (checkpoint,) = world.checkpoints
        assert len(checkpoint.subtask_states[0].held) == 1
        witness.spans.clear()
        await world.kill(task)
        await world.launch(0)
    assert [span.span_id for span in witness.spans] == [held.get_span_context().span_id]


WRONG = [
    b"",
    b"nonsense",
    b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01",
    b"ff-" + b"1" * 32 + b"-" + b"1" * 16 + b"-01",
    b"00-" + b"1" * 32 + b"-" + b"1" * 16 + b"-01-and-more",
    b"\x00\x1b\xc3\xa9" * 9,
    b"\xff" * 255,
]


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
async def test_a_wrong_text_of_a_peer_is_dropped_and_the_event_is_not(
    text: bytes, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:  # H155, H179
    witness = Witness()
    async with running_operator(witness, parallelism=1) as world:
        task = await world.launch(0)
        payload = TRACED_START + b"\xd9" + bytes((len(text),)) + text + encode_event("an event")
        task._drive(EventSubmitted(payload))
        task._requests.append(Answer())
        task._drive(RequestSubmitted(1, payload))
        await world.settle()
        assert not task.outcome
    assert witness.spans == [INVALID_SPAN_CONTEXT] * 2
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


async def test_an_exception_of_a_handler_is_the_handlers_and_leaves_no_span_behind() -> None:  # H179
    async with running_operator(Desk, parallelism=1) as world:
        await world.launch_operator(0, Clerk, ["raise"])
        await world.settle()
        (failure,) = world.failures
        assert "raised on purpose" in str(failure)
    assert is_child("coordinator: raise", of="task: raise")


async def test_nothing_is_carried_by_a_program_that_has_not_imported_opentelemetry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # H179
    witness = Witness()
    async with running_operator(witness, parallelism=1) as world:
        with TRACER.start_as_current_span("sent"):
            monkeypatch.delitem(sys.modules, trace.__name__)
            await world.launch_operator(0, Clerk, ["tell"])
            monkeypatch.undo()
        await world.settle()
    assert [span.is_valid for span in witness.spans] == [False]

# SPDX-License-Identifier: Apache-2.0

"""The span of an event or a request in a task, as ``actors.coordination.host.traces`` has it on the driver."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from sys import modules
from typing import Any

from protocol.wire.codec import WireLimits
from protocol.wire.traces import join_traceparent, split_traceparent

__all__ = ["OPENTELEMETRY", "inside_span", "with_current_span"]

OPENTELEMETRY = "opentelemetry.trace"
"""The module that a program with spans has imported."""


@cache
def _propagator() -> Any:
    """OpenTelemetry's own of the W3C's text, which checks what a peer has sent."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


def with_current_span(event: bytes, limits: WireLimits) -> bytes:
    """Return the payload of an encoded event that is sent now."""
    if OPENTELEMETRY not in modules:
        return event
    carrier: dict[str, str] = {}
    with suppress(Exception):  # H155
        _propagator().inject(carrier)
    return join_traceparent(carrier.get("traceparent", ""), event, limits)


def inside_span(payload: bytes, call: Callable[[Any], None]) -> tuple[bytes, Callable[[Any], None]]:
    """Return the event of a payload, and ``call`` with the payload's span as the current one.

    A text that is not a span's changes nothing.
    """
    traceparent, event = split_traceparent(payload)
    if OPENTELEMETRY not in modules:
        return event, call
    try:
        from opentelemetry import context

        parent = _propagator().extract({"traceparent": traceparent}, context.get_current())
    except Exception:  # H155
        return event, call

    def called(value: Any) -> None:
        token = context.attach(parent)
        try:
            call(value)
        finally:
            context.detach(token)

    return event, called

# SPDX-License-Identifier: Apache-2.0

"""The span of an event or a request on the driver: of OpenTelemetry, if the program has imported that.

What a coordinator sends carries the span that is current there, and a method that handles what somebody has sent in a
span has that span as the current one, so that its own spans are children of it. No span is made here. In a program
without OpenTelemetry, all that runs is a look whether it is there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from sys import modules
from typing import Any, TypeVar

from actors.exits import Abandoned
from protocol.wire.codec import WireLimits
from protocol.wire.traces import join_traceparent

T = TypeVar("T")

OPENTELEMETRY = "opentelemetry.trace"
"""The module that a program with spans has imported."""


@cache
def _propagator() -> Any:
    """OpenTelemetry's own of the W3C's text, which checks what a peer has sent."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


def current_traceparent() -> str:
    """Return the current span as a text; empty if there is none. H155: nothing is raised."""
    if OPENTELEMETRY not in modules:
        return ""
    carrier: dict[str, str] = {}
    with suppress(Exception):
        _propagator().inject(carrier)
    return carrier.get("traceparent", "")


def with_current_span(event: bytes, limits: WireLimits) -> bytes:
    """Return the payload of an encoded event that is sent now."""
    return join_traceparent(current_traceparent(), event, limits)


def inside_span(traceparent: str, call: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Return ``call``, with the span of this text as the current one. A text that is none changes nothing."""
    if OPENTELEMETRY not in modules:
        return call
    try:
        from opentelemetry import context

        parent = _propagator().extract({"traceparent": traceparent}, context.get_current())
    except Exception:
        return call

    async def called(*args: Any, **options: Any) -> T:
        token = context.attach(parent)
        try:
            result = await call(*args, **options)
        except (Abandoned, GeneratorExit):
            raise  # thrown in from another task, which has another current span
        except BaseException:
            context.detach(token)
            raise
        context.detach(token)
        return result

    return called

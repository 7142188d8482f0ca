# SPDX-License-Identifier: Apache-2.0

"""Three ways to configure Headgate's log.

Its argument is the way: default, more, as_json or with_structlog. It needs ``headgate`` alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys

import structlog

from headgate.actors import Actor, ActorContext, ActorSystem


def more() -> None:
    """Everything from INFO on, to standard error."""
    logging.getLogger("headgate").setLevel(logging.INFO)


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = getattr(record, "headgate", {"event": record.getMessage()})
        return json.dumps({"level": record.levelname, **line}, default=str)


def as_json() -> None:
    """To a handler of the standard library, as JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def with_structlog() -> None:
    """To structlog."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


class Talker(Actor[str]):
    async def receive(self, context: ActorContext[str], message: str) -> None:
        context.log.debug("message seen", message=message)
        context.log.info("message received", message=message)
        context.log.warning("message not understood", message=message)


async def run() -> None:
    async with ActorSystem("example") as system:
        system.spawn(Talker, name="talker").tell("good morning")
        await asyncio.sleep(0)


WAYS = {"default": lambda: None, "more": more, "as_json": as_json, "with_structlog": with_structlog}


if __name__ == "__main__":
    WAYS[sys.argv[1] if len(sys.argv) > 1 else "default"]()
    asyncio.run(run())

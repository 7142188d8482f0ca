# SPDX-License-Identifier: Apache-2.0

"""The actor that watches a sidecar: it keeps rates and latencies up to date, and says in the log who waits for whom.

Once a second it samples the figures of each operator. Several times within ``report_s`` it looks for anything that has
waited for longer than that. Then the log has a warning with the diagnosis, and another one each time the waiting has
lasted twice as long, until nothing waits any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from actors import Actor, ActorContext
from protocol.values import value
from spark_bridge.observability.collector import ObservedOperator, StatusCollector
from spark_bridge.observability.diagnosis import waits

SAMPLE_EVERY_S = 1.0
LOOKS = 3
"""How often it looks within ``report_s``."""


@value
class Sample:
    """It is time to sample the figures."""


@value
class Look:
    """It is time to look for what waits."""


ObserverMessage = Sample | Look


class ObserverActor(Actor[ObserverMessage]):
    """See the module."""

    def __init__(
        self,
        collector: StatusCollector,
        operators: Callable[[], Mapping[str, ObservedOperator]],
        report_s: float,
        each_second: Callable[[], None] | None = None,
    ) -> None:
        self._each_second = each_second
        self._collector = collector
        self._operators = operators
        self._report_s = report_s
        self._stuck_since: float | None = None
        self._report_at = 0.0

    async def started(self, context: ActorContext[ObserverMessage]) -> None:
        context.timers.start("sample", Sample(), every_s=SAMPLE_EVERY_S)
        context.timers.start("look", Look(), every_s=self._report_s / LOOKS)

    async def receive(self, context: ActorContext[ObserverMessage], message: ObserverMessage) -> None:
        match message:
            case Sample():
                now = context.clock.now()
                for operator in self._operators().values():
                    operator.sample(now)
                if self._each_second is not None:
                    self._each_second()
            case Look():
                await self._look(context)

    async def _look(self, context: ActorContext[ObserverMessage]) -> None:
        status = await self._collector.take()
        sentences = waits(status, waiting_s=self._report_s)
        now = context.clock.now()
        if not sentences:
            self._stuck_since = None
        elif self._stuck_since is None or now >= self._report_at:
            self._stuck_since = now if self._stuck_since is None else self._stuck_since
            self._report_at = now + max(self._report_s, now - self._stuck_since)
            for sentence in sentences:
                context.log.warning("no progress", why=sentence)

# SPDX-License-Identifier: Apache-2.0

"""A trace that is being written: the file, what draws into it, and the actor that samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import anyio

from actors import ActorRef, ActorSystem
from actors.threads import DRIVER
from spark_bridge.common.errors import SidecarError
from spark_bridge.observability.collector import ObservedOperator, StatusCollector
from spark_bridge.observability.displays import Displays
from spark_bridge.observability.journal import Journal
from spark_bridge.observability.trace import Trace, TraceActor, TraceFile, TraceMessage

__all__ = ["Tracing", "start_tracing"]


class _Operators(Protocol):
    @property
    def observed(self) -> dict[str, ObservedOperator]: ...


@dataclass(slots=True)
class Tracing:
    """See the module. Loop only."""

    path: Path
    file: TraceFile
    trace: Trace
    actor: ActorRef[TraceMessage]
    system: ActorSystem
    displays: Displays

    async def end(self) -> None:
        """Take the hooks away, and complete the file."""
        self.displays.run("trace", self.trace.close)
        with anyio.CancelScope(shield=True):
            await self.system.stop(self.actor)
            await DRIVER.run(self.file.close)


async def start_tracing(
    path: Path, system: ActorSystem, journal: Journal, collector: StatusCollector, operators: _Operators
) -> Tracing:
    """Begin to write. Raises ``SidecarError`` if the file cannot be created."""
    try:
        file = await DRIVER.run(TraceFile, path)
    except OSError as error:
        raise SidecarError(
            f"cannot write the trace to {path}: {error.strerror or error}; choose another file"
        ) from error
    trace = Trace(file, journal, system.clock.now, lambda: operators.observed)
    displays = journal.displays
    actor = displays.spawn(system, lambda: TraceActor(trace, collector), "trace")
    return Tracing(path, file, trace, actor, system, displays)

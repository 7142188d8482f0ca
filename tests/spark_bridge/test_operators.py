# SPDX-License-Identifier: Apache-2.0

"""The operators of a sidecar, on real actors and a storage in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from actors import ActorSystem
from actors.coordination import OperatorConfig, OperatorCoordinator, parts_of
from protocol.attempts import LedgerConfig
from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.wire.messages import RestoreMode, SubtaskState
from spark_bridge.bridge.actor import BridgeActor
from spark_bridge.bridge.router import ConnectionRouter
from spark_bridge.bridge.runs import RunningJobs
from spark_bridge.common.errors import SidecarError
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.operators import Operators
from spark_bridge.storage import MemoryStorage, Storage, StorageSession


@asynccontextmanager
async def running_operators(storage: Storage, running: RunningJobs | None = None) -> AsyncIterator[Operators]:
    """Operators as in a sidecar, but without requests to Spark."""
    no_relay: Any = None
    running = running or RunningJobs()
    async with StorageSession(storage) as session, ActorSystem("test") as system:
        bridge = system.spawn(lambda: BridgeActor(LedgerConfig(), lambda: no_relay, running=running), name="bridge")
        yield Operators(SidecarConfig(), system, bridge, ConnectionRouter(lambda *attempt: b""), session)


def streaming(operator_id: str, parallelism: int) -> OperatorConfig:
    return OperatorConfig(operator_id, parallelism, RestoreMode.STREAMING)


@pytest.mark.asyncio
async def test_a_checkpoint_that_cannot_be_cut_once_more_refuses_its_operator_and_no_other() -> None:
    """H52: it used to end the whole sidecar. Found by the simulation: a driver dies; another starts with another
    parallelism, completes a checkpoint before each subtask has restored, and dies; a third changes it again.
    """
    storage = MemoryStorage()
    both = {
        0: SubtaskSnapshot((SubtaskState(0, b"a"), SubtaskState(1, b"b"))),
        1: SubtaskSnapshot((SubtaskState(0, b"c"),)),
    }
    storage.store("words", CompletedCheckpoint(storage.reserve_ids(3)[-1], 2, b"", both))
    async with running_operators(storage) as operators:
        with pytest.raises(SidecarError, match=r"'words'.*Restore it with 2, take a checkpoint.*then change"):
            await operators.add(streaming("words", 1), parts_of(OperatorCoordinator()), "latest")
        await operators.add(streaming("others", 1), parts_of(OperatorCoordinator()), "latest")
        await operators.add(streaming("words", 2), parts_of(OperatorCoordinator()), "latest")

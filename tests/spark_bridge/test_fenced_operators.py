# SPDX-License-Identifier: Apache-2.0

"""A later application has taken over the storage: nothing that this one prepares counts any more."""

from __future__ import annotations

import pytest

from headgate.testing import RecordingCoordinator
from protocol.barrier_tracker import CompletedCheckpoint
from spark_bridge.storage import StorageFenced
from tests.conformance.application import Application, MemoryStorage, application

FENCED = StorageFenced("taken over by application number 2")


async def test_a_checkpoint_whose_storage_is_fenced_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """H6: its output would be committed by this application, and once more by the later one."""

    asked: list[str] = []

    async def store(storage: MemoryStorage, checkpoint: CompletedCheckpoint) -> None:
        asked.append("store")
        raise FENCED

    async def discard(storage: MemoryStorage, checkpoint_id: int) -> None:
        asked.append("discard")
        raise FENCED

    monkeypatch.setattr(MemoryStorage, "store", store)
    monkeypatch.setattr(MemoryStorage, "discard", discard)
    monkeypatch.setattr(Application, "refuse_tasks", lambda app, *_: None, raising=False)
    async with application() as app:
        coordinator = RecordingCoordinator()
        await app.coordinate(coordinator)
        await app.running()
        answer = await app.checkpoint()
        assert not answer.values
        assert "taken over" in str(answer.error)
        assert not coordinator.calls_of("notify_checkpoint_complete")
        assert app.operators.fenced is FENCED
        await app.kit.advance(60.0)
        await app.settle()
        assert asked == ["store", "discard"], "what is refused is not tried again"

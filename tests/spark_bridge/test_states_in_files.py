# SPDX-License-Identifier: Apache-2.0

"""The driver's half of states in files: what a checkpoint names stays, and what nothing needs goes."""

from __future__ import annotations

from pathlib import Path

from tests.spark_bridge.states_in_files import an_application, content_of, missing


async def test_a_checkpoint_names_files_and_a_restart_restores_them(tmp_path: Path) -> None:  # H190, H191
    async with an_application(tmp_path) as application:
        (task,) = await application.tasks_of(0)
        task.write("one")
        await application.completed_checkpoint()
        task.write("two")
        await application.completed_checkpoint()
    async with an_application(tmp_path) as application:
        (task,) = await application.tasks_of(0)
        assert content_of(task.words) == {"one.sst": b"one", "two.sst": b"two"}
        before = set(application.files())
        await application.completed_checkpoint()
        assert len(set(application.files()) - before) == 1  # the manifest; the rest is named again
        assert missing(application.storage) == []


async def test_what_nothing_needs_is_deleted_and_what_a_kept_checkpoint_names_is_not(tmp_path: Path) -> None:  # H190
    async with an_application(tmp_path, retained=2) as application:
        (task,) = await application.tasks_of(0)
        for word in "abcde":
            task.write("same", word.encode())
            await application.completed_checkpoint()
            await application.settle()
            assert missing(application.storage) == []
        kept = application.storage.kept_ids("words")
        assert len(kept) == 3  # two before the last one was stored
        assert len(application.files()) == 2 * len(kept)

# SPDX-License-Identifier: Apache-2.0

"""A damaged checkpoint is never restored as if it were intact (H50)."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from protocol.wire.checkpoint_format import FORMAT_VERSION, StoredCheckpoint, encode_checkpoint
from protocol.wire.messages import RestoreMode
from spark_bridge.storage import CheckpointStorage, CheckpointUnreadable, StorageError
from tests.spark_bridge.storage.checkpoints import (
    a_checkpoint,
    a_prepared_storage,
    a_storage_with,
    failing,
    interrupted,
)
from tests.spark_bridge.storage.writer import state_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """A directory with two checkpoints, 1 and 2, and the file of the newest."""
    a_storage_with(tmp_path, 2)
    return tmp_path, tmp_path / "words" / "checkpoint-2.hgc"


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_newest_file_cut_or_changed_at_any_byte_is_refused_and_the_older_one_replaces_it(
    damage: str, two: tuple[Path, Path]
) -> None:  # H50
    root, file = two
    whole = file.read_bytes()
    for place in range(len(whole)):
        rest = b"" if damage == "cut" else bytes([whole[place] ^ 0xFF]) + whole[place + 1 :]
        file.write_bytes(whole[:place] + rest)
        storage = CheckpointStorage(root)
        with pytest.raises(CheckpointUnreadable, match=r"allow_older=True") as refusal:
            storage.latest("words")
        assert refusal.value.file == str(file)
        assert storage.latest("words", allow_older=True) == a_checkpoint(1)


def test_skipped_checkpoints_are_logged(two: tuple[Path, Path]) -> None:  # H50
    root, file = two
    file.write_bytes(b"rubbish")
    with capture_logs() as logs:
        CheckpointStorage(root).latest("words", allow_older=True)
    assert [entry["file"] for entry in logs if entry["log_level"] == "warning"] == [str(file)]


def test_without_an_intact_checkpoint_nothing_is_restored(two: tuple[Path, Path]) -> None:  # H50
    root, file = two
    file.write_bytes(b"rubbish")
    (root / "words" / "checkpoint-1.hgc").write_bytes(b"")
    with pytest.raises(CheckpointUnreadable, match=r"checkpoint-2\.hgc: .*no older checkpoint is intact"):
        CheckpointStorage(root).latest("words", allow_older=True)


def test_a_whole_file_under_another_name_is_refused(two: tuple[Path, Path]) -> None:  # H50
    root, file = two
    shutil.copy(file, root / "words" / "checkpoint-3.hgc")
    with pytest.raises(CheckpointUnreadable, match=r"checkpoint-3\.hgc: contains checkpoint 2 of 'words'"):
        CheckpointStorage(root).latest("words")
    (root / "letters").mkdir()
    shutil.copy(file, root / "letters" / "checkpoint-2.hgc")
    with pytest.raises(CheckpointUnreadable, match="which does not match its name"):
        CheckpointStorage(root).read("letters", 2)


def test_a_later_format_is_never_skipped(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:  # H50
    root, file = two
    with monkeypatch.context() as later_release:
        later_release.setattr("protocol.wire.checkpoint_format._version_for", lambda stored: FORMAT_VERSION + 1)
        data = encode_checkpoint(StoredCheckpoint("words", RestoreMode.STREAMING, 0, "9", a_checkpoint(2)))
    file.write_bytes(data)
    for allow_older in (False, True):
        with pytest.raises(
            CheckpointUnreadable, match=rf"checkpoint-2\.hgc: checkpoint format {FORMAT_VERSION + 1}, and this release"
        ):
            CheckpointStorage(root).latest("words", allow_older=allow_older)


@pytest.mark.parametrize("allow_older", [False, True])
def test_a_file_that_cannot_be_read_at_the_moment_is_never_skipped(allow_older: bool, hooked_url: str) -> None:  # H50
    a_storage_with(hooked_url, 2)
    with (
        failing("cat_file", PermissionError(13, "Permission denied")),
        pytest.raises(StorageError, match=r"cannot read .*checkpoint-2\.hgc: .*Permission denied"),
    ):
        CheckpointStorage(hooked_url).latest("words", allow_older=allow_older)


def test_a_checkpoint_deleted_during_the_listing_makes_it_start_again(hooked_url: str) -> None:
    storage, ids = a_storage_with(hooked_url, 2)
    with interrupted("cat_file", lambda: storage.discard("words", ids[1])):
        assert CheckpointStorage(hooked_url).latest("words") == a_checkpoint(ids[0])


def test_a_listing_names_the_damage_and_continues(two: tuple[Path, Path]) -> None:
    root, _ = two
    (root / "words" / "checkpoint-1.hgc").write_bytes(b"\x89HGC")
    storage = CheckpointStorage(root)
    damaged, whole = storage.list()
    assert (damaged.operator_id, damaged.checkpoint_id, damaged.size_bytes) == ("words", 1, 4)
    assert (whole.checkpoint_id, whole.problem) == (2, "")
    assert [info.file for info in storage.verify()] == [str(root / "words" / "checkpoint-1.hgc")]


def test_unknown_files_are_left_alone(two: tuple[Path, Path]) -> None:
    root, _ = two
    strangers = [root / "notes.txt", root / "words" / "checkpoint-02.hgc", root / "words" / "checkpoint-9.hgc.bak"]
    for stranger in strangers:
        stranger.write_text("mine", encoding="utf-8")
    storage = a_prepared_storage(root, retained=1)
    for checkpoint_id in storage.reserve_ids(4):
        storage.store("words", a_checkpoint(checkpoint_id))
    assert [stranger.read_text(encoding="utf-8") for stranger in strangers] == ["mine"] * 3
    assert storage.verify() == []


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))])
def test_a_writer_that_is_killed_leaves_only_whole_checkpoints(seed: int, tmp_path: Path) -> None:  # H4, H50, H51
    """A real process that stores one checkpoint after another; about half of the time it dies during a write."""
    print(f"seed {seed}")
    dice = random.Random(seed)
    acknowledged: list[int] = []
    for _ in range(3):
        acknowledged += stored_until_killed(tmp_path, after=dice.randint(1, 8), turns=dice.randint(0, 20_000))
        storage = CheckpointStorage(tmp_path)
        assert storage.verify() == []
        latest = storage.latest("words")
        assert latest is not None
        assert latest.checkpoint_id >= acknowledged[-1]
        assert latest.coordinator_state == state_of(latest.checkpoint_id)
    assert acknowledged == sorted(set(acknowledged))


def stored_until_killed(root: Path, *, after: int, turns: int) -> list[int]:
    """Run a writer and kill it after this many checkpoints and idle turns; return the ids it reported as stored."""
    command = [sys.executable, "-m", "tests.spark_bridge.storage.writer", str(root)]
    lines: list[bytes] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        try:
            while sum(line.startswith(b"stored ") for line in lines) < after:
                lines.append(writer.stdout.readline())
                assert lines[-1], "the writer ended by itself"
            for _ in range(turns):
                pass
        finally:
            os.kill(writer.pid, signal.SIGKILL)
        lines += [line for line in writer.stdout if line.endswith(b"\n")]
    return [int(line.split()[1]) for line in lines if line.startswith(b"stored ")]

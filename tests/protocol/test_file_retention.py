# SPDX-License-Identifier: Apache-2.0

"""Which files the driver deletes, and which a task names again, one rule at a time (H190, H191, H193)."""

from __future__ import annotations

from typing import Any

import pytest

from protocol import file_retention as r
from protocol.errors import LocalProtocolError
from protocol.file_retention import FileOrigin, FileRetention, UploadedFiles, origin_of
from protocol.wire.checkpoint_format import CHECKPOINT_ID_MAX
from tests.protocol.refusals import unchanged

EPOCH = 4


def named(checkpoint_id: int, number: int | str = 0, epoch: int = EPOCH) -> str:
    return r.file_name(FileOrigin(checkpoint_id, epoch), "ab", 1, 100, "cd", number)


def tell(retention: FileRetention, *inputs: r.RetentionInput) -> list[r.RetentionEffect]:
    out: list[r.RetentionEffect] = []
    for input in inputs:
        out += retention.handle(input)
        retention.check_invariants()
    return out


def started(kept: dict[int, frozenset[str]] | None = None) -> FileRetention:
    """A retention whose start has found nothing to delete."""
    retention = FileRetention(EPOCH)
    assert tell(retention, r.RestoreChosen(kept or {})) == [r.RecordRestore()]
    assert tell(retention, r.RestoreRecorded(), r.FilesListed(())) == [r.ListFiles()]
    return retention


def complete(retention: FileRetention, checkpoint_id: int, *names: str, removed: tuple[int, ...] = ()) -> list[Any]:
    """Run a checkpoint that names these files; return what follows its completion."""
    begun = r.CheckpointBegan(checkpoint_id), r.FilesNamed(checkpoint_id, frozenset(names))
    assert tell(retention, *begun) == [r.AllowStore(checkpoint_id)]
    return tell(retention, r.CheckpointDurable(checkpoint_id), r.RecordsRemoved(removed))


# --- names ----------------------------------------------------------------------------------------------------------


def test_a_name_says_where_the_file_is_from_and_fits_into_a_handle() -> None:  # H191
    name = r.file_name(FileOrigin(2**53 - 1, 2**31 - 1), "a" * 16, 99_999, 2**53, "b" * 16, "manifest")
    assert origin_of(name) == FileOrigin(2**53 - 1, 2**31 - 1)


def test_what_differs_is_in_the_name() -> None:  # H191
    origin = FileOrigin(7, 1)
    names = {
        r.file_name(origin, "ab", 1, 100, "cd", 0),
        r.file_name(origin, "ac", 1, 100, "cd", 0),
        r.file_name(origin, "ab", 2, 100, "cd", 0),
        r.file_name(origin, "ab", 1, 101, "cd", 0),
        r.file_name(origin, "ab", 1, 100, "ce", 0),
        r.file_name(origin, "ab", 1, 100, "cd", 1),
        r.file_name(FileOrigin(8, 1), "ab", 1, 100, "cd", 0),
        r.file_name(FileOrigin(7, 2), "ab", 1, 100, "cd", 0),
    }
    assert len(names) == 8


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x",
        "7-1-ab",
        "7-1-ab/x",
        "0-1-ab/0-1-cd-0",
        "7-1-ab-0/1-cd-0",
        "7-1-ab/0-1-cd-a b",
        "7-1-ab/0-x-cd-0",
        "7-1-ab/0-1-cd-é",
        "7-1-zz/0-1-cd-0",
        "7-1-ab/0-1-cd-0/x",
    ],
)
def test_a_file_that_is_not_ours_has_no_origin_and_is_left_alone(name: str) -> None:
    assert origin_of(name) is None
    retention = started()
    assert complete(retention, 7) == [r.ListFiles()]
    assert tell(retention, r.FilesListed((name,))) == []


def test_a_name_that_could_not_be_read_again_is_not_made() -> None:
    with pytest.raises(ValueError, match="must be a relative path"):
        r.file_name(FileOrigin(7, 1), "ab", 1, 100, "c d", 0)


# --- the start ------------------------------------------------------------------------------------------------------


def test_nothing_is_listed_before_the_restore_record_is_durable() -> None:
    """A write of an earlier application may still be on its way: until the record, a restart would prefer it."""
    retention = FileRetention(EPOCH)
    assert tell(retention, r.RestoreChosen({})) == [r.RecordRestore()]
    for early in (r.CheckpointBegan(9), r.FilesListed(()), r.RestoreChosen({}), r.ClaimConfirmed(held=True)):
        with unchanged(retention), pytest.raises(LocalProtocolError, match="start is not recorded"):
            retention.handle(early)
    assert tell(retention, r.RestoreRecorded()) == [r.ListFiles()]
    with pytest.raises(LocalProtocolError, match="start is recorded"):
        retention.handle(r.RestoreRecorded())
    with pytest.raises(LocalProtocolError, match="start is not chosen"):
        FileRetention(EPOCH).handle(r.RestoreRecorded())


def test_the_start_deletes_what_earlier_applications_left_and_no_kept_checkpoint_names() -> None:
    kept, left = named(5, 0, epoch=3), named(6, 1, epoch=2)
    own, later = named(9, 2), named(3, 3, epoch=5)
    retention = FileRetention(EPOCH)
    tell(retention, r.RestoreChosen({5: frozenset({kept})}), r.RestoreRecorded())
    assert tell(retention, r.FilesListed((kept, left, own, later))) == [r.ConfirmClaim()]
    assert tell(retention, r.ClaimConfirmed(held=True)) == [r.DeleteFiles((left,))]
    assert tell(retention, r.FilesDeleted()) == []


# --- the sweep ------------------------------------------------------------------------------------------------------


def test_a_completion_is_followed_by_a_sweep_of_what_no_mark_has_and_is_older() -> None:
    retention = started()
    complete(retention, 7, named(7))
    tell(retention, r.FilesListed(()))
    assert complete(retention, 8, named(7), named(8, 1)) == [r.ListFiles()]
    listed = (named(7), named(7, 9), named(8, 1), named(8, 9), named(9))
    assert tell(retention, r.FilesListed(listed), r.ClaimConfirmed(held=True)) == [
        r.ConfirmClaim(),
        r.DeleteFiles((named(7, 9),)),
    ]


def test_the_record_of_a_checkpoint_is_removed_before_its_files() -> None:
    retention = started()
    complete(retention, 7, named(7))
    tell(retention, r.FilesListed(()))
    tell(retention, r.CheckpointBegan(8), r.FilesNamed(8, frozenset({named(8)})))
    assert tell(retention, r.CheckpointDurable(8)) == []
    assert tell(retention, r.RecordsRemoved((7,))) == [r.ListFiles()]
    assert tell(retention, r.FilesListed((named(7), named(8)))) == [r.ConfirmClaim()]


def test_the_files_of_a_checkpoint_that_the_storage_keeps_stay() -> None:
    retention = started({5: frozenset({named(5, 0, 3)})})
    assert complete(retention, 7, named(7)) == [r.ListFiles()]
    assert tell(retention, r.FilesListed((named(5, 0, 3), named(7)))) == []
    assert complete(retention, 8, named(8), removed=(5, 7)) == [r.ListFiles()]
    deleted = tell(retention, r.FilesListed((named(5, 0, 3), named(7), named(8))), r.ClaimConfirmed(held=True))
    assert deleted[-1] == r.DeleteFiles((named(5, 0, 3), named(7)))


def test_files_of_an_aborted_checkpoint_stay_until_a_later_one_completes() -> None:
    """The next checkpoint names them again; a first upload that takes long would begin again each time otherwise."""
    retention = started()
    assert tell(retention, r.CheckpointBegan(7), r.CheckpointGivenUp(7)) == []
    assert tell(retention, r.CheckpointBegan(8), r.CheckpointGivenUp(8)) == []
    assert complete(retention, 9, named(7), named(9)) == [r.ListFiles()]
    deleted = tell(retention, r.FilesListed((named(7), named(8), named(9))), r.ClaimConfirmed(held=True))
    assert deleted[-1] == r.DeleteFiles((named(8),))


@pytest.mark.parametrize("outcome", ["given up", "in doubt", "durable"])
def test_a_sweep_waits_for_everything_that_was_triggered_before_the_completion(outcome: str) -> None:
    retention = started()
    tell(retention, r.CheckpointBegan(7), r.CheckpointBegan(8))
    tell(retention, r.FilesNamed(7, frozenset({named(7)})))
    assert tell(retention, r.CheckpointDurable(7), r.RecordsRemoved(())) == []
    tell(retention, r.CheckpointBegan(9))  # after it: its tasks have forgotten
    assert tell(retention, r.FilesNamed(8, frozenset({named(6)}))) == [r.AllowStore(8)]
    if outcome == "durable":
        assert tell(retention, r.CheckpointDurable(8)) == []
        tell(retention, r.CheckpointGivenUp(9))
        assert tell(retention, r.RecordsRemoved(())) == [r.ListFiles()]
    else:
        assert tell(retention, r.CheckpointGivenUp(8, in_doubt=outcome == "in doubt")) == [r.ListFiles()]
    confirm = [] if outcome != "given up" else [r.ConfirmClaim()]
    assert tell(retention, r.FilesListed((named(6), named(7)))) == confirm


@pytest.mark.parametrize("ended", [False, True])
def test_what_is_in_doubt_keeps_its_files_until_the_doubt_ends(ended: bool) -> None:  # H64
    retention = started()
    tell(retention, r.CheckpointBegan(7), r.CheckpointBegan(8))
    tell(retention, r.FilesNamed(7, frozenset({named(7)})), r.FilesNamed(8, frozenset({named(6)})))
    assert tell(retention, r.CheckpointDurable(7), r.RecordsRemoved(())) == []
    assert tell(retention, r.CheckpointGivenUp(8, in_doubt=True)) == [r.ListFiles()]
    if ended:
        tell(retention, r.DoubtEnded(8))
    assert tell(retention, r.FilesListed((named(6), named(7)))) == ([r.ConfirmClaim()] if ended else [])


def test_a_completion_ends_the_doubt_about_every_earlier_one() -> None:  # H64
    retention = started()
    tell(retention, r.CheckpointBegan(7), r.FilesNamed(7, frozenset({named(7)})))
    tell(retention, r.CheckpointGivenUp(7, in_doubt=True))
    assert complete(retention, 8, named(8)) == [r.ListFiles()]
    assert tell(retention, r.FilesListed((named(7), named(8)))) == [r.ConfirmClaim()]


def test_a_checkpoint_that_was_never_written_is_not_in_doubt() -> None:
    retention = started()
    tell(retention, r.CheckpointBegan(7), r.CheckpointGivenUp(7, in_doubt=True))
    assert retention._in_doubt == {}


def test_a_checkpoint_that_names_what_may_be_deleted_is_refused() -> None:
    retention = started()
    complete(retention, 8, named(8))
    tell(retention, r.CheckpointBegan(9))
    doubtful = named(7), named(9, 0, 3), "not ours"
    names = frozenset({named(8), named(8, 1), named(9), *doubtful})
    assert tell(retention, r.FilesNamed(9, names)) == [r.RefuseStore(9, tuple(sorted(doubtful)))]
    assert tell(retention, r.CheckpointGivenUp(9)) == []


def test_nothing_is_deleted_after_another_application_has_begun() -> None:  # H81
    retention = started()
    complete(retention, 7, named(7))
    tell(retention, r.FilesListed(()))
    complete(retention, 8, named(8), removed=(7,))
    left = tuple(named(7, number) for number in range(r.BATCH_MAX + 1))
    assert tell(retention, r.FilesListed(left)) == [r.ConfirmClaim()]
    assert tell(retention, r.ClaimConfirmed(held=True)) == [r.DeleteFiles(left[:-1])]
    assert tell(retention, r.FilesDeleted()) == [r.ConfirmClaim()]
    assert tell(retention, r.ClaimConfirmed(held=False)) == []
    assert complete(retention, 9, named(9), removed=(8,)) == []


def test_a_sweep_that_is_due_begins_after_the_one_before() -> None:
    retention = started()
    assert complete(retention, 7, named(7)) == [r.ListFiles()]
    assert complete(retention, 8, named(8), removed=(7,)) == []
    assert tell(retention, r.FilesListed((named(7), named(8)))) == [r.ListFiles()]
    assert tell(retention, r.FilesListed((named(7), named(8)))) == [r.ConfirmClaim()]


def test_a_savepoint_that_copies_keeps_what_it_copies_until_it_is_over() -> None:  # H193
    retention = started({5: frozenset({named(5, 0, 3)})})
    tell(retention, r.CheckpointBegan(7))
    assert tell(retention, r.FilesNamed(7, frozenset({named(5, 0, 3)}))) == [r.AllowStore(7)]
    assert complete(retention, 8, named(8), removed=(5,)) == []
    assert tell(retention, r.CheckpointGivenUp(7)) == [r.ListFiles()]
    assert tell(retention, r.FilesListed((named(5, 0, 3), named(8)))) == [r.ConfirmClaim()]


LAST = named(r.LAST_STATE)
"""A file of attempt 100."""


def swept(retention: FileRetention, *names: str) -> tuple[str, ...]:
    """What a sweep deletes of these files."""
    if tell(retention, r.FilesListed(names)) == []:
        return ()
    (delete,) = tell(retention, r.ClaimConfirmed(held=True))
    assert isinstance(delete, r.DeleteFiles)
    tell(retention, r.FilesDeleted())
    return delete.names


def test_the_files_of_a_last_state_stay_while_their_attempt_runs() -> None:  # H47
    retention = started()
    earlier = named(r.LAST_STATE, 0, epoch=3)
    complete(retention, 7)
    assert swept(retention, LAST, earlier) == (earlier,)
    assert CHECKPOINT_ID_MAX == r.LAST_STATE


def test_a_last_state_stays_until_a_checkpoint_that_began_after_its_attempt_does_not_name_it() -> None:  # H47, H190
    retention = started()
    tell(retention, r.CheckpointBegan(7), r.AttemptOver(100), r.FilesNamed(7, frozenset()))
    tell(retention, r.CheckpointDurable(7), r.RecordsRemoved(()))
    assert swept(retention, LAST) == ()  # 7 may be of before the end, so 8 may name it
    complete(retention, 8, LAST)
    assert swept(retention, LAST) == ()
    complete(retention, 9, removed=(7,))
    assert swept(retention, LAST) == ()  # 8 is kept
    complete(retention, 10, removed=(8,))
    assert swept(retention, LAST, named(r.LAST_STATE, 0, epoch=5)) == (LAST,)


def test_a_checkpoint_that_names_a_last_state_which_may_be_gone_is_refused() -> None:  # H190
    retention = started()
    tell(retention, r.AttemptOver(100))
    complete(retention, 7)
    assert tell(retention, r.FilesListed((LAST,))) == [r.ConfirmClaim()]
    assert tell(retention, r.CheckpointBegan(8), r.FilesNamed(8, frozenset({LAST}))) == [r.RefuseStore(8, (LAST,))]


def test_attempts_without_last_files_are_forgotten() -> None:
    retention = started()
    tell(retention, *map(r.AttemptOver, range(1000)))
    complete(retention, 7)
    assert swept(retention, LAST) == (LAST,)
    assert [*retention._over] == [100]
    complete(retention, 8)
    assert swept(retention) == ()
    assert not retention._over


def test_inputs_out_of_turn_are_refused() -> None:
    retention = started()
    tell(retention, r.CheckpointBegan(7))
    for wrong in (
        r.CheckpointBegan(7),
        r.CheckpointGivenUp(6),
        r.CheckpointDurable(7),
        r.FilesNamed(6, frozenset()),
        r.FilesListed(()),
        r.ClaimConfirmed(held=True),
        r.FilesDeleted(),
        "anything",
    ):
        with unchanged(retention), pytest.raises(LocalProtocolError):
            retention.handle(wrong)  # type: ignore[arg-type]
    complete(retention, 8)
    with pytest.raises(LocalProtocolError, match="the record of 8 is removed, and 8 is the last"):
        retention.handle(r.RecordsRemoved((8,)))


# --- what a task names again ----------------------------------------------------------------------------------------


def test_a_file_is_known_by_its_identity_and_not_by_its_name() -> None:
    files = UploadedFiles()
    files.stored(("x.sst", 1), "first", 7)
    assert files.find(("x.sst", 1)) == "first"
    assert files.find(("x.sst", 2)) is None


def test_what_was_uploaded_for_an_aborted_checkpoint_is_named_by_the_next() -> None:
    files = UploadedFiles()
    files.stored("x", "first", 7)
    files.manifest_stored(7, ["first"])
    files.aborted(7)
    assert files.find("x") == "first"


def test_at_a_completion_a_task_forgets_what_is_not_in_its_own_state() -> None:
    files = UploadedFiles()
    files.restored([("a", "restored"), ("b", "restored too")])
    files.stored("c", "aborted", 6)
    files.stored("d", "in it", 7)
    files.stored("e", "later", 8)
    files.manifest_stored(7, ["restored", "in it"])
    files.manifest_stored(8, ["later"])
    files.completed(7)
    assert [files.find(identity) for identity in "abcde"] == ["restored", None, None, "in it", "later"]
    files.completed(8)
    assert [files.find(identity) for identity in "abcde"] == [None, None, None, None, "later"]


def test_what_is_stored_after_a_later_checkpoint_is_complete_is_not_named_again() -> None:  # H190
    files = UploadedFiles()
    files.completed(7)
    for identity, checkpoint_id in (("a", 6), ("b", 7), ("c", 8)):
        files.stored(identity, f"late {identity}", checkpoint_id)
    assert [files.find(identity) for identity in "abc"] == [None, None, "late c"]


def test_a_savepoint_names_nothing_again_and_nothing_of_it_is_named_again() -> None:  # H193
    files = UploadedFiles()
    files.restored([("a", "of a savepoint")], elsewhere=True)
    files.stored("b", "into a savepoint", 7, target="folder")
    files.stored("c", "ours", 8)
    assert [files.find(identity) for identity in "abc"] == [None, None, "ours"]
    assert files.find("c", target="folder") is None

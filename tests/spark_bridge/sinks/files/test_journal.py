# SPDX-License-Identifier: Apache-2.0

"""The journal records what was published, even after the files are gone (H64)."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_bridge.sinks.files import journal as module
from spark_bridge.sinks.files.directory import SinkDirectory
from spark_bridge.sinks.files.journal import PublicationJournal, is_journal
from spark_bridge.sinks.two_phase.parts import PartName
from tests.spark_bridge.sinks.files.kit import failing, new_url

WRITER, OTHER = "a" * 32, "b" * 32


def part(number: int, token: str = WRITER) -> PartName:
    return PartName(0, -1, 0, token, number)


@pytest.fixture(params=["local", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> SinkDirectory:
    directory = SinkDirectory(str(tmp_path) if request.param == "local" else new_url(), "out")
    directory.prepare()
    return directory


def loaded(directory: SinkDirectory) -> PublicationJournal:
    journal = PublicationJournal(directory)
    assert journal.load(directory.staged()) == []
    return journal


def test_a_new_driver_knows_what_was_published_of_each_writer(directory: SinkDirectory) -> None:
    journal = loaded(directory)
    journal.record([part(0), part(1)])
    journal.record([part(0, OTHER)])
    for known in (journal, loaded(directory)):
        covered = [known.covers(part(number, token)) for token in (WRITER, OTHER) for number in (0, 1, 2)]
        assert covered == [True, True, False, True, False, False]
    assert len(directory.staged()) == 1


def test_publishing_again_writes_no_journal(directory: SinkDirectory) -> None:
    loaded(directory).record([part(3)])
    names = directory.staged()
    loaded(directory).record([part(2), part(3)])
    assert directory.staged() == names


def test_several_journals_are_read_together_and_become_one(directory: SinkDirectory) -> None:
    first, second = loaded(directory), loaded(directory)  # two drivers, of which one has been fenced
    first.record([part(1)])
    second.record([part(0, OTHER)])
    assert len(directory.staged()) == 2
    both = loaded(directory)
    assert both.covers(part(1))
    assert both.covers(part(0, OTHER))
    both.record([part(2)])
    assert len(directory.staged()) == 1
    assert loaded(directory).covers(part(0, OTHER))


@pytest.mark.parametrize(
    "content", [b"", b'{"writers": {"aaaa', b'{"writers": [1]}', b"[]", b'{"writers": {"a": "b"}}']
)
def test_a_broken_journal_is_ignored(content: bytes, directory: SinkDirectory) -> None:
    loaded(directory).record([part(1)])
    broken = "published-00000000000000000002-deadbeef.json"
    directory.write(broken, content)
    journal = PublicationJournal(directory)
    assert journal.load(directory.staged()) == [broken]
    assert journal.covers(part(1))
    assert not journal.covers(part(2))


def test_an_unfinished_journal_of_a_dead_driver_is_deleted_with_the_next_record(directory: SinkDirectory) -> None:
    directory.write("published-00000000000000000001-deadbeef.json.tmp", b"{")
    loaded(directory).record([part(1)])
    assert [is_journal(name) for name in directory.staged()] == [True]


def test_a_number_that_fills_a_name_does_not_stop_the_journal(directory: SinkDirectory) -> None:  # H81
    poison = f"published-{'9' * 230}-aa.json"
    directory.write(poison, b"{}")
    journal = PublicationJournal(directory)
    assert journal.load(directory.staged()) == [poison]
    journal.record([part(0)])
    assert max(len(name) for name in directory.staged() if name != poison) < 100


def test_a_failed_record_can_be_repeated() -> None:
    directory = SinkDirectory(new_url(), "out")
    directory.prepare()
    journal = loaded(directory)
    with failing(TimeoutError("the store is busy")), pytest.raises(TimeoutError):
        journal.record([part(1)])
    assert not journal.covers(part(1))
    journal.record([part(1)])
    assert loaded(directory).covers(part(1))


def test_the_journal_forgets_the_writers_that_published_longest_ago(
    directory: SinkDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITERS_MAX", 3)
    journal = loaded(directory)
    tokens = [f"{number:016x}" for number in range(4)]
    for token in (*tokens[:3], tokens[0], tokens[3]):
        journal.record([part(0 if not journal.covers(part(0, token)) else 1, token)])
    assert [loaded(directory).covers(part(0, token)) for token in tokens] == [True, False, True, True]


def test_a_part_file_is_not_a_journal() -> None:
    assert not is_journal(str(part(0)))

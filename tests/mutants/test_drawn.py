# SPDX-License-Identifier: Apache-2.0

"""Mutants that are drawn at random: which there are, and how the tests that reach them are tried."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests import reached
from tests.mutants import drawn, trial
from tests.mutants.catalogue import BY_NAME, MUTANTS
from tests.mutants.drawn import ROOT, Drawn, changes, draw, lines_of

STREAMS = "protocol/streams.py"


def test_a_seed_draws_the_same_mutants_again_and_another_seed_others() -> None:
    first = draw(50, 7, ["protocol"])
    assert draw(50, 7, ["protocol"]) == first
    assert len({(one.path, one.line) for one in first}) == 50
    assert set(draw(50, 8, ["protocol"])) != set(first)


def test_each_change_is_another_program() -> None:
    chosen = draw(400, 1)
    assert len({one.kind for one in chosen}) > 8
    for one in chosen:
        before = (ROOT / one.path).read_text(encoding="utf-8")
        after = one.source().decode()
        assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before)), one.diff()


def test_no_line_of_the_catalogue_is_drawn() -> None:
    mutant = BY_NAME["taken-items-are-lost"]
    ((path, lines),) = lines_of(mutant)
    everything = {one.line for one in draw(10**6, 1, [path])}
    rest = {one.line for one in draw(10**6, 1, [path], besides=[mutant])}
    assert everything - rest == set(lines)
    assert len(list(MUTANTS)) > 100


SOURCE = '''
from __future__ import annotations

LIMIT = 3

def find(values: list[int], log: object) -> int | None:
    """Do not draw 1 here."""
    log.info("found", count=1)
    assert values
    for value in values:
        if value > LIMIT and not value == 7:
            return value
    raise ValueError(f"none of {len(values) + 1} is larger")
'''


def test_texts_log_events_and_annotations_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.setattr(drawn, "ROOT", tmp_path)
    made = {(one.line - 1, one.kind) for one in changes(tmp_path / "some.py")}
    assert made == {
        (3, "other constant"),
        (10, "negated condition"),
        (10, "another comparison"),
        (10, "and for or"),
        (10, "first operand left out"),
        (10, "not left out"),
        (10, "other constant"),
        (11, "nothing returned"),
        (12, "error not raised"),
    }


def on_line_with(text: str, kind: str, path: str = STREAMS) -> Drawn:
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return next(one for one in changes(ROOT / path) if one.kind == kind and text in lines[one.line - 1])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[trial.Workplace]:
    """A copy of the repository whose process has collected the tests of the streams, and a few about itself."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "tests").mkdir()
    (folder / ABOUT_FORKS).write_text(TESTS_ABOUT_FORKS, encoding="utf-8")
    with closing(trial.Workplace(folder, where=["tests/protocol/test_streams.py", ABOUT_FORKS])) as made:
        yield made


ABOUT_FORKS = "tests/test_forks.py"
TESTS_ABOUT_FORKS = """
import os, random, subprocess, sys
from protocol.streams import OutgoingStream

def keep(name, value):
    with open(name, "a") as file:
        print(value, file=file)

NUMBER = "from protocol.streams import OutgoingStream; print(OutgoingStream().confirmed_seq)"
STAYING = []

def test_this_process_is_right():
    assert OutgoingStream().confirmed_seq == 0

def test_another_process_is_right():
    assert subprocess.check_output([sys.executable, "-c", NUMBER]) == b"0\\n"

def test_random_numbers():
    keep("numbers", random.random())

def test_processes_that_stay():
    for apart in (False, True):
        STAYING.append(subprocess.Popen(["sleep", "600"], start_new_session=apart))
        keep("started", STAYING[-1].pid)

def test_an_end_of_the_process():
    os._exit(0)
"""


def about_forks(name: str) -> list[str]:
    return [f"{ABOUT_FORKS}::test_{name}"]


def test_a_mutant_is_caught_by_a_test_that_passes_without_it_and_the_work_tree_stays_as_it_is(
    place: trial.Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (ROOT / STREAMS).read_bytes()
    tests, wrong = reached_by_streams(), on_line_with("return self.last_seq", "nothing returned")
    monkeypatch.setattr(reached, "lines_of_imports", lambda file: set())
    monkeypatch.setattr(trial, "stages", lambda drawn: iter([[], tests]))
    monkeypatch.setattr(reached, "tests_by_line", lambda file: {wrong.line: tests})
    caught = place.try_out(wrong)
    assert (caught.verdict, caught.by in tests, caught.fresh) == ("caught", True, "")
    monkeypatch.setattr(trial, "stages", lambda drawn: iter([["tests/protocol/test_streams.py::test_no_such_test"]]))
    assert place.try_out(wrong).verdict == "survived"
    monkeypatch.setattr(reached, "tests_by_line", lambda file: {})
    assert place.try_out(wrong).verdict == "unreached"
    assert (ROOT / STREAMS).read_bytes() == before == (place.folder / STREAMS).read_bytes()


def reached_by_streams() -> list[str]:
    module = ast.parse((ROOT / "tests/protocol/test_streams.py").read_text(encoding="utf-8"))
    names = [node.name for node in module.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [f"tests/protocol/test_streams.py::{name}" for name in names]


def test_the_tests_of_the_mutants_package_come_first_and_those_of_files_that_execute_much_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide, far, near = (
        "tests/simulation/a.py::test_a",
        "tests/actors/test_b.py::test_b",
        "tests/protocol/test_c.py::test_c",
    )
    wide_too, narrow = "tests/protocol/test_d.py::test_d", "tests/protocol/test_d.py::test_e"
    new, real = "tests/headgate/test_f.py::test_f", "tests/spark/test_g.py::test_g"
    line = on_line_with("return self.last_seq", "nothing returned")
    monkeypatch.setattr(reached, "breadth", lambda: {wide: 9, far: 2, near: 3, wide_too: 5, narrow: 1, real: 9})
    monkeypatch.setattr(reached, "tests_by_line", lambda file: {line.line: [wide, wide_too, narrow, far, near]})
    monkeypatch.setattr(reached, "spark_tests_by_line", lambda file: {line.line: [real]})
    monkeypatch.setattr(reached, "unrecorded", lambda: [new])
    assert list(trial.stages(line)) == [[new], [near, wide_too, narrow], [far, wide]]
    monkeypatch.setattr(reached, "unrecorded", list)
    monkeypatch.setattr(reached, "all_tests", lambda: [far, near, narrow])
    monkeypatch.setattr(reached, "tests_by_line", lambda file: {line.line: [], 5: [far, narrow]})
    assert list(trial.stages(line)) == [[real], [narrow], [far], [near]]  # only its import executes it
    monkeypatch.setattr(reached, "tests_by_line", lambda file: {line.line: []})
    assert list(trial.stages(line)) == [[real], [], [], [narrow, near]]  # and that of the whole module
    monkeypatch.setattr(reached, "tests_by_line", lambda file: {})
    assert list(trial.stages(line)) == [[real], [], [], [narrow, near]]  # or nothing, except perhaps other processes


@pytest.mark.parametrize("tests", ["this_process_is_right", "another_process_is_right"])
@pytest.mark.parametrize("imported", [False, True])
def test_the_process_of_the_tests_has_the_mutant_and_so_have_those_that_they_start(
    place: trial.Workplace, monkeypatch: pytest.MonkeyPatch, imported: bool, tests: str
) -> None:
    wrong = on_line_with("return self.last_seq", "nothing returned")
    monkeypatch.setattr(reached, "lines_of_imports", lambda file: {wrong.line} if imported else set())
    monkeypatch.setattr(reached, "tests_by_line", lambda file: {})
    monkeypatch.setattr(trial, "stages", lambda drawn: iter([about_forks(tests)]))
    outcome = place.try_out(wrong)
    assert (outcome.verdict, bool(outcome.fresh)) == ("caught", imported)


@pytest.mark.parametrize(
    ("path", "text", "kind", "name"),
    [
        (STREAMS, "return self.last_seq", "nothing returned", "confirmed_seq"),
        ("protocol/wire/format.py", "TOKEN_BYTES_MAX = ", "other constant", None),  # a constant of a module
        ("protocol/barrier_tracker/__init__.py", "hold_events: bool = True", "other constant", None),  # and of a class
        ("protocol/attempts/operator.py", "kill: bool = False) ->", "other constant", None),  # a default
    ],
)
def test_what_an_import_executes_is_in_no_function(path: str, text: str, kind: str, name: str | None) -> None:
    function = on_line_with(text, kind, path).function()
    assert (function and function.name) == name


def test_a_process_that_begins_with_the_mutant_and_cannot_import_it_has_seen_it(
    place: trial.Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / STREAMS).read_bytes()
    at = text.index(b"class OutgoingStream")
    broken = Drawn(STREAMS, 1, at, at, "1 // 0\n", "error")
    monkeypatch.setattr(reached, "tests_by_line", lambda file: {})
    monkeypatch.setattr(trial, "stages", lambda drawn: iter([about_forks("this_process_is_right")]))
    outcome = place.try_out(broken)
    assert (outcome.verdict, outcome.fresh) == ("caught", "executed at an import")


def test_forks_of_a_process_draw_the_same_random_numbers(place: trial.Workplace) -> None:
    for _ in range(2):
        assert place.forks.failure(about_forks("random_numbers"), 60) == ""
    first, second = (place.folder / "numbers").read_text(encoding="utf-8").splitlines()
    assert first == second


def test_a_fork_leaves_no_process_behind_and_has_failed_if_it_ends_by_itself(place: trial.Workplace) -> None:
    assert place.forks.failure(about_forks("processes_that_stay"), 60) == ""
    for started in (place.folder / "started").read_text(encoding="utf-8").split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(started), 0)
    [test] = about_forks("an_end_of_the_process")
    assert place.forks.failure([*about_forks("random_numbers"), test], 60) == test


def test_a_fresh_process_collects_a_few_files_first() -> None:
    tests = [f"tests/test_{number}.py::test_{name}" for number in range(6) for name in "ab"]
    assert list(trial._in_portions(iter([tests, []]))) == [tests[:8], tests[8:], [], []]


def test_a_mutant_whose_tests_take_too_long_together_is_undecided(
    place: trial.Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, tests = on_line_with("return self.last_seq", "nothing returned"), reached_by_streams()
    monkeypatch.setattr(place, "_mutant_s", 0.0)
    monkeypatch.setattr(reached, "lines_of_imports", lambda file: set())
    monkeypatch.setattr(trial, "stages", lambda drawn: iter([tests]))
    monkeypatch.setattr(reached, "tests_by_line", lambda file: {wrong.line: tests})
    assert place.try_out(wrong).verdict == "undecided"
    monkeypatch.setattr(reached, "tests_by_line", lambda file: {})
    assert place.try_out(wrong).verdict == "unreached"
    assert (ROOT / STREAMS).read_bytes() == (place.folder / STREAMS).read_bytes()


def test_without_a_record_of_this_code_it_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reached, "DATA", tmp_path / "none")
    assert trial.try_all(1, 1, ["protocol"], 1, ()) == 2
    assert "make coverage" in capsys.readouterr().err


def test_what_was_tried_before_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial, "RESULTS", tmp_path)
    monkeypatch.setattr(reached, "is_recorded", lambda: True)
    chosen = draw(2, 5, [STREAMS])
    record = trial.Record(2, 5, [STREAMS])
    record.add(chosen[0], trial.Outcome("caught", "a test", 1, 0.5))
    record.add(chosen[1], trial.Outcome("survived", "", 9, 0.5))
    assert trial.try_all(2, 5, [STREAMS], 1, ()) == 1
    said = capsys.readouterr().out
    assert "2 of them tried before" in said
    assert f"survived: {chosen[1].diff()}" in said
    assert "protocol: 2 drawn, 1 not caught" in said

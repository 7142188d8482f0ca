# SPDX-License-Identifier: Apache-2.0

"""Every mutant matches the current source, and a few of them are caught here; ``make mutants`` hunts them all."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import tests.mutants.hunt as hunting
from protocol.barrier_tracker import rescale
from protocol.gateway.machine import GatewayMachine
from protocol.streams import IncomingStream
from tests.mutants import cited_tests, results, runner
from tests.mutants.__main__ import hunt_all, main
from tests.mutants.catalogue import BY_NAME, MUTANTS
from tests.mutants.hunt import Budget, Finding, hunt
from tests.mutants.mutant import DoesNotFit, Edit, Mutant

SMALL = Budget(worlds=60, states=100, tests=False)
NOTHING = Budget(worlds=0, states=0, histories=0, tests=False)
NO_BARRIER = "tests/protocol/test_gateway_checkpoints.py::test_no_barrier_leaves_when_the_attempt_is_over"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_product_and_leaves_it_as_it_was(mutant: Mutant) -> None:
    before = [edit.function() for edit in mutant.edits]
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.apply(monkeypatch)
        assert all(edit.function() is not old for edit, old in zip(mutant.edits, before, strict=True))
    assert all(edit.function() is old for edit, old in zip(mutant.edits, before, strict=True))
    assert "\n+" in mutant.diff()


def test_each_mutant_has_a_separate_name_and_says_what_it_breaks() -> None:
    assert len(BY_NAME) == len(MUTANTS)
    for mutant in MUTANTS:
        assert mutant.rules, mutant.name
        assert mutant.what.endswith("."), mutant.name


def test_a_mutant_that_does_not_fit_any_more_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Edit("protocol.gateway.machine:GatewayMachine._take", "what never stood there", "pass")
    nowhere = Edit("protocol.gateway.machine:GatewayMachine._no_such_method", "x", "y")
    for edit in (gone, nowhere):
        with pytest.raises(DoesNotFit, match=r"mutant 'old one': .*protocol\.gateway\.machine:GatewayMachine\._"):
            Mutant("old one", "It is gone.", "feared", ("H1",), (edit,)).apply(monkeypatch)


def test_a_change_reaches_methods_tables_properties_and_importers() -> None:
    take = GatewayMachine._take
    with pytest.MonkeyPatch.context() as monkeypatch:
        BY_NAME["taken-items-are-lost"].apply(monkeypatch)
        BY_NAME["confirms-before-taken"].apply(monkeypatch)
        BY_NAME["rescale-loses-held-events"].apply(monkeypatch)
        from protocol.barrier_tracker import tracker
        from protocol.barrier_tracker.rescale import rescaled
        from protocol.gateway.machine import _ACTS, _DISPATCH, GatewayState
        from protocol.gateway.types import ItemTaken

        changed = GatewayMachine._take
        assert changed is not take
        assert _ACTS[ItemTaken] is changed
        assert _DISPATCH[GatewayState.ATTACHED][ItemTaken] is changed
        assert rescaled is rescale.rescaled is vars(tracker)["rescaled"]
        stream = IncomingStream()
        stream.advance(5)
        assert stream.confirmable_seq == 1
    assert GatewayMachine._take is take
    stream = IncomingStream()
    stream.advance(5)
    assert stream.confirmable_seq == 0


def test_a_module_that_is_imported_with_a_mutant_in_the_product_loses_it_like_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = ModuleType("protocol.imported_late")
    monkeypatch.setitem(sys.modules, late.__name__, late)
    with pytest.MonkeyPatch.context() as change:
        BY_NAME["rescale-loses-held-events"].apply(change)
        exec("from protocol.barrier_tracker.rescale import rescaled\ntable = {'rescale': rescaled}", vars(late))
        assert late.rescaled.__code__.co_filename.startswith("<mutant of ")
    assert late.rescaled is late.table["rescale"] is rescale.rescaled


@pytest.mark.parametrize(
    "name",
    [
        "completes-with-confirmations-pending",  # FLINK-21996, H42
        "reopens-at-barrier-injection",  # FLINK-28606, H41
        "upward-not-held",  # FLINK-26029, H31
        "reset-overtakes-completion",  # FLINK-20290, H18
        "abort-is-not-told",  # H16
        "events-twice",  # H22
        "attempt-numbers-start-again",  # H2
        "complete-before-durable",  # H50
        "failure-without-reset",  # H10
    ],
)
def test_a_bug_is_caught_by_the_simulation(name: str) -> None:
    check_caught(BY_NAME[name], SMALL)


@pytest.mark.parametrize(
    "name",
    [
        "audit-never-comes",  # H19
        "second-run-not-refused",  # H68
        "class-kept-over-runs",  # H68
        "action-goes-on-with-old-splits",  # H68
        "kept-output-is-enumerated-anew",  # H56
        "restore-without-record",  # H64
    ],
)
def test_a_bug_that_needs_a_rare_history_is_caught_by_its_hunter(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_caught(BY_NAME[name], Budget(worlds=1, states=1, tests=False))
    assert len(capsys.readouterr().out.splitlines()) == 1  # the product's log stays out of the report


def check_caught(mutant: Mutant, budget: Budget) -> None:
    finding = hunt(mutant, budget)
    print(f"{finding.where}: {finding.seen}")
    assert finding.seen
    assert finding.rule.startswith(("H", "invariant"))


def test_a_healthy_product_is_not_accused_on_a_machine_however_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = itertools.count(step=3600.0)
    monkeypatch.setattr(hunting, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    monkeypatch.setattr(hunting, "ROUNDS", (Budget(worlds=2, states=5), Budget()))
    same = Edit("protocol.gateway.machine:GatewayMachine._ignore", "pass", "pass  # all is well")
    budget = Budget(worlds=5, states=10, histories=1)
    finding = hunt(Mutant("none", "Nothing is wrong.", "feared", ("H1",), (same,)), budget)
    assert (finding.seen, finding.looked) == ("", 5)


@pytest.mark.parametrize(
    ("instead", "seen"),
    [("__import__('os')._exit(7)", "Died: exit status 7"), ("any(iter(int, 1))", "Stuck")],
)
def test_a_mutant_that_takes_its_process_with_it_has_shown_itself(
    instead: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "STUCK_S", 0.5)
    edit = Edit("protocol.gateway.machine:GatewayMachine._take", "self._inbound.take(input.seq, input.part)", instead)
    found: dict[str, Finding] = {}
    mutant = Mutant("fatal", "Nothing comes back.", "feared", ("H1",), (edit,))
    runner.run([mutant], SMALL, 1, lambda mutant, finding: found.update({mutant.name: finding}), lambda running: None)
    assert found["fatal"].seen.startswith(seen)


def test_the_command_lists_the_catalogue_and_shows_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert f"{len(MUTANTS)} mutants" in capsys.readouterr().out
    assert main(["--list", "taken-items-are-lost"]) == 0
    shown = capsys.readouterr().out
    assert "-    self._inbound.take(input.seq, input.part)\n+    pass\n" in shown


@pytest.mark.long
def test_the_command_tells_who_was_caught_and_who_survived(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events-twice", "complete-before-durable", "--jobs", "2"]) == 0
    assert "2 of 2 caught" in capsys.readouterr().out
    assert hunt_all([BY_NAME["held-not-failed"]], Budget(worlds=1, states=10, histories=1, tests=False), jobs=1) == 1
    assert "survived: held-not-failed" in capsys.readouterr().out


def test_the_command_tells_the_story_of_a_catch(capsys: pytest.CaptureFixture[str]) -> None:
    finding = hunt(BY_NAME["events-twice"], SMALL)
    seed = finding.where.removeprefix("seed ")
    assert main(["events-twice", "--seed", seed, "--story"]) == 0
    assert f"seen: {finding.seen}" in capsys.readouterr().out


def test_a_hunt_begins_where_its_mutant_was_caught_before() -> None:
    assert hunt(BY_NAME["events-twice"], NOTHING).seen == ""
    for place in (("simulation", "seed 3"), ("exploration", "scope tiny"), ("parts", "seed 1")):
        finding = hunt(BY_NAME["events-twice"], NOTHING, place=place)
        assert (finding.hunter, finding.where) == place
        assert finding.seen


def test_tests_that_cite_a_rule_of_the_mutant_come_first_and_those_of_its_package_before_others() -> None:
    tests = list(cited_tests.tests_of(BY_NAME["drains-on-failure"]))  # H42
    assert NO_BARRIER in tests
    assert all(test.startswith("tests/protocol/") for test in tests[: tests.index(NO_BARRIER)])
    assert any(test.startswith("tests/conformance/") for test in tests)


def test_a_test_that_fails_with_a_mutant_and_passes_without_it_has_caught_it() -> None:
    found: dict[str, Finding] = {}
    mutants = [BY_NAME["drains-on-failure"], BY_NAME["expires-too-soon"]]
    places = {mutant.name: (cited_tests.HUNTER, NO_BARRIER) for mutant in mutants}
    runner.run(mutants, NOTHING, 1, lambda mutant, finding: found.update({mutant.name: finding}), print, places)
    caught, missed = (found[mutant.name] for mutant in mutants)
    assert (caught.hunter, caught.where) == (cited_tests.HUNTER, NO_BARRIER)
    assert caught.seen.startswith("AssertionError")
    assert not missed.seen  # this test does not notice it


def test_a_test_that_fails_without_the_mutant_too_has_caught_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cited_tests, "_run", lambda tests, *options: (tests[0], "boom"))
    assert cited_tests.run([NO_BARRIER], "drains-on-failure") == ("", "")


@pytest.mark.parametrize(
    "by",
    [
        "tests/protocol/test_gateway_checkpoints.py::test_no_such_test",
        "tests/protocol/test_no_such_file.py",
        "tests/protocol/test_state.py::"  # long
        "test_a_list_may_have_more_entries_than_an_event_and_takes_steps_of_bounded_size[1000000]",
    ],
)
def test_a_mutant_that_names_no_test_to_run_is_an_error_and_not_caught(by: str) -> None:
    mutant = replace(BY_NAME["drains-on-failure"], by=by)
    found: list[Finding] = []
    with pytest.raises(cited_tests.NoTestRuns, match="finds no test to run in"):
        runner.run([mutant], NOTHING, 1, lambda mutant, finding: found.append(finding), lambda running: None)
    assert found == []


def test_a_hunt_goes_on_if_the_test_that_caught_its_mutant_before_is_gone() -> None:
    place = (cited_tests.HUNTER, "tests/protocol/test_gateway_checkpoints.py::test_no_such_test")
    assert hunt(BY_NAME["drains-on-failure"], NOTHING, place=place).seen == ""


def test_the_file_of_results_has_mutants_that_exist_in_the_order_of_the_catalogue() -> None:
    known = results.read()
    assert list(known) == [mutant.name for mutant in MUTANTS if mutant.name in known]


@pytest.mark.long
def test_the_command_resumes_with_the_mutants_that_are_not_yet_caught_in_this_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results.json")
    results.RESULTS.write_text("{}", encoding="utf-8")
    arguments = ["events-twice", "barrier-twice", "--resume", "--jobs", "2"]
    assert main(arguments) == 0
    assert "2 of 2 caught" in capsys.readouterr().out
    assert all(result.rule for result in results.read().values())
    assert list(results.read()) == ["barrier-twice", "events-twice"]
    text = results.RESULTS.read_text(encoding="utf-8")
    results.RESULTS.write_text(text.replace(results.code_of(BY_NAME["events-twice"]), "0"), encoding="utf-8")
    assert main(arguments) == 0
    assert "1 of 1 caught" in capsys.readouterr().out
    assert main(arguments) == 0
    assert "nothing to hunt" in capsys.readouterr().out


def test_a_mutant_that_was_not_seen_is_hunted_again_unless_it_is_argued_for() -> None:
    argued = next(mutant for mutant in MUTANTS if mutant.argued)
    for mutant, done in ((argued, True), (BY_NAME["events-twice"], False)):
        unseen = results.Result(results.code_of(mutant), "all", "seeds 0..", "")
        assert results.is_done(mutant, unseen) is done
        assert not results.is_done(mutant, None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--resume", "--worlds", "5"], "--resume records hunts with the default seed and worlds"),
        (["no-such-mutant"], "no such mutant: no-such-mutant"),
        (["--jobs", "0"], "--jobs and --worlds are at least 1"),
        (["--story"], "--story takes one NAME"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert text in capsys.readouterr().err

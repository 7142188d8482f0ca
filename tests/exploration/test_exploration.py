# SPDX-License-Identifier: Apache-2.0

"""The exploration itself: it is complete, its reductions make no difference, and it detects violations."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from protocol.gateway.inbound import GatewayInbound
from protocol.gateway.machine import GatewayMachine
from protocol.subtask.inbound import SubtaskInbound
from protocol.subtask.outbound import SubtaskOutbound
from tests.exploration import SCOPES, Scope, counts, explore
from tests.exploration.__main__ import main
from tests.exploration.driver_ends import LedgerEnd
from tests.exploration.freezing import freeze
from tests.exploration.search import Search
from tests.exploration.world import BUDGETS, COORDINATOR, GATEWAY, LEDGER, LINK, SLOTS, TASK, TRACKER, WIDTH, State
from tests.mutants.catalogue import BY_NAME
from tests.mutants.hunt import changed

TINY = SCOPES["tiny"]
# Scopes that take a second or two. The 45,788 states of in-doubt take longer, so they are left to make test-long.
QUICK = (
    "abandoned-drop",
    "abandoned-fail",
    "deferred-drop",
    "forged-batch",
    "forged-unheard",
    "in-flight-ordered",
    "inputs",
    "inputs-again",
    "inputs-two",
    "loss-tolerant",
    "permits",
    "permits-apart",
    "permits-finish",
    "recorded-request",
    "tiny",
    "tiny-drop",
    "tiny-fail",
    "unheld",
    "unheld-fail",
    "unheld-permits",
)


@pytest.mark.parametrize("name", [*QUICK, pytest.param("in-doubt", marks=pytest.mark.long)])
def test_every_state_of_a_tiny_scope_keeps_the_contract(name: str) -> None:
    """The invariant, H10, H16, H18, H20-H26, H30-H32, H40-H45, H48, H64, H75, H174, H180, H181; as many as known."""
    result = explore(SCOPES[name])
    assert result.violation is None, str(result.violation)
    assert result.complete
    assert counts.differences([result]) == [], "intended? python -m tests.exploration --scope NAME --write"


def ledgers_of(name: str) -> set[Hashable]:
    """Return every ledger that occurs in a scope, without the events and checkpoints that it knows nothing about."""
    search = Search(replace(SCOPES[name], events_up=0, events_down=0, checkpoints=0))
    assert search.run().violation is None
    ledgers = search.world.ledgers
    return {freeze(cast(LedgerEnd, ledgers.part(number)).ledger) for number in range(len(ledgers.facts))}


def test_forged_claims_meet_another_ledger_in_each_of_their_scopes() -> None:
    """forged-batch and forged-unheard have the same numbers, and yet they are not the same scope (H75)."""
    batch, unheard = ledgers_of("forged-batch"), ledgers_of("forged-unheard")
    assert len(batch) > 1
    assert len(batch & unheard) == 1  # before its task has started


def test_the_file_of_counts_has_scopes_that_exist_in_the_order_of_the_list() -> None:
    assert list(counts.read()) == [name for name in SCOPES if name in counts.read()]


def ends_of(scope: Scope, *, reduce: bool) -> set[Hashable]:
    """Return the states in which nothing more can happen, without the numbers of this one search."""
    search = Search(scope, reduce=reduce, symmetric=False)
    result = search.run(keep_ends=True)
    assert result.violation is None, str(result.violation)
    return {plain_form(search, state) for state in search.ends}


def plain_form(search: Search, state: State) -> Hashable:
    world = search.world
    parts: list[object] = [
        world.trackers.part(state[TRACKER]),
        world.coordinators.part(state[COORDINATOR]),
        world.ledgers.part(state[LEDGER]),
    ]
    for base in range(SLOTS, len(state), WIDTH):
        parts += [world.gateways.part(state[base + GATEWAY]), world.tasks.part(state[base + TASK])]
        link = world.links.values[state[base + LINK]]
        parts.append((link.bound, link.open, link.broken, bool(link.up or link.down or link.old)))
    # What a kept item of a checkpoint would confirm if it were sent again. See the last of the immediate reductions.
    return world.budgets[state[BUDGETS]], *[freeze(part, frozenset({"confirmed"})) for part in parts]


SMALL = (
    TINY,
    Scope("", "a broken connection", events_down=0, drops=1),
    Scope("", "a broken connection, and an event down", events_up=0, drops=1),
    Scope("", "two", subtasks=2, events_down=0, checkpoints=0),
    Scope("", "two and a checkpoint", subtasks=2, events_up=0, events_down=0),
    Scope("", "a failure", attempts=2, failures=1, events_up=0, events_down=0),
    Scope("", "a failure and events up", attempts=2, failures=1, events_down=0, checkpoints=0),
    Scope("", "a failure and events down", attempts=2, failures=1, events_up=0, checkpoints=0),
    Scope("", "two concurrent ones, apart", events_up=0, events_down=0, checkpoints=2, concurrent=2, apart=True),
    Scope("", "an abort", events_up=1, events_down=0, checkpoints=1, aborts=1),
    Scope("", "a request, and a savepoint", events_down=0, checkpoints=0, savepoints=1, asks=True, in_snapshot=True),
    Scope("", "a deferred answer", events_down=0, asks=True, defers=True),
    Scope("", "an abandoned request", events_down=0, asks=True, defers=True, abandons=True),
    Scope("", "an abandoned request, nothing held", 1, 1, 2, 0, asks=True, defers=True, abandons=True, unheld=True),
    Scope("", "a deferred answer, a failure", 1, 2, 1, 0, checkpoints=0, failures=1, asks=True, defers=True),
    Scope("", "late, and it finishes", events_up=0, events_down=1, late=1, finishes=True),
    Scope("", "a greeting", attempts=2, events_up=0, checkpoints=0, failures=1, greets=True),
    Scope("", "not confirmed in time", attempts=2, events_up=0, checkpoints=0, timeouts=1),
    Scope("", "a forged claim", events_up=0, events_down=0, finishes=True, forgeries=1),
    Scope("", "loss-tolerant, not confirmed in time", events_up=0, events_down=2, timeouts=2, tolerant=True),
    Scope("", "another input", events_up=0, events_down=0, checkpoints=0, finishes=True, runs=1),
    Scope("", "an interrupted input", 1, 1, 0, 0, checkpoints=0, finishes=True, runs=1, interruptions=1),
    Scope("", "a driver that dies", 1, 1, 0, 0, checkpoints=0, finishes=True, runs=1, restarts=1),
    Scope("", "two parts", events_up=2, events_down=0, parts=2),
    Scope("", "a permit", events_up=0, events_down=1, permits=1),
    Scope("", "a permit, a broken connection", events_up=0, events_down=0, drops=1, permits=1),
    Scope("", "nothing held, two permits", events_down=0, window=1, permits=2, unheld=True),
    Scope("", "an async stage", events_up=2, events_down=0, in_flight=1),
    Scope("", "files, an abort", events_down=0, aborts=1, files=True),
    Scope("", "files that are swept", 1, 1, 1, 0, 1, 2, files=True, sweeps=True),
    Scope("", "files, a savepoint, and it finishes", 1, 1, 1, 0, 1, 0, 1, finishes=True, files=True),
    Scope("", "nothing held, files, an upload fails", events_down=0, upload_failures=1, unheld=True, files=True),
    Scope("", "nothing held", unheld=True),
    Scope("", "nothing held, an abort", events_down=0, aborts=1, unheld=True),
    Scope("", "nothing held, a bound", events_up=2, events_down=0, window=1, unheld=True),
    Scope("", "nothing held, a deferred answer", events_down=0, asks=True, defers=True, unheld=True),
    Scope("", "nothing held, an urgent event, two", 1, 1, 0, 1, concurrent=2, checkpoints=2, urgent=True, unheld=True),
    Scope("", "nothing held, a failure", attempts=2, failures=1, events_down=0, unheld=True),
)


@pytest.mark.parametrize("scope", SMALL, ids=lambda scope: scope.name or scope.about)
def test_the_orders_that_are_left_out_lead_to_the_same_ends(scope: Scope) -> None:
    assert ends_of(scope, reduce=True) == ends_of(scope, reduce=False)


class Orbits(Search):
    """Counts how many states each explored state represents."""

    count = 0

    def note(self, state: State, parent: int, choice: int) -> bool:
        is_new = super().note(state, parent, choice)
        if is_new and self.world.exchanged is not None:
            self.count += 1 if self.world.other(state) == state else 2
        return is_new


@pytest.mark.parametrize(
    "scope",
    [
        Scope("", "a checkpoint", subtasks=2, events_up=0, events_down=0),
        Scope("", "all kinds", 2, 2, 0, 0, checkpoints=0, failures=1, drops=1),
    ],
    ids=lambda scope: scope.about,
)
def test_the_states_stand_for_all_that_differ_in_names(scope: Scope) -> None:
    """Count each state with its renamed equivalents: exactly as many are covered as without the reduction."""
    orbits = Orbits(scope, reduce=False)
    assert orbits.run().complete
    plain = Search(scope, reduce=False, symmetric=False).run()
    assert orbits.count == plain.states
    assert orbits.result.states < plain.states


# --- detection of violations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mutant", "scope", "rule"),
    [
        ("held-missing-from-snapshot", "tiny", "invariant"),
        ("reopens-at-barrier-injection", "apart", "H23"),  # FLINK-28606
        ("abort-is-not-told", "tiny-fail", "H16"),
        ("resend-without-suppression", "tiny-drop", "H30"),
        ("taken-items-are-lost", "tiny", "H26"),
        ("waits-for-the-loss-tolerant", "loss-tolerant", "H28"),
        ("expires-twice", "loss-tolerant", "H72"),
        ("claim-accepted", "forged", "H75"),
        ("unknown-accepted", "forged-batch", "H75"),
        ("outside-is-held-by-the-task", "permits", "H45"),
        ("outside-is-held-by-the-gateway", "permits", "H45"),
        ("answer-outside-waits-for-the-snapshot", "unheld-permits", "H45"),
        ("complete-before-its-files", "files", "H190"),
        ("upload-is-not-stopped", "files-aborts", "H190"),
        ("sweeps-at-an-abort", "sweeps", "H190"),
        ("savepoint-copies-nothing", "files-savepoint", "H193"),
        ("folder-is-not-told", "files-apart", "H193"),
        ("held-event-loses-its-part", "parts-fail", "H150"),
        ("event-up-loses-its-part", "parts", "H150"),
        ("the-limit-of-calls-is-exceeded", "in-flight", "H181"),
        ("positions-of-the-run-before-are-used", "inputs", "H174"),
        ("positions-of-an-interrupted-run-are-lost", "inputs", "H174"),
        ("another-name-is-taken-for-an-interrupted-one", "inputs-interrupted", "H174"),
    ],
)
def test_a_known_bug_is_seen(mutant: str, scope: str, rule: str) -> None:
    with changed(BY_NAME[mutant]):
        found = explore(SCOPES[scope]).violation
    assert found is not None
    assert found.rule == rule
    assert 2 <= len(found.path) <= 40, str(found)


def test_a_barrier_that_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """H48: without a clock that runs out, the checkpoint would wait forever."""
    monkeypatch.setattr(SubtaskInbound, "_meet_barrier", lambda self, checkpoint_id, effects: None)
    found = explore(TINY).violation
    assert found is not None
    assert found.rule == "H45"


def test_an_attempt_given_up_after_its_last_word_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """H24, H48: once a bug of ours; the task came back and waited forever for the confirmation of its completion."""
    next_deadline = GatewayMachine.next_deadline

    def runs_forever(self: GatewayMachine) -> float | None:
        with pytest.MonkeyPatch.context() as for_the_clock:
            for_the_clock.setattr(GatewayInbound, "finished", property(lambda self: False))
            return next_deadline(self)

    monkeypatch.setattr(GatewayMachine, "next_deadline", runs_forever)
    found = explore(SCOPES["goodbye-drop"]).violation
    assert found is not None
    assert any("Finish" in line for line in found.path)
    assert any("OutOfTime" in line for line in found.path)


# --- the program ----------------------------------------------------------------------------------------------------


def test_the_program_lists_the_scopes_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "tiny" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--scope", "none-such"])
    assert "no scope 'none-such'" in capsys.readouterr().err


def test_the_program_tells_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scope", "tiny", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "complete" in out
    assert "the contract holds" in out


def test_the_program_compares_the_numbers_with_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "counts.json"
    file.write_text('{"tiny": {"states": 1}}', encoding="utf-8")
    before = counts.read()["tiny"]
    monkeypatch.setattr(counts, "COUNTS", file)
    arguments = ["--scope", "tiny", "--jobs", "1", "--check"]
    assert main(arguments) == 1
    assert "and {'states': 1} in counts.json" in capsys.readouterr().out
    assert main([*arguments, "--write"]) == 1
    assert main(arguments) == 0
    assert counts.read() == {"tiny": before}


def test_the_program_fails_with_the_story_of_a_violation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SubtaskOutbound, "_snapshot_held", lambda self: ())
    assert main(["--scope", "tiny", "--jobs", "1"]) == 1
    assert "the task: 0#0" in capsys.readouterr().out.replace("the task 0#0", "the task: 0#0")


def test_an_abandoned_search_says_so() -> None:
    result = explore(SCOPES["deep"], states_max=2000)
    assert not result.complete
    assert result.violation is None

# SPDX-License-Identifier: Apache-2.0

"""H65: which runs and failures belong to which action."""

from __future__ import annotations

import pytest

from actors.coordination import ResetNotSupported
from actors.coordination.engine.inputs import ActionId
from protocol.attempts import RunEnded, RunStarted
from protocol.facts import ApplicationEnded, JobEnded, JobStarted
from spark_bridge.bridge.runs import ACTIONS_KEPT, RunningJobs
from spark_bridge.driver.actions import ActionIds, names_of


class Story(RunningJobs):
    """A short form of the bridge's notices."""

    def start(self, operator_id: str, run_id: int, action_id: str = "") -> None:
        self.registered(run_id, action_id)
        self.note(RunStarted(operator_id, run_id))

    def end(self, operator_id: str, run_id: int, *, succeeded: bool) -> None:
        self.note(RunEnded(operator_id, run_id, succeeded, "by the test"))

    def count(self, action_id: str) -> int:
        return self.failures_of(action_id)[0]


def test_a_job_counts_as_that_of_its_runs_until_it_ends() -> None:
    """Spark names a job only here: one that has ended is not cancelled, and costs no memory."""
    story = Story()
    story.start("a", 3)
    story.start("b", 5)
    story.hear(JobStarted(1, (2, 3)))
    story.hear(JobStarted(2, (4,)))
    story.hear(JobStarted(3, (5,), "an action"))
    assert story.job_ids == [1, 3]
    story.hear(JobEnded(1, True, ""))
    story.hear(JobEnded(7, True, ""))
    assert story.job_ids == [3]
    assert not story.application_ended
    story.hear(ApplicationEnded())
    assert story.job_ids == []
    assert story.application_ended


def test_a_failure_belongs_to_the_action_of_its_run_and_to_no_other() -> None:  # H65
    story = Story()
    story.begin_action("a", None)
    story.begin_action("b", None)
    story.start("words", 1, "a")
    story.start("lines", 2, "b")
    error = ValueError("mine")
    story.failed("words", error)
    story.end("words", 1, succeeded=False)
    story.end("lines", 2, succeeded=True)
    assert story.failures_of("a") == (2, error)
    assert story.failures_of("b") == (0, None)
    assert (story.operators_of("a"), story.operators_of("b")) == (frozenset({"words"}), frozenset({"lines"}))


@pytest.mark.parametrize("action", ["a", ""], ids=["marked", "unmarked"])
def test_a_run_that_failed_without_a_coordinators_cause_says_why_and_what_to_do(action: str) -> None:  # H65
    story = Story()
    story.begin_action("a", None)
    story.start("words", 1, action)
    assert story.failures_of("a") == (0, None)
    story.end("words", 1, succeeded=False)
    count, cause = story.failures_of("a")
    assert count == 1
    assert "although the action returned: operator 'words': by the test" in str(cause)
    assert "call run again with the same action and input_id" in str(cause)


def test_a_failure_between_two_jobs_belongs_to_the_action_that_ran_the_operator_last() -> None:  # H65
    story = Story()
    story.begin_action("a", None)
    story.start("words", 1, "a")
    story.end("words", 1, succeeded=True)
    story.failed("words", ValueError("after the run"))
    assert story.count("a") == 1
    story.end_action("a")
    story.begin_action("b", None)
    story.failed("words", ValueError("before the next run"))  # that run resets the coordinator
    story.start("words", 2, "b")
    assert story.count("b") == 0


def test_a_refused_reset_belongs_to_the_action_whose_run_is_about_to_start() -> None:  # H65, H68
    story = Story()
    story.begin_action("a", None)
    story.start("words", 1, "a")
    story.end("words", 1, succeeded=True)
    story.begin_action("b", None)
    refusal = ResetNotSupported("by the test")
    story.failed("words", refusal)
    story.start("words", 2, "b")
    assert story.failures_of("a") == (0, None)
    assert story.failures_of("b") == (1, refusal)


def test_runs_that_name_no_action_belong_to_one_that_has_no_other() -> None:  # H65
    story = Story()
    story.begin_action("with its own", None)
    story.begin_action("without", None)
    story.start("words", 1, "with its own")
    story.start("lines", 2)
    story.end("lines", 2, succeeded=False)
    assert (story.count("with its own"), story.operators_of("with its own")) == (0, frozenset({"words"}))
    assert (story.count("without"), story.operators_of("without")) == (1, frozenset({"lines"}))


def test_a_run_that_began_before_the_action_is_not_its_own() -> None:  # H65
    story = Story()
    story.start("lines", 1)
    story.begin_action("a", None)
    story.end("lines", 1, succeeded=False)
    assert (story.count("a"), story.operators_of("a")) == (0, frozenset())


def test_named_operators_are_those_of_the_action_whatever_the_runs_say() -> None:  # H65
    story = Story()
    story.begin_action("a", frozenset(["words"]))
    story.start("words", 1, "another")
    story.start("lines", 2, "a")
    story.failed("words")
    story.failed("lines")
    assert (story.count("a"), story.operators_of("a")) == (1, frozenset({"words"}))


def test_a_run_that_two_actions_share_belongs_to_both_where_the_second_names_the_operator() -> None:  # H65
    story = Story()
    story.begin_action("computes", None)
    story.begin_action("reads", frozenset(["words"]))
    story.start("words", 1, "computes")
    story.end("words", 1, succeeded=False)
    assert (story.count("computes"), story.count("reads")) == (1, 1)


def test_an_action_that_was_begun_under_an_earlier_sidecar_keeps_its_runs() -> None:  # H65
    story = Story()
    story.start("words", 1, "a")
    story.start("lines", 2, "b")
    story.begin_action("a", None, found=True)
    story.end("words", 1, succeeded=False)
    story.end("lines", 2, succeeded=False)
    assert (story.count("a"), story.operators_of("a")) == (1, frozenset({"words"}))


def test_a_run_that_cannot_go_on_is_one_failure_of_its_action() -> None:  # H65
    story = Story()
    story.begin_action("a", None)
    story.registered(1, "a")
    assert story.mark_failed(1, "words")
    assert not story.mark_failed(1, "words")
    assert story.count("a") == 1


def test_tasks_that_never_run_do_not_fill_the_records() -> None:
    story = Story()
    for run_id in range(ACTIONS_KEPT + 1):
        story.registered(run_id, "a")
    story.begin_action("a", None)
    story.note(RunStarted("old", 0))
    assert story.operators_of("a") == {"old"}  # it is forgotten, and belongs to an action that has no other
    story.note(RunStarted("new", ACTIONS_KEPT))
    assert story.operators_of("a") == {"new"}


def test_one_operator_is_not_a_list_of_them() -> None:
    with pytest.raises(TypeError, match="must be a list"):
        names_of("words")
    assert names_of(None) is None
    assert names_of([]) == frozenset()


def test_a_run_belongs_to_the_action_that_its_tasks_name_or_to_the_only_one_that_may_have_it() -> None:  # H65, H174
    story = Story()
    story.begin_action("a", None)
    story.start("words", 1, "a")
    story.start("lines", 2)
    assert (story.action_of("words"), story.action_of("lines")) == ("a", "a")
    story.begin_action("b", None)
    story.start("lines", 3)
    assert story.action_of("lines") == "", "either of them may have it"
    story.begin_action("c", frozenset({"letters"}))
    story.start("letters", 4)
    story.end_action("a")
    story.end_action("b")
    assert story.action_of("letters") == "c"
    story.end_action("c")
    story.start("letters", 5)
    assert story.action_of("letters") == "", "a plain action"


def test_the_ids_of_one_call_of_run_share_its_call_and_input_and_no_two_calls_share_theirs() -> None:  # H174
    first, second = ActionIds("day 1"), ActionIds("day 1")
    ids = [ActionId.read(text) for text in (first.next(), first.next(), second.next())]
    assert [one.input_id for one in ids] == ["day 1"] * 3
    assert (ids[0].call, ids[0].number, ids[1].number) == (ids[1].call, 0, 1)
    assert ids[2].call != ids[0].call
    assert ActionId.read(ActionIds(None).next()).input_id is None


@pytest.mark.parametrize("wrong", ["", 5, "x" * 201, "two\nlines"])
def test_an_input_id_is_checked_when_run_is_called(wrong: object) -> None:  # H165
    with pytest.raises((TypeError, ValueError), match="input_id must"):
        ActionIds(wrong)  # type: ignore[arg-type]

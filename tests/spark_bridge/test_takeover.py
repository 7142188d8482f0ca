# SPDX-License-Identifier: Apache-2.0

"""Which runs of a dead sidecar its successor lets continue (H15, H17)."""

from __future__ import annotations

from spark_bridge.bridge.runs import ActiveStage, InheritedRuns


def test_a_run_without_successes_continues() -> None:
    assert InheritedRuns([ActiveStage(3, 7, 0)]).why_not_resumable(7) == ("", ())


def test_a_partly_succeeded_run_fails_with_every_job_that_needs_it() -> None:
    text, jobs = InheritedRuns([ActiveStage(3, 7, 2), ActiveStage(4, 7, 2), ActiveStage(4, 8, 0)]).why_not_resumable(7)
    assert "2 of its tasks had already succeeded" in text
    assert jobs == (3, 4)


def test_no_run_continues_if_the_user_does_not_want_it() -> None:
    text, jobs = InheritedRuns([ActiveStage(3, 7, 0)], resume=False).why_not_resumable(7)
    assert "--takeover fail" in text
    assert jobs == (3,)


def test_a_run_that_begins_after_the_takeover_is_like_any_other() -> None:
    assert InheritedRuns([ActiveStage(3, 7, 5)], resume=False).why_not_resumable(9) == ("", ())


def test_the_jobs_that_were_found_have_their_stages() -> None:
    runs = InheritedRuns([ActiveStage(3, 8, 0), ActiveStage(3, 7, 1), ActiveStage(4, 7, 1)])
    assert runs.job_stages() == {3: (7, 8), 4: (7,)}

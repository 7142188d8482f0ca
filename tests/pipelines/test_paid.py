# SPDX-License-Identifier: Apache-2.0

"""What the soak test counts in the notes of a paid service: each kind of violation, and none of what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipelines.real.paid import PaidCalls, note

FILES = {
    # Task 0 of attempt 0 has results for rows 1 and 2 before checkpoint 5 begins. It is lost, and attempt 1 restores 5.
    "cuts": """
        100.0 9 ready 0 0
        100.0 9 ready 1 0
        103.0 9 begins 5
        104.0 9 lost 0 0
        104.1 9 reset 0 5
        104.2 9 ready 0 1
    """,
    "landed": """
        1 0 0 101.0
        2 0 0 102.0
        3 0 0 103.5
    """,
    "calls": """
        1 0 0 100.9
        2 0 0 101.9
        3 0 0 103.4
        3 0 1 104.3
        4 0 1 104.4
    """,
    # Attempt 0 of subtask 0 is lost while it asks question 2, so attempt 0 of subtask 1 may ask.
    "asked": """
        1 0 0 begins 100.9
        1 0 0 ends 101.0
        2 0 0 begins 103.9
        2 1 0 begins 104.1
        2 1 0 ends 104.2
        1 1 0 begins 105.0
        1 1 0 ends 105.1
    """,
    "raised": "105.0",
}


def judged(folder: Path, planted: dict[str, str]) -> dict[str, int]:
    for name, text in FILES.items():
        lines = [line.strip() for line in (text + planted.get(name, "")).splitlines() if line.strip()]
        for line in lines:
            note(folder / name, line)
    calls = PaidCalls(str(folder), port=0, ordered=True, per_s=10, total=10, cached=True)
    return {name: count for name, count in calls.wrong().items() if count}


@pytest.mark.parametrize(
    ("planted", "wrong"),
    [
        pytest.param({}, {}, id="nothing"),
        pytest.param({"calls": "\n2 0 1 104.5"}, {"paid twice": 1}, id="a result of the restored checkpoint"),
        pytest.param({"calls": "\n3 0 1 104.5"}, {}, id="a result that came after it"),
        pytest.param({"calls": "\n2 1 0 104.5"}, {}, id="another attempt, which has restored nothing"),
        pytest.param({"calls": "\n7 1 0 104.5" * 6}, {"over the budget": 1}, id="more than the budget"),
        pytest.param({"calls": "\n7 1 0 105.5" * 6}, {}, id="more after it was raised"),
        pytest.param({"calls": "\n7 1 0 200.0" * 46}, {"over the limit": 46}, id="a burst"),
        pytest.param({"asked": "\n9 0 1 begins 106.0\n9 1 0 begins 106.1"}, {"asked twice": 1}, id="two at a time"),
        pytest.param({"asked": "\n9 0 1 begins 106.0\n9 0 1 begins 106.1"}, {}, id="the same attempt again"),
        pytest.param(
            {"asked": "\n9 0 1 begins 106.0\n9 1 0 begins 106.1", "cuts": "\n106.05 10 begins 6"},
            {},
            id="another driver began in between",
        ),
    ],
)
def test_the_judge_of_a_paid_service_counts_each_violation(
    tmp_path: Path, planted: dict[str, str], wrong: dict[str, int]
) -> None:  # H111, H180, H182, H183
    assert judged(tmp_path, planted) == wrong


def test_the_use_of_the_limit_counts_the_burst_as_permitted(tmp_path: Path) -> None:
    calls = PaidCalls(str(tmp_path), port=0, ordered=True, per_s=10)
    burst = [f"0 0 0 {100.0}"] * 20
    steady = [f"0 0 0 {100.0 + 0.1 * number}" for number in range(100)]
    for line in burst + steady:
        note(tmp_path / "calls", line)
    used = calls.used(99.0)
    assert used is not None
    assert 0.99 < used < 1.01
    assert calls.used(100.0) == pytest.approx(99 / (20 + 98), abs=0.01)
    assert calls.used(109.0) is None


def test_a_note_that_a_killed_process_has_not_finished_is_left_out(tmp_path: Path) -> None:
    calls = PaidCalls(str(tmp_path), port=1, ordered=True)
    file = calls.file("calls")
    note(file, 1, "0 1", 2.5)
    whole = file.read_text()
    for cut in range(len(whole)):
        file.write_text(whole + whole[:cut])
        note(file, 7, "1 0", 3.5)
        assert calls.notes("calls") == [["1", "0", "1", "2.5"], ["7", "1", "0", "3.5"]], whole[:cut]
        file.write_text(whole + whole[:cut])
        assert calls.notes("calls")[:1] == [["1", "0", "1", "2.5"]]

# SPDX-License-Identifier: Apache-2.0

"""A short run of every target that needs no socket, and the whole corpus (H50, H60, H61, H62)."""

from __future__ import annotations

import pytest

from tests.fuzz import corpus, pure
from tests.fuzz.target import CaseFailed, Target, run_case, run_cases

TARGETS = {target.name: target for target in pure.TARGETS}
CASES = {"checkpoint": 100}
KEPT = [(target, name, data) for target in TARGETS for name, data in corpus.inputs(target)]


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_bytes_are_refused_or_understood_and_nothing_else(name: str) -> None:  # H60, H61, H62
    run_cases(TARGETS[name], first=1, count=CASES.get(name, 200))


@pytest.mark.parametrize(("target", "data"), [(t, data) for t, _, data in KEPT], ids=[f"{t}-{n}" for t, n, _ in KEPT])
def test_what_is_kept_in_the_corpus_is_refused_or_understood(target: str, data: bytes) -> None:  # H62
    replay = TARGETS[target].replay
    assert replay is not None, f"{target} takes no bytes: its folder in the corpus is of no use"
    replay(data)


def test_a_case_that_fails_says_how_to_run_it_again() -> None:
    seen = []

    def fail(random: object) -> None:
        seen.append(random.random())  # type: ignore[attr-defined]
        raise KeyError("a defect")

    target = Target("sample", "", fail)
    for _ in range(2):
        with pytest.raises(CaseFailed, match=r"python -m tests.fuzz --target sample --seed 7 --cases 1") as failed:
            run_case(target, 7)
        assert isinstance(failed.value.__cause__, KeyError)
    assert seen[0] == seen[1]  # the same case

# SPDX-License-Identifier: Apache-2.0

"""A short run of every target that needs no socket, and the whole corpus (H50, H60, H61, H62)."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from random import Random
from typing import Any

import pytest

from protocol.errors import LocalProtocolError
from protocol.wire.codec import encode_message
from protocol.wire.messages import Message
from tests.fuzz import below, corpus, pure, samples, status_attackers
from tests.fuzz.target import CaseFailed, Target, run_case, run_cases

TARGETS = {target.name: target for module in (pure, below, status_attackers) for target in module.TARGETS}
CASES = {"checkpoint": 100}
KEPT = [(target, name, data) for target in TARGETS for name, data in corpus.inputs(target)]


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_bytes_are_refused_or_understood_and_nothing_else(name: str) -> None:  # H60, H61, H62, H157
    run_cases(TARGETS[name], first=1, count=CASES.get(name, 200))


WRONG: tuple[Any, ...] = (
    *(None, True, -1, 1.5, 2**63, 2**64, 10**400, float("nan"), object()),
    *("", "\ud800", "x" * 5000, b"", bytes(70_000), bytearray(b"x")),
    *([], {}, (1, b""), ((1, 2, 3),), (("1", b""),), ((1, bytearray(b"x")),)),
)


@pytest.mark.parametrize("kind", samples.MESSAGE_KINDS)
def test_a_message_with_a_wrong_field_leaves_as_a_valid_one_or_is_refused_by_name(kind: type[Message]) -> None:
    message = samples.message(Random(1), kind)
    for field, wrong in product(fields(kind), WRONG):
        changed = replace(message, **{field.name: wrong})
        try:
            data = encode_message(changed, samples.LIMITS)
        except LocalProtocolError as error:
            pure.check_error(error, kind.__name__)
        else:
            assert pure.MESSAGES.accepts(data[4:]), f"{changed!r:.300} has left, and would be refused"


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

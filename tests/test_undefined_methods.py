# SPDX-License-Identifier: Apache-2.0

"""A class of a user that lacks a method says so, with the names of the class and of the method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from actors.actor import Actor, DirectActor
from headgate import SubtaskOperator
from headgate.sinks import TwoPhaseCommitter, TwoPhaseSink, TwoPhaseWriter


def unfinished(base: type) -> Any:
    return type(f"Unfinished{base.__name__}", (base,), {})()


@pytest.mark.parametrize(
    ("base", "call", "method"),
    [
        (TwoPhaseWriter, lambda one: one.write("a record"), "write(self, record)"),
        (TwoPhaseWriter, lambda one: one.prepare(), "prepare(self)"),
        (TwoPhaseCommitter, lambda one: one.commit([]), "commit(self, committables)"),
        (TwoPhaseCommitter, lambda one: one.abort([]), "abort(self, names)"),
        (TwoPhaseCommitter, lambda one: one.prepared(), "prepared(self)"),
        (TwoPhaseSink, lambda one: one.target, "the property target"),
        (TwoPhaseSink, lambda one: one.writer(None), "writer(self, context)"),
        (TwoPhaseSink, lambda one: one.committer(None), "committer(self, context)"),
        (SubtaskOperator, lambda one: one.process(iter(())), "process(self, records)"),
    ],
)
def test_a_class_that_lacks_a_method_names_it(base: type, call: Callable[[Any], object], method: str) -> None:
    with pytest.raises(NotImplementedError) as raised:
        call(unfinished(base))
    assert str(raised.value) == f"Unfinished{base.__name__} must define {method}"


async def test_an_actor_that_lacks_a_method_names_it() -> None:
    with pytest.raises(NotImplementedError, match=r"^UnfinishedActor does not implement receive\(\): define "):
        await unfinished(Actor).receive(None, "a message")
    with pytest.raises(NotImplementedError, match=r"^UnfinishedDirectActor does not implement handle\(\): define "):
        await unfinished(DirectActor).receive(None, "a message")

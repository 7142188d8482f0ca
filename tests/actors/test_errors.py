# SPDX-License-Identifier: Apache-2.0

"""Errors explain themselves, and survive the transfer between processes."""

from __future__ import annotations

import pickle

import pytest

import actors
from actors.errors import ActorError


def an_error(kind: type[ActorError]) -> ActorError:
    arguments: dict[str, tuple[object, ...]] = {
        "MailboxFull": ("a/b", 3),
        "AskTimeout": ("a/b", "Get", 1.5),
        "HandlerFailed": ("a/b", "Get"),
        "HandlerCancelled": ("a/b", "Get"),
        "WouldDeadlock": ("a/b", "space"),
    }
    return kind(*arguments.get(kind.__name__, ("a/b",)))


KINDS = sorted(
    (
        value
        for name in actors.__all__
        if isinstance(value := getattr(actors, name), type) and issubclass(value, ActorError)
        if value is not ActorError
    ),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", KINDS)
def test_errors_name_the_actor_and_can_be_pickled(kind: type[ActorError]) -> None:
    error = an_error(kind)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__
    assert "a/b" in str(error)

# SPDX-License-Identifier: Apache-2.0

"""What a refused input leaves behind, and what a refused message is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from protocol.streams import RefuseMessage
from tests.exploration.freezing import freeze

BUT = frozenset({"_refused"})
"""The submission that waits for ``CapacityAvailable``, which a refusal may leave (H27)."""


@contextmanager
def unchanged(machine: object) -> Iterator[None]:
    """Check that the body leaves a machine as it was."""
    before = freeze(machine, BUT)
    yield
    assert freeze(machine, BUT) == before


def refusal(effects: Sequence[object]) -> str:
    """Return why the message was refused, which must be the only effect."""
    [effect] = effects
    assert isinstance(effect, RefuseMessage)
    return effect.why

# SPDX-License-Identifier: Apache-2.0

"""Every order of steps of the two ends of a tunnel, and bugs that this sees."""

from __future__ import annotations

import pytest

from tests.exploration.tunnel import TUNNEL_SCOPES, TunnelScope, TunnelViolation, explore_tunnel
from tests.mutants.catalogue import BY_NAME
from tests.mutants.hunt import changed

STATES = {
    "breaks": 8765,
    "failures": 1530,
    "both-ways": 24509,
    "both-ways-break": 82242,
    "both-ways-fail": 31618,
    "resets": 8292,
    "resets-break": 5983,
    "resets-fail": 1417,
    "two-channels": 22688,
    "scarce-down": 5427,
    "scarce-up": 50790,
    "few-packets": 67227,
}
LARGE = 30_000


@pytest.mark.parametrize(
    "scope",
    [
        pytest.param(one, id=one.name, marks=[] if STATES[one.name] < LARGE else pytest.mark.long)
        for one in TUNNEL_SCOPES
    ],
)
def test_every_order_of_steps_brings_each_byte_once_within_bounds(scope: TunnelScope) -> None:  # H196, H197
    result = explore_tunnel(scope)
    assert result.ends
    assert result.states == STATES[scope.name], "intended? Correct the number, and say why it differs"


@pytest.mark.parametrize(
    ("mutant", "scope", "seen"),
    [
        ("responses-begin-without-what-was-lost", "breaks", "data waits for a keepalive"),
        ("packet-is-forgotten-when-sent", "failures", "data waits for a keepalive"),
        ("end-overtakes-data", "both-ways", "has data after its end"),
        ("reset-is-not-sent", "resets", "is over at one end only"),
        ("data-of-a-reset-channel-is-passed-on", "resets", "after the end of the channel"),
    ],
)
def test_a_known_bug_of_the_tunnel_is_seen(mutant: str, scope: str, seen: str) -> None:
    [small] = (one for one in TUNNEL_SCOPES if one.name == scope)
    with changed(BY_NAME[mutant]), pytest.raises(TunnelViolation, match=seen):
        explore_tunnel(small)

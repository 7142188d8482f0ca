# SPDX-License-Identifier: Apache-2.0

"""The interface of every state machine.

``handle(input, now)`` takes a past-tense fact and returns imperatives, which the shell carries out *in order*. ``now``
is a reading of any monotonic clock, in seconds. ``next_deadline()`` says when the shell must call
``handle(TimePassed(), now)`` at the latest. A refused input raises ``LocalProtocolError`` or ``RemoteProtocolError``
and changes nothing. ``check_invariants()`` raises ``AssertionError`` if the state is impossible; tests and the
simulator call it after each step.
"""

from __future__ import annotations

from enum import Enum

from protocol.values import value


@value
class TimePassed:
    """The clock has reached a deadline (or any later moment)."""


class Reaction(Enum):
    """A machine's reaction to an input in a given state: the cells of its table. No machine uses all of them."""

    ACT = "act"
    IGNORE = "ignore"
    REFUSE = "refuse"  # a message: dropped, and reported with ``RefuseMessage`` (H3)
    FAIL = "fail"  # an event: accepted, and failed in the same step; never raised at the sender (H21, H26)
    ENDED = "ended"  # ``AttemptOver`` is raised: this is how the operator learns of the end
    ILLEGAL = "illegal"  # ``LocalProtocolError`` is raised

# SPDX-License-Identifier: Apache-2.0

"""A deep picture of a machine, to show that a refused input changed nothing."""

from __future__ import annotations

from collections.abc import Hashable

from tests.exploration.freezing import freeze


def snapshot(thing: object) -> Hashable:
    """Freeze a machine, without the submission that waits for ``RoomAvailable``, which a refusal may leave (H27)."""
    return freeze(thing, frozenset({"_refused"}))

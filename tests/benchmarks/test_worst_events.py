# SPDX-License-Identifier: Apache-2.0

"""The events of ``benchmarks.worst_events`` are what their names say."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.worst_events import colliding_keys, events, measure
from protocol.errors import RemoteProtocolError
from protocol.wire.codec import decode_event


def test_every_event_is_decoded_in_many_steps_or_refused() -> None:
    for name, data in events():
        if name.startswith("refused"):
            with pytest.raises(RemoteProtocolError, match="more than"):
                decode_event(data)
        else:
            assert decode_event(data)
        assert measure(data)[2] > 10, name


def test_colliding_keys_look_at_occupied_slots_first() -> None:
    keys = colliding_keys(1024, 600)
    assert len(set(keys)) == 600
    assert max(Counter(key % 1024 for key in keys).values()) > 1

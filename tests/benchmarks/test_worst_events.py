# SPDX-License-Identifier: Apache-2.0

"""The events of ``benchmarks.worst_events`` are what their names say."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.worst_events import READ_BYTES, colliding_keys, events, measure, snapshots, steps_of_frame
from protocol.errors import RemoteProtocolError
from protocol.wire.codec import decode_event, decode_event_in_steps


@pytest.mark.long
def test_every_event_is_decoded_in_many_steps_or_refused() -> None:
    for name, data in events():
        if name.startswith("refused"):
            with pytest.raises(RemoteProtocolError, match="more than"):
                decode_event(data)
        else:
            assert decode_event(data)
            assert measure(decode_event_in_steps(data))[2] > 10, name


def test_every_snapshot_is_decoded_with_its_last_read() -> None:
    for name, data in snapshots():
        assert len(data) > 2**18, name
        if len(data) < 2**20:
            assert measure(steps_of_frame(data))[2] == -(-len(data) // READ_BYTES) + 1


def test_colliding_keys_look_at_occupied_slots_first() -> None:
    keys = colliding_keys(1024, 600)
    assert len(set(keys)) == 600
    assert max(Counter(key % 1024 for key in keys).values()) > 1

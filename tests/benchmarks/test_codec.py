# SPDX-License-Identifier: Apache-2.0

"""``benchmarks.codec`` compares events with what msgpack alone makes of the same values."""

from __future__ import annotations

import msgpack
import pytest

from benchmarks import codec
from protocol.wire.codec import decode_event, encode_event


def test_plain_events_have_the_bytes_that_msgpack_alone_makes() -> None:
    for name, event in codec.plain_events():
        data = encode_event(event)
        assert data == msgpack.packb(event), name
        assert decode_event(data) == event, name


def test_the_other_events_arrive_as_they_were() -> None:
    for name, event, plain in codec.other_events():
        arrived = decode_event(encode_event(event))
        assert (type(arrived), arrived) == (type(event), event), name
        assert type(event) is not type(plain) or event != plain, name
        msgpack.packb(plain)


@pytest.mark.long
def test_it_prints_a_row_for_each_event(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(codec, "ROUNDS", 1)
    monkeypatch.setattr(codec, "BATCH_S", 0)
    assert codec.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len([*codec.plain_events(), *codec.other_events()])

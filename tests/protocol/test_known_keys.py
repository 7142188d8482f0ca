# SPDX-License-Identifier: Apache-2.0

"""What a discovering source has found, in 15 bytes for each split (H164)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from protocol import known_keys
from protocol.known_keys import KnownKeys
from protocol.wire.state import run_steps


def restored(keys: KnownKeys) -> KnownKeys:
    again = KnownKeys()
    run_steps(again.restore_in_steps(list(keys.buckets()), keys.period))
    return again


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_set_that_forgets_what_a_whole_period_did_not_see(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """H164. Compared with a dict of the period in which each key was last seen. Buckets are few, so they are full."""
    random_ = random.Random(seed)
    digest = known_keys._digest
    monkeypatch.setattr(known_keys, "_digest", lambda key: (bytes((0, digest(key)[0][1] % 3)), digest(key)[1]))
    keys, model, period = KnownKeys(), dict[str, int](), 0
    for _ in range(2000):
        key = f"file-{random_.randrange(300)}"
        match random_.randrange(40):
            case 0:
                keys.forget_unseen()
                model = {key: seen for key, seen in model.items() if seen == period}
                period += 1
            case 1:
                keys = restored(keys)
            case number if number < 20:
                assert keys.see(key) == (key in model)
                if key in model:
                    model[key] = period
            case _:
                assert keys.add(key) == (key not in model)
                model[key] = period
        assert len(keys) == len(model)
    assert all(map(keys.see, model))


def test_a_digest_across_two_records_is_not_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of one record and the beginning of the next look like a third one."""
    digests = {"a": b"x" * 14, "b": b"y" * 14, "across": b"x" * 7 + b"\x00" + b"y" * 6}
    monkeypatch.setattr(known_keys, "_digest", lambda key: (b"pp", digests[key]))
    keys = KnownKeys()
    assert keys.add("a")
    assert keys.add("b")
    assert not keys.see("across")
    assert keys.add("across")
    assert keys.see("across")
    assert all(map(keys.see, digests))


def test_a_key_is_any_value_of_an_event_and_none_is_taken_for_another() -> None:
    distinct: list[Any] = ["1", 1, 1.0, True, b"1", ("1",), ["1"], np.arange(2), np.int64(1), "\udcff", "", None]
    keys = KnownKeys()
    assert all(map(keys.add, distinct))
    assert not any(map(keys.add, distinct))
    assert len(restored(keys)) == len(distinct)


def test_a_key_takes_fifteen_bytes_however_long_it_is() -> None:  # H164
    keys = KnownKeys()
    for number in range(50_000):
        keys.add(f"{'long/' * 40}{number}")
    buckets = list(keys.buckets())
    assert sum(map(len, buckets)) == 50_000 * 15 + 2 * len(buckets)

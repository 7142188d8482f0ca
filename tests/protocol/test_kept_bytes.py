# SPDX-License-Identifier: Apache-2.0

"""The account of what a coordinator keeps is right after any calls, beside a naive one (H157)."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from protocol.kept_bytes import KeptBytes

OWNERS = ("items", "done", 1, 2)
LIMIT = 100


@pytest.mark.parametrize("seed", range(50))
def test_an_account_is_what_its_owners_keep_and_refuses_what_is_above_its_limit(seed: int) -> None:
    random = Random(seed)
    account, naive, beside = KeptBytes(LIMIT, "what tasks have added", "add less"), Counter[object](), 0
    for _ in range(300):
        owner, other, size = random.choice(OWNERS), random.choice(OWNERS), random.choice((0, 1, 10, 50, LIMIT))
        what = random.random()
        some = random.choice((None, size))
        if what < 0.45:
            if sum(naive.values()) + size > LIMIT + beside:
                with pytest.raises(
                    ValueError, match="what tasks have added would exceed the limit of 100 bytes: add less"
                ):
                    account.charge(owner, size)
            else:
                account.charge(owner, size)
                naive[owner] += size
        elif what < 0.5:
            account.keep(owner, size)
            naive[owner] += size
        elif what < 0.55:
            account.keep_beside(owner, size)
            naive[owner] += size
            beside += size
        elif what < 0.97:
            moved = naive[owner] if some is None else min(some, naive[owner])
            naive[owner] -= moved
            if what < 0.75:
                account.move(owner, other, some)
                naive[other] += moved
            else:
                assert account.release(owner, some) == moved
        else:
            account.clear()
            naive.clear()
            beside = 0
        kept = {one for one, bytes_ in naive.items() if bytes_}
        assert account.total == sum(naive.values())
        assert set(account.owners()) == kept
        assert {one for one in OWNERS if account.keeps(one)} == kept

# SPDX-License-Identifier: Apache-2.0

"""What may have a secret in it, with a pattern that says it plainly and is too slow for long texts."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.secret_names import PEM, SECRET_NAMES, may_have_secret, unquoted

PLAIN = re.compile(rf"(?is){SECRET_NAMES}[\"')\]]*(?:[\s=:,]|\\+[ntr])|{PEM}|:.*@")
PIECES = (
    "pass", "word", "token", "access", "key", "_id", "auth", "sig", "x", "_", "7", "Pw", "é", "=", ":", ",", " ", "\n",
    "\\n", "\\", '"', "')", "]", "@", "//", "%3D", "%2540", "%", PEM,
)  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@example("accesskeyid'): 1")
@example("user:pw\n@host")
@example("password7\\n")
@example("authx=")
def test_a_text_may_have_a_secret_exactly_if_the_plain_pattern_finds_one(text: str) -> None:  # H76
    assert may_have_secret(text) is any(PLAIN.search(one) is not None for one in (text, unquoted(text)))


@pytest.mark.parametrize("text", ["x" * 200_000, "key'" * 50_000])
def test_a_long_text_is_searched_too(text: str) -> None:  # H76
    """With a search that begins anew at each character of a word, this takes longer than a test may."""
    assert not may_have_secret(text)
    assert may_have_secret(f"{text}key=1")

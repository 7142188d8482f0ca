# SPDX-License-Identifier: Apache-2.0

"""The benchmark of hostile peers knows each kind that the fuzzers know, and prints a line for each (H157)."""

from __future__ import annotations

import re

import pytest

from benchmarks.hostility import kinds, main
from tests.fuzz.attackers import INSIDERS, STRANGERS, TLS_STRANGERS
from tests.fuzz.below import BELOW
from tests.fuzz.hostile_parts import PARTS
from tests.fuzz.status_attackers import STATUS_ATTACKS


def test_every_kind_of_hostile_peer_that_the_fuzzers_know_has_a_line() -> None:  # H157
    plain, encrypted = kinds(tls=False), kinds(tls=True)
    attacks = (*STRANGERS, *INSIDERS, *STATUS_ATTACKS, *PARTS, "ring")
    assert len(plain) == len(attacks)
    assert len(encrypted) == len(attacks) + len(TLS_STRANGERS) + len(BELOW)


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["--tls"]], ids=["plain", "tls"])
def test_no_kind_restarts_another_operator(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It returns 1 if one does. How long anything takes is not looked at."""
    words = ["bad_frame", "babble", "costly", "task at permits", "task at sink-files", *(["below"] if options else [])]
    assert main(["--seconds", "0.5", *options, *(one for word in words for one in ("--only", word))]) == 0
    rows = re.findall(r"^\| .+ \|.*\| 0 \| .*\|$", capsys.readouterr().out, flags=re.MULTILINE)
    assert len(rows) >= len(words)

# SPDX-License-Identifier: Apache-2.0

"""The three ports of a sidecar in a separate process, with strangers and hostile peers at each (H61, H62, H76, H77)."""

from __future__ import annotations

from random import Random

import anyio
import pytest

from tests.fuzz import three_ports
from tests.fuzz.target import Target, run_cases

STRANGERS = 1_200
"""More than the process may have files."""


@pytest.mark.long
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_driver_attaches_while_thousands_of_strangers_come_to_each_port(*, tls: bool) -> None:  # H61, H62, H77
    """With 1,024 files. 1,100 idle connections ended the process, and 900 kept drivers out."""
    figures = anyio.run(lambda: three_ports.attach_in_a_crowd(Random(1), STRANGERS, tls=tls))
    assert min(figures["opened"].values()) >= STRANGERS
    assert figures["files_most"] < three_ports.FILES_MAX


@pytest.mark.long
@pytest.mark.parametrize("target", three_ports.TARGETS, ids=lambda target: target.name)
def test_no_attack_at_any_port_ends_the_process_or_harms_its_driver(target: Target) -> None:  # H61, H62, H76, H77
    run_cases(target, first=1, count=1)

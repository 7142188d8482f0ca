# SPDX-License-Identifier: Apache-2.0

"""The same history has the same effects in every process, whatever the hash seed of its strings."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.protocol.every_input import tell
from tests.protocol.test_every_input_gateway import GatewayWalk
from tests.protocol.test_every_input_ledger import LedgerWalk
from tests.protocol.test_every_input_subtask import SubtaskWalk
from tests.protocol.test_every_input_tracker import TrackerWalk

WALKS = (GatewayWalk, LedgerWalk, SubtaskWalk, TrackerWalk)
PROGRAM = "from tests.protocol.test_every_input_hashes import told; print(told())"


@cache
def told() -> str:
    """Return every input, effect and error of a few walks of each machine, one per line."""
    return "\n".join(line for walk in WALKS for line in tell(walk, range(5), 20))


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_a_machine_does_not_depend_on_the_order_of_hashes(hash_seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    root = Path(__file__).parents[2]
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    there, here = process.stdout.splitlines(), told().splitlines()
    for number, (theirs, ours) in enumerate(zip(there, here, strict=True)):
        assert theirs == ours, f"line {number}"

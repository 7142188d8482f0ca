# SPDX-License-Identifier: Apache-2.0

"""The conformance suite with a sink in memory, thoroughly: it tests the pattern itself."""

from __future__ import annotations

import pytest

from headgate.testing import SinkCase, sink_cases
from tests.spark_bridge.sinks.memory import MemoryTarget


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "one by one"])
@pytest.mark.parametrize("case", sink_cases(histories=100), ids=str)
def test_the_pattern_keeps_its_promises(case: SinkCase, atomic: bool) -> None:  # H31, H64, H83, H140, H141
    case.run(MemoryTarget(atomic=atomic))

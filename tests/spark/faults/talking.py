# SPDX-License-Identifier: Apache-2.0

"""The state in which most faults strike: two running subtasks, each of which has exchanged events with its
coordinator."""

from __future__ import annotations

from typing import Any

from tests.spark.recorder import Callback

FIRST_ATTEMPTS_WAIT: dict[tuple[int, int], list[Any]] = {(0, 0): ["hello"], (1, 0): ["hello"]}
"""The script for two subtasks whose first attempts say hello and wait for more."""


def both_talk(story: list[Callback]) -> bool:
    """A condition for ``Recorder.wait_for``."""
    return {callback[1] for callback in story if callback[0] == "event"} == {0, 1}

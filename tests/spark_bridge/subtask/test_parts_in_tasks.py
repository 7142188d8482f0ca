# SPDX-License-Identifier: Apache-2.0

"""What tasks see of the ready-made parts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from spark_bridge.primitives.group.driver import Group
from spark_bridge.primitives.group.task import GroupInTask
from spark_bridge.primitives.permits.driver import Permits
from spark_bridge.primitives.permits.task import PermitsInTask
from spark_bridge.primitives.shared_value.driver import SharedValue
from spark_bridge.primitives.shared_value.task import SharedValueInTask
from spark_bridge.primitives.work_queue.driver import WorkQueue
from spark_bridge.primitives.work_queue.task import WorkQueueInTask

PARTS: list[tuple[Any, Any]] = [
    (Group, GroupInTask),
    (Permits, PermitsInTask),
    (SharedValue, SharedValueInTask),
    (WorkQueue, WorkQueueInTask),
]


@pytest.mark.parametrize(("on_driver", "in_task"), PARTS)
def test_every_name_that_only_the_driver_has_says_so_in_a_task(on_driver: Any, in_task: Any) -> None:  # H165
    names = {name for name in {*dir(on_driver)} - {*dir(in_task)} if not name.startswith("_")}
    assert names == in_task._on_driver
    part = in_task("mine")
    for name in names:
        with pytest.raises(AttributeError, match=f"^{name} of the .* 'mine' is for the driver, and this is a task"):
            getattr(part, name)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = part.nonsense
    assert repr(pickle.loads(pickle.dumps(part))) == repr(copy.copy(part)) == repr(part)

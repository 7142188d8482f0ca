# SPDX-License-Identifier: Apache-2.0

"""What a function for a task must not contain."""

from __future__ import annotations

from typing import Any


class StaysOnDriver:
    """Refuses to be sent to a task, in place of Spark, which would name a SparkContext that the user did not send."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} stays on the driver, so a function for a task cannot use it: give Spark "
            "`handle.subtask(function)`. The function gets a context: its send_event and request reach the coordinator"
        )


__all__ = ["StaysOnDriver"]

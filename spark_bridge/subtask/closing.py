# SPDX-License-Identifier: Apache-2.0

"""Calls users' ``close``, which fails nothing: what it raises is logged, and everything else is closed too.

The outputs are complete then, or another error is on its way to Spark, which says more. An exit is treated alike:
a process that ended in ``close`` would lose a result that is complete.
"""

from __future__ import annotations

import logging

from protocol.describing import type_name
from spark_bridge.subtask.operator import SubtaskOperator

_log = logging.getLogger(__name__)


def close_quietly(operator: SubtaskOperator) -> None:
    """Close an operator. Never raises."""
    try:
        operator.close()
    except BaseException:
        _log.exception("%s.close() raised", type_name(operator))

# SPDX-License-Identifier: Apache-2.0

"""Finds mistakes in an operator's class before it runs."""

from __future__ import annotations

from protocol.arguments import AT_LEAST_1, POSITIVE, check_settings
from protocol.describing import show
from protocol.overrides import NeverCalled, errors_in_overrides, names_never_called
from spark_bridge.subtask.operator import SubtaskOperator
from spark_bridge.subtask.source import SplitReader

__all__ = ["check_operator", "overrides_handle_event"]

_MISTAKEN = {
    "handle_event_from_operator": "handle_event",
    "handle_event_from_coordinator": "handle_event",
    "handle_operator_event": "handle_event",
    "checkpoint_coordinator": "snapshot_state",
    "reset_to_checkpoint": "open",
}


def overrides_handle_event(operator_class: type) -> bool:
    """Whether the operator handles the coordinator's events, urgent ones or others."""
    return (
        getattr(operator_class, "handle_event", None) is not SubtaskOperator.handle_event
        or getattr(operator_class, "handle_urgent", None) is not SubtaskOperator.handle_urgent
    )


def check_operator(operator: object) -> list[NeverCalled]:
    """Check an operator or its class; return the methods whose names may be misspelt.

    Raises ``TypeError`` or ``ValueError`` for a setting of the class with a wrong value, and
    ``TypeError`` if it is not a ``SubtaskOperator``, if a method is ``async def`` or a generator where that
    cannot work, and if a method's name is clearly a misspelling of one that the framework calls.
    """
    subject_class = operator if isinstance(operator, type) else type(operator)
    if not issubclass(subject_class, SubtaskOperator):
        raise TypeError(f"{show(operator)} is not a SubtaskOperator: derive its class from SubtaskOperator")
    check_settings(operator, SubtaskOperator)
    if issubclass(subject_class, SplitReader):
        check_settings(operator, SplitReader, splits_open_max=AT_LEAST_1, rate_limit_per_s=POSITIVE)
    errors, doubtful = errors_in_overrides(operator), []
    interface = next(one for one in subject_class.__mro__ if one.__module__.startswith("spark_bridge."))
    for finding in names_never_called(operator, interface, _MISTAKEN):
        if finding.certain:
            errors.append(str(finding))
        else:
            doubtful.append(finding)
    if errors:
        raise TypeError("; ".join(errors))
    return doubtful

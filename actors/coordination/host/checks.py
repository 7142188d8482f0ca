# SPDX-License-Identifier: Apache-2.0

"""Find mistakes in a coordinator's class before the coordinator starts."""

from __future__ import annotations

from typing import Any

from actors.coordination.interface import OperatorCoordinator
from actors.logs import get_logger
from protocol.describing import show
from protocol.overrides import errors_in_overrides, names_never_called

__all__ = ["check_coordinator"]

log = get_logger("headgate.coordinator")

_MISTAKEN = {
    "handle_event": "handle_event_from_operator",
    "snapshot_state": "checkpoint_coordinator",
    "restore_state": "reset_to_checkpoint",
}


def check_coordinator(coordinator: Any) -> None:
    """Check a coordinator, or the class of one, for what would fail or be ignored later.

    Raises ``TypeError`` for anything but an ``OperatorCoordinator``, for a method that must be ``async def`` and is a
    plain function or an async generator, and for a method whose name clearly misspells one of ``OperatorCoordinator``.
    A name that is only similar is logged as a warning.
    """
    if not issubclass(coordinator if isinstance(coordinator, type) else type(coordinator), OperatorCoordinator):
        raise TypeError(f"{show(coordinator)} is not an OperatorCoordinator: derive its class from OperatorCoordinator")
    errors = errors_in_overrides(coordinator)
    for finding in names_never_called(coordinator, OperatorCoordinator, _MISTAKEN):
        if finding.certain:
            errors.append(str(finding))
        else:
            log.warning("method never called", method=finding.method, did_you_mean=finding.meant)
    if errors:
        raise TypeError("; ".join(errors))

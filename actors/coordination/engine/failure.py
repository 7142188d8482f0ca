# SPDX-License-Identifier: Apache-2.0

"""Report at most one global failure between two resets of an operator (H7, H8, H15)."""

from __future__ import annotations

from collections.abc import Callable

from protocol.attempts import GlobalFailureRaised, LedgerInput


class FailureLatch:
    """Shared by an operator's tracker and its coordinator: reports the first failure of either, and ignores the rest.

    Resets are counted from 1; 0 is the time before the first. The tracker decides on a reset slightly before the
    coordinator receives it, so each reports a failure with the number of its last reset. A failure from before a reset
    that is already decided is ignored. ``report`` and ``failed`` are as in ``OperatorPorts``. Loop only.
    """

    def __init__(
        self, operator_id: str, report: Callable[[LedgerInput], None], failed: Callable[[BaseException], None]
    ) -> None:
        self._operator_id = operator_id
        self._report = report
        self._failed = failed
        self._latched = False
        self.resets = 0
        """How many resets have been decided."""

    @property
    def latched(self) -> bool:
        """Whether a failure was reported and no reset has followed it yet."""
        return self._latched

    def reset(self) -> None:
        """Record that a reset is decided."""
        self._latched = False
        self.resets += 1

    def raise_failure(self, resets: int, error: BaseException, cause: str) -> bool:
        """Report a global failure after reset ``resets``. False if its reset is already in progress."""
        if self._latched or resets < self.resets:
            return False
        self._latched = True
        self._failed(error)
        self._report(GlobalFailureRaised(self._operator_id, cause))
        return True


__all__ = ["FailureLatch"]

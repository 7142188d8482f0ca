# SPDX-License-Identifier: Apache-2.0

"""Coordinators that pass calls on to others pass all of them on."""

from __future__ import annotations

import inspect

import pytest

from actors.coordination import CoordinatorChain, OperatorCoordinator, RecreateOnReset
from headgate.testing import RecordingCoordinator

METHODS = [name for name, method in vars(OperatorCoordinator).items() if inspect.iscoroutinefunction(method)]


@pytest.mark.parametrize("wrapper", [CoordinatorChain, RecreateOnReset, RecordingCoordinator])
def test_every_method_of_a_coordinator_is_passed_on(wrapper: type[OperatorCoordinator]) -> None:  # H80, H86
    assert len(METHODS) > 10
    assert [name for name in METHODS if name not in vars(wrapper)] == []

# SPDX-License-Identifier: Apache-2.0

"""How a coordinator is given to an operator, and whether it can serve a second run (H68).

Given a class or a factory, each reset has a new coordinator: see ``RecreateOnReset``. An instance stays, so its own
``reset_to_checkpoint`` must forget the previous run. An instance without that method serves only one run.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import iscoroutine, iscoroutinefunction, signature
from typing import Any

from actors.coordination.host.part import Parts, RecreateOnReset
from actors.coordination.interface import OperatorCoordinator
from actors.logs import get_logger
from protocol.describing import name_of, show, type_name
from protocol.errors import RunRefused
from protocol.event_types import Received, Sent
from protocol.overrides import errors_in_overrides, names_never_called

__all__ = [
    "GivenCoordinator",
    "ResetNotSupported",
    "built_anew_or_kept",
    "why_not_resettable",
]

log = get_logger("headgate.coordinator")

_MISTAKEN = {
    "handle_event": "handle_event_from_operator",
    "snapshot_state": "checkpoint_coordinator",
    "restore_state": "reset_to_checkpoint",
}

GivenCoordinator = (
    OperatorCoordinator[Received, Sent]
    | RecreateOnReset[Received, Sent]
    | Callable[[], OperatorCoordinator[Received, Sent]]
)
"""An instance, or a class or factory that is called without arguments for each new coordinator."""


class ResetNotSupported(RunRefused):
    """A second run needs a reset, but the coordinator is an instance that does not override ``reset_to_checkpoint``.

    Pass the class instead of an instance, or override that method.
    """


def built_anew_or_kept(given: GivenCoordinator) -> OperatorCoordinator | RecreateOnReset:
    """How a part gets its coordinators. Nothing is built yet: a class or factory is called when the part starts.

    Raises ``TypeError``, with a fix, for anything else, for a factory that is async or needs arguments, and for a
    mistake in the class that would fail, or be ignored, later.
    """
    if isinstance(given, RecreateOnReset):
        return given
    if isinstance(given, OperatorCoordinator):
        _check_class(given)
        return given
    if isinstance(given, type) and not issubclass(given, OperatorCoordinator):
        raise TypeError(f"{show(given)} is not an OperatorCoordinator: derive it from that class")
    if isinstance(given, type):
        _check_class(given)
    if not callable(given):
        raise TypeError(f"{show(given)} is not an OperatorCoordinator: pass an instance, a class, or a factory of one")
    if iscoroutinefunction(given):
        raise TypeError(
            f"the factory {show(given)} must not be async: return the coordinator from a plain function, and "
            "await in the coordinator's start"
        )
    try:
        signature(given).bind()
    except TypeError as error:
        raise TypeError(
            f"{show(given)} cannot be called without arguments ({error}): pass a factory that supplies them, such as"
            " lambda: MyCoordinator(argument)"
        ) from None
    except ValueError:
        pass  # written in C, without a readable signature
    factory = _CheckedFactory(given)
    return RecreateOnReset(factory, name=factory.name)


class _CheckedFactory:
    """Calls the user's class or factory, and refuses a result that is not a new coordinator."""

    def __init__(self, given: Callable[[], OperatorCoordinator]) -> None:
        self.name = name_of(given)
        self._given = given
        self._latest: object = None
        self._checked = given if isinstance(given, type) else None  # the class that was already checked for mistakes

    def __call__(self) -> OperatorCoordinator:
        built: object = self._given()
        if not isinstance(built, OperatorCoordinator):
            if iscoroutine(built):
                built.close()
            remedy = "return an instance of a class that derives from it"
            if isinstance(built, RecreateOnReset):
                remedy = "pass the RecreateOnReset itself in place of the factory"
            raise TypeError(
                f"the factory {self.name} returned {show(built)}, which is not an OperatorCoordinator: {remedy}"
            )
        if built is self._latest:
            raise TypeError(
                f"the factory {self.name} returned the same coordinator again: it must build a new one at each call"
            )
        if type(built) is not self._checked:
            _check_class(built)
            self._checked = type(built)
        self._latest = built
        return built


def why_not_resettable(operator_id: str, parts: Parts) -> str:
    """Why the user's coordinators cannot serve a second run, with both fixes; empty if they can."""
    for part in parts:
        users = part.is_stage or not part.name
        if users and not part.is_built_anew and not part.overrides("reset_to_checkpoint"):
            name = type_name(part.coordinator)
            instead = f"chain({part.name}=({name}, ...))" if part.name else f"coordinate({operator_id!r}, {name}, ...)"
            return (
                f"the coordinator cannot serve a second run: it is an instance of {name}, which does not override"
                f" reset_to_checkpoint, so this run would see the state of the run before. Either pass the class or a"
                f" factory, {instead}, and each run gets a new coordinator; or override reset_to_checkpoint in {name}"
                f" so that it forgets that state"
            )
    return ""


def _check_class(coordinator: Any) -> None:
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

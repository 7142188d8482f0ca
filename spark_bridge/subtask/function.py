# SPDX-License-Identifier: Apache-2.0

"""An operator made of one plain function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from spark_bridge.subtask.operator import SubtaskOperator

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

__all__ = ["FunctionOperator", "function_operator", "operator_factory"]


class FunctionOperator(SubtaskOperator):
    """Calls ``function(records, *args)``, or ``function(context, records, *args)``, as its ``process``. No state."""

    def __init__(
        self,
        function: Callable[..., Any],
        with_context: bool,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._function = function
        self._with_context = with_context
        self._args = args
        self._kwargs = kwargs or {}
        self._context: SubtaskContext

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self._context = context

    def process(self, records: Iterator[Any]) -> Iterable[Any] | None:
        given = (self._context, records) if self._with_context else (records,)
        outputs: Iterable[Any] | None = self._function(*given, *self._args, **self._kwargs)
        return outputs


def _missing_arguments(made_by: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many arguments ``made_by`` lacks to be a function of records: 1, or 2 if it also takes the context.

    0 means that it can be called with the given arguments alone, so it is a class or a function that makes operators.
    """
    if isinstance(made_by, type):
        return 0
    try:
        signature = inspect.signature(made_by)
    except (ValueError, TypeError):
        return 0
    for missing in (0, 1, 2):
        try:
            signature.bind(*[None] * missing, *args, **kwargs)
        except TypeError:
            continue
        return missing
    return 0


def function_operator(
    made_by: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], FunctionOperator] | None:
    """Return what makes the operator of a plain function. None for a class, and for a function that makes operators."""
    missing = _missing_arguments(made_by, args, kwargs)
    return partial(FunctionOperator, made_by, missing == 2, args, kwargs) if missing else None


def operator_factory(
    made_by: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Callable[[], SubtaskOperator]:
    """Return what makes the operator, without arguments: ``made_by(*args, **kwargs)``, or a ``FunctionOperator``."""
    return function_operator(made_by, args, kwargs or {}) or partial(made_by, *args, **(kwargs or {}))

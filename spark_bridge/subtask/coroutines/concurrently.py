# SPDX-License-Identifier: Apache-2.0

"""What a program says of an async stage: the function, how many calls at a time, and what happens when one fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from protocol.arguments import AT_LEAST_1, POSITIVE, SCHEMA, checked, given
from protocol.describing import a_type, show
from protocol.overrides import errors_in_overrides, names_never_called
from spark_bridge.subtask.coroutines.calls import AsyncOperator, Settings, is_async
from spark_bridge.subtask.coroutines.retry import NO_RETRY, Retry

if TYPE_CHECKING:
    from spark_bridge.subtask.coroutines.stage import AsyncStage

__all__ = ["Concurrently", "concurrently"]


def _takes(function: Any) -> int:
    """How many arguments the function needs. Raises ``TypeError`` if that cannot be seen."""
    try:
        needed = [one for one in inspect.signature(function).parameters.values() if one.default is one.empty]
    except ValueError as error:
        raise TypeError(f"{show(function)} does not say which arguments it takes: wrap it in an async def") from error
    if any(one.kind is one.KEYWORD_ONLY for one in needed):
        raise TypeError(f"{show(function)} needs arguments by keyword: give them with functools.partial")
    return sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in needed)


class Concurrently(Settings):
    """An async stage; ``concurrently`` makes it. ``handle.run``, ``handle.subtask`` and ``chain`` take it."""

    def __call__(self) -> AsyncStage:
        from spark_bridge.subtask.coroutines.stage import AsyncStage  # it needs asyncio, which few tasks have imported

        return AsyncStage(self)

    def __repr__(self) -> str:
        return f"<concurrently {self.name}, at most {self.limit}>"


@checked(limit=AT_LEAST_1, timeout_s=POSITIVE, schema=SCHEMA)
def concurrently(
    function: Any,
    *,
    limit: int = 100,
    ordered: bool = True,
    timeout_s: float | None = None,
    retry: Retry = NO_RETRY,
    on_error: Any = "raise",
    lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None = None,
    key: Callable[[Any], str] | None = None,
    rows: bool = False,
    schema: Any = None,
) -> Concurrently:
    """Call an async function for each record, many at a time: in ``handle.run``, ``handle.subtask`` or ``chain``.

    ``concurrently(enrich, limit=200)`` is a stage whose outputs are the results of ``await enrich(record)``. In each
    task the stage has an event loop on a separate thread, so its calls go on whatever the task's own thread waits for.
    Records are taken only as there is capacity, and results that nobody takes hold back new records.
    Each call finds the context variables of the task's thread, and not those that another call has set. Its task of
    asyncio may go on with other records after it, so cancel it only while the call runs, as ``asyncio.timeout`` does.

    In a streaming ``chain``, a checkpoint holds each record in flight, and each result that has not left with its
    events and counts. So after a restore every record has exactly one result downstream, and a call whose result is in
    the restored checkpoint is not made again. Calls that were in flight, or ended later, are: give the service
    ``context.key`` if it knows idempotency keys, or put the answers into a ``Cache``. In batch mode Spark computes the
    records of a lost task again, all of them, and there the cache is what keeps answers.

    Args:
        function: ``async def enrich(record)``, or ``async def enrich(context, record)`` with a ``RecordContext``. With
            a ``lifespan``, what that gives comes before the record. Or the class of an ``AsyncOperator``.
        limit: how many records may be in flight in each task; results that have not left count.
        ordered: whether results leave in the order of their records; otherwise as they come.
        timeout_s: how many seconds one try may take. None for no limit.
        retry: how a call that fails is tried again; by default it is not.
        on_error: what happens with a record whose last try failed. ``"raise"``: the task fails with the error.
            ``"skip"``: it has no result. ``"yield"``: its result is a ``Failed``. A sink, in a streaming chain: it gets
            a dict with ``record``, ``error`` and ``tries``, exactly once. All but the first add 1 to the counter
            ``failed``. A budget that is exhausted fails the task in any case, because each further record would fail.
        lifespan: an async context manager that is entered once in each task, such as a function that opens a session.
        key: a function of the record that gives ``context.key``; by default the key is made from the content.
        rows: whether Spark's records are batches, as in ``mapInArrow`` and ``mapInPandas``, whose rows are the records:
            each a dict. The results, which are dicts too, leave in batches of the same kind.
        schema: with ``rows`` in ``mapInArrow``, the schema of the results: one of pyarrow.

    Raises ``TypeError`` for a function that is not async or takes other arguments, and ``ValueError`` for a limit below
    1 or another ``on_error``.
    """
    made = Concurrently(function, limit, ordered, timeout_s, retry, on_error, lifespan, key, rows, schema)
    with_context = _check_call(made)
    if isinstance(on_error, str) and on_error not in ("raise", "skip", "yield"):
        raise ValueError(
            'on_error must be "raise", "skip", "yield" or a sink, not ' + given("on_error", on_error, None)
        )
    if not isinstance(on_error, str) and not hasattr(on_error, "writer"):
        raise TypeError('on_error must be "raise", "skip", "yield" or a sink, not ' + given("on_error", on_error, None))
    if not getattr(on_error, "takes_rows", True):
        raise ValueError(
            f"on_error is {a_type(on_error)}, which takes no rows, but each failure is a row with "
            'record, error and tries: pass a sink of rows, such as a PostgresSink, or on_error="yield" and let the '
            "next stage make a line of it"
        )
    if schema is not None and not rows:
        raise ValueError("schema is that of the batches that rows=True makes: pass both, or none")
    return replace(made, with_context=with_context)


def _check_call(stage: Concurrently) -> bool:
    """Return whether the call takes a context. Raises ``TypeError`` if it cannot be called as it will be."""
    call = stage.call
    made_by = call.func if isinstance(call, partial) else call
    if isinstance(call, AsyncOperator):
        raise TypeError(f"{show(call)} is an AsyncOperator, but each task makes its own: pass its class")
    if isinstance(made_by, type) and issubclass(made_by, AsyncOperator):
        if stage.lifespan is not None:
            raise TypeError("an AsyncOperator has start() and stop(), so it needs no lifespan: pass one of the two")
        errors = [
            *errors_in_overrides(made_by),
            *(str(one) for one in names_never_called(made_by, AsyncOperator) if one.certain),
        ]
        if made_by.process_record is AsyncOperator.process_record and not errors:
            errors = [f"{show(made_by)} must define `async def process_record(self, context, record)`"]
        if errors:
            raise TypeError("; ".join(errors))
        return True
    if not is_async(call):
        advice = "write `async def`, or pass a plain function of the records as it is"
        if inspect.isasyncgenfunction(made_by):
            advice = "it has a `yield`, so it cannot be awaited. Return one result for each record, which may be a list"
        elif inspect.iscoroutine(call):
            call.close()  # Python would warn that it is never awaited
            advice = f"pass {call.__name__} itself, without calling it"
        raise TypeError(
            f"concurrently() needs an async function of a record, or the class of an AsyncOperator, not "
            f"{given('function', call, None)}: {advice}"
        )
    arguments = ["record"] if stage.lifespan is None else ["what lifespan gives", "record"]
    takes = _takes(call)
    if not 0 <= takes - len(arguments) <= 1:
        raise TypeError(
            f"{show(call)} needs {takes} arguments, but is given {' and '.join(arguments)}, "
            f"after a context if it takes {len(arguments) + 1}"
        )
    return takes > len(arguments)

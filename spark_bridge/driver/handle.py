# SPDX-License-Identifier: Apache-2.0

"""What the driver's code has of an operator: its handle, and the ready-made parts that are given to it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from inspect import iscoroutinefunction
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Concatenate, Generic, TypeVar, cast

from actors.logs import get_logger
from protocol.arguments import AT_LEAST_1, NAME, POSITIVE, Rule, checked
from protocol.describing import a_type, name_of, show
from protocol.event_types import Output, Received, Sent
from protocol.restart import DEFAULT_RESTART, RestartStrategy
from protocol.wire.codec import decode_event
from spark_bridge.common.endpoint import TaskEndpoint
from spark_bridge.common.errors import SidecarError
from spark_bridge.driver.environment import is_remote
from spark_bridge.observability.displays import Displays
from spark_bridge.observability.html import handle_html
from spark_bridge.observability.progress import Progress
from spark_bridge.primitives.budget.driver import Budget
from spark_bridge.primitives.budget.task import AMOUNT
from spark_bridge.primitives.cache.driver import CACHE_BYTES_MAX, LEASE_S, Cache
from spark_bridge.primitives.chain import Chain
from spark_bridge.primitives.counters.book import Book, Distribution
from spark_bridge.primitives.elsewhere import described_parts, in_task
from spark_bridge.primitives.group.driver import Group
from spark_bridge.primitives.permits.driver import Permits
from spark_bridge.primitives.primitive import PARTS_OF_ALL
from spark_bridge.primitives.shared_value.driver import SharedValue
from spark_bridge.primitives.work_queue.driver import QUEUE_BYTES_MAX, WorkQueue
from spark_bridge.primitives.work_queue.task import ITEMS, KEY
from spark_bridge.storage.errors import StorageError
from spark_bridge.storage.port import NOT_DURABLE, ValuePort
from spark_bridge.subtask.operator import FunctionOperator, SubtaskOperator, function_operator
from spark_bridge.subtask.parts import TaskPart, check_operator
from spark_bridge.task_entry import RESULT_SCHEMA, ResultTask, SubtaskTask

if TYPE_CHECKING:
    from spark_bridge.driver.config import SidecarConfig
    from spark_bridge.subtask.context import SubtaskContext

    TaskCode = (
        Callable[..., SubtaskOperator[Sent, Received]]
        | Callable[Concatenate[Iterator[Any], ...], Iterable[Output] | None]
        | Callable[Concatenate[SubtaskContext[Received], Iterator[Any], ...], Iterable[Output] | None]
        | Chain
        | None
    )

__all__ = ["OperatorHandle", "PartFactories", "StaysOnDriver"]

T = TypeVar("T")
log = get_logger("headgate.operators")

RECORDS = Rule(
    "records of this program, such as a list; over an RDD or a DataFrame, give handle.subtask(...) to mapPartitions, "
    "mapInPandas or mapInArrow, and call the action",
    lambda data: not hasattr(data, "columns") and not hasattr(data, "column_names"),
    is_type=True,
)
TASKS = Rule(
    "the operator's class, a function of the records, what subtask() returns, or None for a chain",
    lambda operator: operator is None or callable(operator) or isinstance(operator, Chain),
    is_type=True,
)


_ONLY_THE_COORDINATOR = (
    "Only an operator's coordinator sends to its tasks: ask it to with sidecar.request(OPERATOR, ...), and send in its "
    "handle_client_request(). A value for all tasks is sidecar.shared(NAME, VALUE)"
)
_INSTEAD = {
    "request": "Ask a coordinator with sidecar.request(OPERATOR, ...), which calls its handle_client_request()",
    "send_event": _ONLY_THE_COORDINATOR,
    "broadcast": _ONLY_THE_COORDINATOR,
}


class StaysOnDriver:
    """Refuses to be sent to a task, in place of Spark, which would name a SparkContext that the user did not send."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{a_type(self)} stays on the driver, so a function for a task cannot use it: give Spark "
            "`handle.subtask(function)`. The function gets a context: its send_event and request reach the coordinator"
        )

    if not TYPE_CHECKING:  # a type checker knows that there are no such methods

        def __getattr__(self, name: str) -> Any:
            """Say what there is in place of a method that users expect."""
            instead = f". {_INSTEAD[name]}" if name in _INSTEAD else ""
            text = f"{type(self).__name__!r} object has no attribute {name!r}{instead}"
            raise AttributeError(text, name=name, obj=self)


class OperatorHandle(StaysOnDriver, Generic[Received, Sent]):
    """An operator that ``coordinate`` has started: runs its tasks, and reports figures and failures.

    Thread-safe. ``subtask`` and the properties also work after the sidecar has closed, but a task that starts then
    cannot reach its coordinator and fails.

    A type checker knows what the coordinator receives and sends, and so what an operator, or a function with a context,
    must handle and may send.
    """

    def __init__(
        self,
        endpoint: TaskEndpoint,
        statistics: Callable[[], dict[str, Any]],
        failure: Callable[[], BaseException | None],
        shipped: Callable[[object], None] = lambda made_by: None,
        task_parts: Mapping[str, Callable[[], SubtaskOperator]] = PARTS_OF_ALL,
        stages: tuple[str, ...] = (),
        displays: Displays | None = None,
        run: Callable[..., Any] | None = None,
        spark: Any = None,
    ) -> None:
        """``run`` is that of the sidecar, and ``spark`` its session or context; None if it is in another process."""
        self._endpoint = endpoint
        self._statistics = statistics
        self._failure = failure
        self._shipped = shipped
        self._task_parts = dict(task_parts)
        self._stages = stages
        self._displays = displays
        self._run = run
        self._spark = spark
        self._made_by: object = None

    def _become(self, other: OperatorHandle) -> None:
        """Stand for the same operator, which another handle was made for because it was started again."""
        vars(self).update({**vars(other), "_made_by": self._made_by})

    @property
    def _makers(self) -> list[object]:
        """What makes the operators that feed each other in a task, in this order, as far as is known here."""
        if self._stages:
            return [self._task_parts.get(name) for name in self._stages]
        of_parts = [make.func for make in self._task_parts.values() if isinstance(make, partial)]
        return [*(one for one in of_parts if getattr(one, "goes_on_after_restore", False)), self._made_by]

    @property
    def _makers_by_part(self) -> dict[str, object]:
        """What makes the operators of the parts, as far as is known here; that of the user's own has the name ""."""
        return {"": self._made_by, **self._task_parts}

    def __repr__(self) -> str:
        return f"<OperatorHandle {self.operator_id!r} x {self.parallelism}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: figures so far, or that there were none within a second."""
        return handle_html(self.operator_id, self.parallelism, lambda: (self.statistics(), self.failure))

    @property
    def endpoint(self) -> TaskEndpoint:
        """The address and settings that its tasks receive."""
        return self._endpoint

    @property
    def operator_id(self) -> str:
        """The operator's name."""
        return self._endpoint.operator_id

    @property
    def parallelism(self) -> int:
        """The number of subtasks."""
        return self._endpoint.parallelism

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of a chain's stages, in the order in which data flows; empty for any other operator."""
        return self._stages

    @property
    def failure(self) -> BaseException | None:
        """The first exception with which the coordinator failed its latest job, or None."""
        return self._failure()

    @checked(operator=TASKS, data=RECORDS)
    def run(
        self,
        operator: TaskCode[Sent, Received, Output] | SubtaskTask = None,
        data: Iterable[Any] = (),
        *,
        restart: RestartStrategy = DEFAULT_RESTART,
        input_id: str | None = None,
    ) -> list[Output]:
        """Run the operator's tasks, and return what they yield, in the order of the subtasks.

        ``operator`` is the class of a ``SubtaskOperator``, a plain function of the records, ``function(records)`` or
        ``function(context, records)``, or nothing for a ``chain``, as for ``subtask``. If it takes arguments, pass what
        ``subtask`` returns: ``handle.run(handle.subtask(MyOperator, 3))``. Each subtask gets an equal part of ``data``,
        in order, or no records without it. ``data`` is for what fits into each task: any values that can be pickled.

        This is one action for ``Sidecar.run``, which says what ``restart`` and ``input_id`` mean, how a run is
        interrupted, and what is raised. It works alike in a driver, over Spark Connect and for an ``AttachedSidecar``;
        for ``async with``, it must be awaited. Inside ``with handle.progress():`` it has a progress bar.

        The tasks can yield all values that an event can have, each of at most its size, and every one arrives with its
        type; another one fails its task with ``EventEncodeError``. All of them are in the driver's memory at the end,
        and Spark limits their total size (``spark.driver.maxResultSize``). For larger results, and for data that is in
        Spark, use an action of Spark with ``subtask``. In streaming mode, a task that was retried continues after its
        checkpoint, so what it had yielded before is missing here, and belongs into a sink.

        Raises ``TypeError`` as ``subtask`` does, for tasks of another operator, and for ``data`` that is a text, a
        mapping, an RDD or a DataFrame; ``SidecarError`` if Spark is in another process; and otherwise as
        ``Sidecar.run``.
        """
        results: list[Output] = self._run_with(operator, data, restart, input_id)
        return results

    def _run_with(
        self, operator: Any, data: Iterable[Any], restart: RestartStrategy, input_id: str | None = None
    ) -> Any:
        """Have the sidecar run the tasks: the result is what its ``run`` returns."""
        if self._run is None or self._spark is None:
            raise SidecarError(
                f"the tasks of operator {self.operator_id!r} cannot be run here, because Spark is in another process: "
                f"run them there, with AttachedSidecar(...).operator({self.operator_id!r}).run(...)"
            )
        task = operator if isinstance(operator, SubtaskTask) else self.subtask(operator)
        if task.endpoint.operator_id != self.operator_id or task.endpoint.key != self._endpoint.key:
            raise TypeError(
                f"these are tasks of operator {task.endpoint.operator_id!r}, and this is the handle of "
                f"{self.operator_id!r}: call run() of the handle whose subtask() has made them"
            )
        records = data if isinstance(data, range) else list(data)  # a part of a range is one, however long

        def action() -> list[Any]:
            endpoint = self._endpoint  # the parallelism may have changed since the last call
            many = endpoint.parallelism
            ends = [len(records) * part // many for part in range(many + 1)]
            parts = [records[begin:end] for begin, end in pairwise(ends)]
            return _results(self._spark, task.reaching(endpoint), parts)

        return self._run(action, restart=restart, operators=[self], input_id=input_id)

    def subtask(self, operator: TaskCode[Sent, Received, Any] = None, *args: Any, **kwargs: Any) -> SubtaskTask:
        """Make the function for ``mapPartitions``, ``mapInPandas``, ``mapInArrow`` or ``foreachPartition``.

        For Spark's own actions, over data that is in Spark. ``run`` does without them.

        ``operator`` is the class of a ``SubtaskOperator``, or a function that returns one: each task calls
        ``operator(*args, **kwargs)``. It may also be a plain function of the records, ``function(records)`` or
        ``function(context, records)``, with ``args`` after these, that returns or yields the outputs. All of it must
        be picklable. A partition is a subtask, so the RDD or DataFrame must have exactly ``parallelism`` partitions.
        Works in barrier stages too. If the operator is a ``chain``, its tasks run the stages of the chain, so there are
        no arguments; only a driver whose sidecar is in a separate process passes the same chain as ``operator``.

        Raises ``TypeError`` if ``operator`` cannot make a ``SubtaskOperator``, as far as that can be seen here; for a
        method that is ``async def`` or has a ``yield`` that cannot work; and for a method whose name is clearly a
        misspelling of one of ``SubtaskOperator``. A name that is only similar is logged as a warning.
        """
        if self._stages or isinstance(operator, Chain):
            return self._subtask_of(operator)
        if isinstance(operator, SubtaskTask):
            raise TypeError(
                "what subtask() has returned is for Spark, or for run(): pass the operator's class or function"
            )
        if not callable(operator):
            raise TypeError(
                f"{show(operator)} is not callable: pass the operator's class and its arguments, "
                "subtask(MyOperator, ...), because each task makes its own operator"
            )
        made = operator.func if isinstance(operator, partial) else operator
        if type(getattr(made, "__self__", None)).__module__.partition(".")[0] == "pyspark":
            raise TypeError(
                f"{made.__name__}() is an action of Spark, for the driver: pass it to run() of the sidecar, "
                f"sidecar.run(rows.{made.__name__}), and here the function that the tasks run"
            )
        if isinstance(made, type):
            for finding in check_operator(made):
                log.warning(
                    "method never called",
                    operator_id=self.operator_id,
                    method=finding.method,
                    did_you_mean=finding.meant,
                )
        elif iscoroutinefunction(made):
            raise TypeError(
                f"{show(operator)} is async: let it be called for each record, many at a time, with "
                f"headgate.concurrently({name_of(made)}, limit=100), or write a plain function of the records"
            )
        function = function_operator(operator, args, kwargs)
        self._made_by = None if function else made
        # A part may handle events. That of the counters, which all have, does not.
        self._shipped(TaskPart if len(self._task_parts) > 1 else FunctionOperator if function else made)
        if function is not None:
            return SubtaskTask(function, self._endpoint, parts=self._task_parts)
        make_operator = cast("Callable[..., SubtaskOperator]", operator)
        return SubtaskTask(make_operator, self._endpoint, args, kwargs, self._task_parts)

    def _subtask_of(self, given: object) -> SubtaskTask:
        """Make the function for a chain. A sidecar in another process has only told the names of its stages."""
        if self._task_parts.keys() & set(self._stages):  # they were made here
            if given is not None:
                raise TypeError(f"operator {self.operator_id!r} is a chain, which has its stages: call subtask() alone")
            return self._task_of_chain({})
        names = ", ".join(self._stages)
        if not isinstance(given, Chain):
            raise TypeError(
                f"operator {self.operator_id!r} is a chain in the sidecar's process, and here only the names of its "
                f"stages are known, {names}: pass the same chain, subtask(chain(...))"
            )
        if given.stages != self._stages:
            raise TypeError(
                f"{given!r} is not the chain of operator {self.operator_id!r}, whose stages are {names or 'none'}: "
                "pass the same chain to coordinate in the sidecar's process and to subtask"
            )
        return self._task_of_chain(given.operators)

    def _task_of_chain(self, stages: Mapping[str, Callable[[], SubtaskOperator]]) -> SubtaskTask:
        self._shipped(TaskPart)
        return SubtaskTask(None, self._endpoint, parts={**self._task_parts, **stages}, stages=self._stages)

    @checked()
    def part(self, name: str) -> Any:
        """Return a ready-made part that the operator uses, for the functions of its tasks.

        Use it if the sidecar is in a separate process, where its factory has made the part: ``queue: WorkQueue[str] =
        handle.part("pages")``. It has what a part offers in tasks, and none of what it offers on the driver. If a
        ``WorkQueue`` was made with a ``key``, pass the same function to each ``add``.

        Raises ``ValueError`` if the operator uses no part with this name.
        """
        part = in_task(self._task_parts, name)
        if part is None:
            known = ", ".join(map(repr, sorted(self.parts))) or "none"
            raise ValueError(
                f"operator {self.operator_id!r} uses no part {name!r}; there is {known}. Give it to the operator "
                "with coordinate(..., uses=[part])"
            )
        return part

    @property
    def parts(self) -> dict[str, list[Any]]:
        """The ready-made parts that it uses, by their names: the kind of each and its settings, as plain values."""
        return described_parts(self._task_parts)

    @checked()
    def progress(self, total: int | None = None, *, count: str | None = None, counter: str | None = None) -> Progress:
        """Return a progress bar that is shown while its ``with`` block runs: ``with handle.progress(): action()``.

        The bar shows the splits of a ``SourceCoordinator`` that are read. It knows their number from a
        ``StaticSplitEnumerator``, or any enumerator with a ``pending_count``. For other operators it shows how
        ``count`` grows, a count of ``statistics()`` (``"events_received"`` by default), or ``counter``, one of the
        tasks' own ``counters()``, towards ``total``. Beside it are the attempts lost and the resets. It is shown in
        notebooks, and if standard output and standard error are terminals.

        Raises ``SidecarError`` without the package tqdm (``pip install 'headgate[progress]'``), and ``ValueError`` for
        an unknown ``count``, for ``count`` and ``counter`` together, or for a negative ``total``.
        """
        return Progress(self.operator_id, self.statistics, total, count, counter=counter, displays=self._displays)

    def counters(self) -> dict[str, int | float | Distribution]:
        """Return what the tasks have counted so far: for each name a sum, or a ``Distribution``.

        In batch mode these are the counts of the latest action, in streaming mode those since the operator's first
        checkpoint. They are exact: an attempt that is lost takes its counts back, and of concurrent attempts one
        counts. Works, and raises, as ``statistics`` does.
        """
        return Book.from_value(self._statistics()["counters"]).values()

    def statistics(self) -> dict[str, Any]:
        """Return counts and latencies so far, as plain values. Also works after the sidecar has closed.

        The handle of an ``AttachedSidecar`` asks the sidecar's process, so it raises ``SidecarUnreachable`` if that is
        gone.
        """
        return self._statistics()


def _results(spark: Any, task: SubtaskTask, records: Sequence[Sequence[Any]]) -> list[Any]:
    """The action of ``OperatorHandle.run``: a job with one partition for each element of ``records``. Blocks."""
    many = len(records)
    if is_remote(spark):
        frame = spark.range(0, many, 1, many).mapInArrow(ResultTask(task, records), RESULT_SCHEMA)
        results = [row.value for row in frame.collect()]
    else:
        context = getattr(spark, "sparkContext", spark)
        results = context.parallelize(records, many).mapPartitions(ResultTask(task)).collect()
    return [decode_event(value, task.endpoint.wire_limits) for value in results]


class PartFactories(StaysOnDriver):
    """What ``Sidecar`` and ``SidecarRuntime`` have in common: the methods that make ready-made parts.

    They need no event loop: a part starts with its operator.
    """

    __slots__ = ()
    _config: SidecarConfig

    @abstractmethod
    def _values_of(self, part: str) -> ValuePort:
        """Where a durable part keeps its values, while the sidecar runs. On its loop."""

    @checked(name=NAME)
    def shared(self, name: str, value: T) -> SharedValue[T]:
        """Return a new ``SharedValue``; see there. Give it to operators with ``uses=[value]``."""
        return SharedValue(name, value)

    @checked(name=NAME, per_s=POSITIVE, burst=AT_LEAST_1, concurrency=AT_LEAST_1)
    def permits(
        self, name: str, *, per_s: float | None = None, burst: int = 1, concurrency: int | None = None
    ) -> Permits:
        """Return new ``Permits``; see there for the arguments. Give them to operators with ``uses=[permits]``."""
        return Permits(name, per_s=per_s, burst=burst, concurrency=concurrency)

    @checked(name=NAME, roots=ITEMS, key=KEY, in_hand=AT_LEAST_1, bytes_max=AT_LEAST_1)
    def work_queue(
        self,
        name: str,
        roots: Iterable[T],
        *,
        key: Callable[[T], Any] | None = None,
        in_hand: int = 1,
        bytes_max: int = QUEUE_BYTES_MAX,
    ) -> WorkQueue[T]:
        """Return a new ``WorkQueue``; see there for the arguments. Give it to an operator with ``uses=[queue]``."""
        return WorkQueue(name, roots, key=key, in_hand=in_hand, bytes_max=bytes_max)

    @checked(name=NAME, bytes_max=AT_LEAST_1, lease_s=POSITIVE)
    def cache(
        self, name: str, *, durable: bool = False, bytes_max: int = CACHE_BYTES_MAX, lease_s: float = LEASE_S
    ) -> Cache:
        """Return a new ``Cache``; see there for the arguments. Give it to operators with ``uses=[cache]``.

        With ``durable``, its values are also in ``SidecarConfig.storage``, where they survive the driver: a ``get``
        returns a new value after it is written there, and the next program with this storage has it. A value that
        cannot be written fails the jobs that use the cache, and is written again until it succeeds. Of two programs
        that use one storage, the later one has it, as for checkpoints. Raises ``SidecarError`` without a storage.
        """
        if durable and self._config.storage is None:
            raise StorageError(NOT_DURABLE.format(name))
        return Cache(
            name, bytes_max=bytes_max, lease_s=lease_s, values=partial(self._values_of, name) if durable else None
        )

    @checked(name=NAME, total=AMOUNT)
    def budget(self, name: str, total: float | Decimal) -> Budget:
        """Return a ``Budget`` of ``total`` in all runs; see there. Give it to operators with ``uses=[budget]``.

        What is spent is kept in ``SidecarConfig.storage``, and the next run continues with what is left.
        """
        values = None if self._config.storage is None else partial(self._values_of, f"budget/{name}")
        return Budget(name, total, values=values)

    @checked(name=NAME, size=AT_LEAST_1)
    def group(self, name: str, size: int | None = None, **settings: Any) -> Group:
        """Return a new ``Group``; see there for the arguments. Give it to an operator with ``uses=[group]``."""
        return Group(name, size, **settings)

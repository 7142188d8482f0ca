# SPDX-License-Identifier: Apache-2.0

"""The function that Spark ships to executors: one object for every ``map...`` and ``foreachPartition`` method.

With ``task_source`` it is the only executor-side module that knows pyspark: it asks Spark's ``TaskContext`` which task
this is, and passes that to ``spark_bridge.subtask``, which does not know Spark. Both are in no folder of this package
for that reason: the driver makes their objects too, and Spark pickles them by these names.
"""

from __future__ import annotations

import pickle
import platform
import socket
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple

from protocol.describing import describe, name_of, type_name
from protocol.errors import HeadgateError, InputRefused
from protocol.wire import event_classes
from protocol.wire.messages import RestoreMode

if TYPE_CHECKING:
    from spark_bridge.common.endpoint import TaskEndpoint, TaskIdentity
    from spark_bridge.subtask.operator import SubtaskOperator

__all__ = [
    "ACTION_PROPERTY",
    "ACTION_TAG",
    "BATCH_PROPERTY",
    "LOOK_SCHEMA",
    "QUERY_ID",
    "RESULT_SCHEMA",
    "ExecutorLook",
    "Looked",
    "NotInsideTask",
    "ResultTask",
    "SubtaskTask",
    "current_task",
]

ACTION_PROPERTY = "headgate.action"
"""The Spark local property that names the ``run`` call to which a job belongs."""
ACTION_TAG = "headgate.action."
"""With Spark Connect, the job tag that does the same begins like this; clients cannot set local properties."""

QUERY_ID = "sql.streaming.queryId"
"""The local property in which Spark's stream thread keeps the query's id."""
BATCH_PROPERTY = "headgate.batch"
"""The Spark local property that names the operator whose ``for_each_batch`` calls the function now."""

LOOK_SCHEMA = "problem string, error string, executor string, host string, python string, java string"
RESULT_SCHEMA = "value binary"
RESULT_BATCH_BYTES = 2**20
DIAL_TIMEOUT_S = 5.0

_HINT = (
    "pass it to mapPartitions, mapInPandas, mapInArrow or foreachPartition, instead of map, flatMap, filter, foreach, "
    "mapPartitionsWithIndex, applyInPandas or applyInArrow"
)


class NotInsideTask(HeadgateError, RuntimeError):
    """The subtask function was called outside a Spark task; only a task has an identity.

    Pass it to ``mapPartitions`` or ``foreachPartition``.
    """


class SubtaskTask:
    """An operator with its arguments and its coordinator's address. Created on the driver, called in the tasks.

    It takes an iterator (of records, of pandas DataFrames, of Arrow RecordBatches) and returns one, so it
    serves as the function of ``RDD.mapPartitions``, ``RDD.barrier().mapPartitions``,
    ``RDD.foreachPartition``, ``DataFrame.foreachPartition``, ``DataFrame.mapInPandas`` and
    ``DataFrame.mapInArrow``. If Spark wants no outputs, it takes them and discards them.

    The object contains the task secret, which travels only in Spark's closure. ``repr`` does not show it.
    """

    __name__ = "headgate_subtask"  # what Spark shows in its plans

    def __init__(
        self,
        make_operator: Callable[..., SubtaskOperator] | None,
        endpoint: TaskEndpoint,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        parts: Mapping[str, Callable[[], SubtaskOperator]] | None = None,
        stages: tuple[str, ...] = (),
    ) -> None:
        """``make_operator(*args, **kwargs)`` is called once in each task; all three must be picklable.

        ``parts`` makes the operator's named parts. If it is a chain, these include its ``stages``, and
        ``make_operator`` is None.
        """
        self._make_operator = make_operator
        self._endpoint = endpoint
        self._args = args
        self._kwargs = kwargs or {}
        self._parts = dict(parts or {})
        self._stages = stages

    def __call__(self, records: Iterable[Any], *rest: Any) -> Any:
        """Run the operator in this task over ``records``. See ``run_subtask`` for what it raises.

        Raises:
            NotInsideTask: this is not a Spark task.
            TypeError: ``records`` is a record instead of a partition, or there are more arguments. The function was
                passed to ``map``, ``flatMap``, ``foreach`` or another method that does not pass whole partitions.
        """
        identity = current_task()
        _refuse_stray_batch(self._endpoint)
        if rest or not _may_be_a_partition(records):
            given = ", ".join(type_name(value) for value in (records, *rest))
            raise TypeError(
                f"a subtask takes the iterator over one partition, but Spark called it with {given}: {_HINT}"
            )
        from spark_bridge.subtask.runner import run_subtask

        outputs = run_subtask(self._make_own(), self._endpoint, identity, records, self._parts, self._stages)
        if _wants_no_outputs(records):
            for _ in outputs:
                pass
            return iter(())
        return _Outputs(outputs)

    def __getstate__(self) -> dict[str, Any]:
        """Take along the classes that are registered as events, as they are when Spark pickles the function."""
        return {**self.__dict__, "_event_classes": _pack_event_classes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _unpack_event_classes(state.pop("_event_classes"))
        self.__dict__.update(state)

    def wrapped(self, wrap: Callable[..., SubtaskOperator], *args: Any) -> SubtaskTask:
        """Return this function with the operator that ``wrap(make_operator, *args)`` makes, without other arguments."""
        return SubtaskTask(partial(wrap, self._make_own(), *args), self._endpoint, parts=self._parts)

    @property
    def endpoint(self) -> TaskEndpoint:
        """The address and settings that it receives."""
        return self._endpoint

    def reaching(self, endpoint: TaskEndpoint) -> SubtaskTask:
        """Return this function with another endpoint of its operator."""
        return SubtaskTask(self._make_operator, endpoint, self._args, self._kwargs, self._parts, self._stages)

    def _make_own(self) -> Callable[[], SubtaskOperator] | None:
        return None if self._make_operator is None else partial(self._make_operator, *self._args, **self._kwargs)

    def __repr__(self) -> str:
        name = " -> ".join(self._stages) if self._make_operator is None else name_of(self._make_operator)
        return f"SubtaskTask({name}, {self._endpoint!r})"


# PySpark would read them as the hints of a user's function. It does not know these, so `applyInArrow` of its Connect
# client would raise an unrelated error, before the task can say what is wrong.
SubtaskTask.__call__.__annotations__ = {}


class ResultTask:
    """A subtask for ``OperatorHandle.run``: it encodes what its operator yields as events are encoded.

    So a driver reads the same values whether Spark runs in its process or behind Spark Connect, and it unpickles
    nothing that a server of Spark Connect sends. It serves as the function of ``RDD.mapPartitions`` over an RDD with
    one list of records for each partition, and of ``DataFrame.mapInArrow`` with Spark Connect, where there are no RDDs:
    ``records`` are then those of each subtask, and travel with the function.
    """

    __name__ = "headgate_subtask"

    def __init__(self, task: SubtaskTask, records: Sequence[Sequence[Any]] | None = None) -> None:
        self._task = task
        self._records = records

    def __call__(self, given: Iterable[Any]) -> Iterator[Any]:
        if self._records is None:
            return self._encoded(chain.from_iterable(given))
        batch_type = type(next(iter(given)))  # a record batch, of the library that is not imported here
        return _in_batches(self._encoded(iter(self._records[current_task().subtask])), batch_type)

    def _encoded(self, records: Iterator[Any]) -> Iterator[bytes]:
        from protocol.wire.codec import encode_argument

        limits = self._task.endpoint.wire_limits
        for value in self._task(records):
            yield encode_argument("what a task yields to run()", value, limits)


def _in_batches(values: Iterator[bytes], batch_type: Any) -> Iterator[Any]:
    """Few batches of many small values, and no batch of many large ones."""
    batch: list[bytes] = []
    size_bytes = 0
    for value in values:
        batch.append(value)
        size_bytes += len(value)
        if size_bytes >= RESULT_BATCH_BYTES:
            yield batch_type.from_pydict({"value": batch})
            batch, size_bytes = [], 0
    if batch:
        yield batch_type.from_pydict({"value": batch})


class _EventClasses(NamedTuple):
    """The classes that the driver has registered as events: all of one of the main program, the module of others."""

    pickled: dict[str, bytes]
    modules: dict[str, str]
    failures: dict[str, str]


def _pack_event_classes() -> _EventClasses:
    from pyspark import cloudpickle

    packed = _EventClasses({}, {}, {})
    for registration in event_classes.registered():
        module = registration.cls.__module__
        if module != "__main__" and "<locals>" not in registration.cls.__qualname__ and module in sys.modules:
            packed.modules[registration.name] = module
            continue
        # One by one: a class that refers to what cannot be pickled must not keep the others, and the job, from running.
        try:
            packed.pickled[registration.name] = cloudpickle.dumps(registration.cls)  # type: ignore[no-untyped-call]
        except Exception as error:
            packed.failures[registration.name] = describe(error)[:200]
    return packed


def _unpack_event_classes(packed: _EventClasses) -> None:
    event_classes.learn_modules(packed.modules)
    failures = dict(packed.failures)
    for name, pickled in packed.pickled.items():
        try:
            pickle.loads(pickled)  # registers the class
        except Exception as error:
            failures[name] = describe(error)[:200]
    event_classes.learn_failures(failures)


class _Outputs:
    """The outputs of one subtask. If passed to ``map``, Spark would send this object as a row; pickling it raises."""

    def __init__(self, outputs: Generator[Any, None, None]) -> None:
        self._outputs = outputs

    def __iter__(self) -> Iterator[Any]:
        return self._outputs

    def __next__(self) -> Any:
        return next(self._outputs)

    def close(self) -> None:
        self._outputs.close()

    def __reduce__(self) -> Any:
        raise TypeError(f"Spark takes all outputs of a subtask for one row: {_HINT}")


def _may_be_a_partition(records: object) -> bool:
    """Usually an iterator. But a user's function before this one may return any iterable."""
    if isinstance(records, Iterator):
        return True
    if isinstance(records, str | bytes | bytearray | tuple | Mapping):
        return False
    frame = type(records).__module__.partition(".")[0] in ("pandas", "pyarrow", "numpy")
    return isinstance(records, Iterable) and not frame


def _wants_no_outputs(records: object) -> bool:
    """Whether Spark will not look at the outputs, so that nobody would run the subtask.

    With Spark Connect, ``foreachPartition`` calls the function with a generator, and drops what it returns.
    """
    return isinstance(records, GeneratorType) and records.gi_code.co_filename.endswith("sql/connect/dataframe.py")


def _refuse_stray_batch(endpoint: TaskEndpoint) -> None:
    """Raise ``InputRefused`` if nothing decides which micro-batch of a query this run belongs to (H174, H175).

    The operator would take every batch for another input, and write one again that Spark repeats after a crash.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None or endpoint.mode is not RestoreMode.STREAMING:
        return
    query_id = context.getLocalProperty(QUERY_ID)
    if query_id and context.getLocalProperty(BATCH_PROPERTY) != endpoint.operator_id:
        raise InputRefused(
            f"operator {endpoint.operator_id!r} is in streaming mode and runs in a micro-batch of query {query_id}, "
            "which sidecar.for_each_batch has not begun for it. So a batch that Spark repeats after a crash would be "
            "written twice. Pass sidecar.for_each_batch(handle, function) of this operator to foreachBatch; put "
            'several operators of one query into a chain; or coordinate it with mode="batch"'
        )


def current_task() -> TaskIdentity:
    """Return the identity of the task that this Python worker is running.

    Raises:
        NotInsideTask: there is no task, for example on the driver.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise NotInsideTask(
            "this function runs inside a Spark task: pass it to mapPartitions, mapInPandas, mapInArrow or "
            f"foreachPartition instead of calling it (in {sys.argv[0] or 'this process'})"
        )
    from spark_bridge.common.endpoint import TaskIdentity

    return TaskIdentity(
        task_attempt_id=context.taskAttemptId(),
        subtask=context.partitionId(),
        run_id=context.stageId(),
        attempt_number=context.attemptNumber(),
        action=context.getLocalProperty(ACTION_PROPERTY) or _tagged_action(context.getLocalProperty("spark.job.tags")),
    )


def _tagged_action(tags: str | None) -> str:
    """The action among job tags. Spark Connect writes the ids of user and session before each tag of a client."""
    for tag in (tags or "").split(","):
        _, found, action = tag.partition("_Tag_" + ACTION_TAG)
        if found:
            return action
    return ""


class Looked(NamedTuple):
    """What one task has found. Empty texts are not known, or, for ``problem`` and ``error``, there is none."""

    problem: str
    error: str
    executor: str
    host: str
    python: str
    java: str


class ExecutorLook:
    """What one task looks at, on an executor: before a client's first job, and when a session is checked.

    It is the function of one ``mapInArrow`` or of one ``RDD.mapPartitions``: it yields, in a ``Looked``, why an
    executor cannot reach ``host`` and ``port``. What only the JVM knows is in the first record, if the query asks it.

    That it runs at all shows more: the executor has the driver's version of Python, and Headgate's packages.
    """

    __name__ = "headgate_look"  # what Spark shows in its plans

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port

    def __call__(self, records: Iterable[Any]) -> Iterator[Any]:
        import spark_bridge.subtask.runner  # noqa: F401 - what a subtask needs

        first = next(iter(records))
        is_row = hasattr(first, "asDict")
        jvm = first.asDict() if is_row else first.to_pylist()[0]
        problem, error = self._dial()
        looked = Looked(
            problem,
            error,
            jvm.get("executor") or "",
            jvm.get("host") or socket.gethostname(),
            platform.python_version(),
            jvm.get("java") or "",
        )
        yield looked if is_row else type(first).from_pydict({name: [text] for name, text in looked._asdict().items()})

    def _dial(self) -> tuple[str, str]:
        try:
            socket.create_connection(self._address, DIAL_TIMEOUT_S).close()
        except OSError as error:
            return f"{socket.gethostname()}: {error}", type_name(error)
        return "", ""

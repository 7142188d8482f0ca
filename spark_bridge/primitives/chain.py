# SPDX-License-Identifier: Apache-2.0

"""An operator is composed here: from one coordinator or the stages of a chain, and from ready-made parts (H80)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import Parameter, iscoroutinefunction, signature
from typing import Any, Never, Protocol

from actors.coordination import GivenCoordinator, OperatorCoordinator, Parts, parts_of
from actors.coordination.host.given import built_anew_or_kept
from protocol.arguments import Rule, checked, given
from protocol.describing import class_name, name_of
from spark_bridge.primitives.counters.driver import CountersCoordinator
from spark_bridge.primitives.primitive import PARTS_OF_ALL, USES, Primitive, checked_name
from spark_bridge.primitives.work_queue.task import QueueItems, WorkQueueInTask
from spark_bridge.sinks.two_phase.sink import TwoPhaseSink
from spark_bridge.subtask.context import QUESTIONS
from spark_bridge.subtask.coroutines.concurrently import Concurrently
from spark_bridge.subtask.operator import SubtaskOperator, operator_factory
from spark_bridge.subtask.parts import COUNTERS, check_operator

StageOperator = Callable[..., SubtaskOperator | Iterable[Any] | None]
"""The class of an operator, a function that makes one, or a function of the records that reach it."""


class Questions(OperatorCoordinator):
    """The driver's half of what coroutines ask: a part outside of checkpoints, which asks the part that is meant.

    So a question passes while a checkpoint waits for the task's thread, which may be away for long (H152).
    """

    parts: Parts

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        index, question = request
        return await self.parts[index].method("handle_request")(subtask, attempt, question)


class OperatorPair(Protocol):
    """Both halves of a stage, such as a ready source or sink: anything with these two attributes."""

    @property
    def coordinator(self) -> GivenCoordinator:
        """The driver's half: a class, a factory or an instance, as for ``coordinate``."""
        ...

    @property
    def operator(self) -> StageOperator:
        """The tasks' half, which is pickled: it is called without arguments, or with the records."""
        ...


@dataclass(frozen=True)
class Chain:
    """Stages that run in one task and feed each other; ``chain`` makes it, and ``coordinate`` takes it."""

    coordinators: Mapping[str, GivenCoordinator] = field(repr=False)
    operators: Mapping[str, Callable[[], SubtaskOperator]] = field(repr=False)
    beside: Mapping[str, Callable[[], SubtaskOperator]] = field(default_factory=dict, repr=False)
    """Sinks that no stage feeds in order: those of an async stage's failures."""

    @property
    def stages(self) -> tuple[str, ...]:
        """Their names, in the order in which data flows."""
        return tuple(self.operators)

    def __repr__(self) -> str:
        return f"<chain {' -> '.join(self.stages)}>"


def chain(
    *unnamed: Never,
    **stages: StageOperator
    | tuple[GivenCoordinator, StageOperator]
    | OperatorPair
    | TwoPhaseSink[Any]
    | WorkQueueInTask[Any],
) -> Chain:
    """Return a chain of operators that run in one task, each of which gets what the one before it yields.

    The stages are keyword arguments, in the order in which data flows:
    ``chain(source=source, transform=transform, sink=sink)``. Each is

    * a pair, ``(coordinator, operator)``, where ``coordinator`` is what ``coordinate`` takes and ``operator`` is the
      class of a ``SubtaskOperator``, or a function that makes one;
    * an object that has both as attributes, such as a ready source, or a sink (a ``TwoPhaseSink``);
    * an operator alone, or a plain function of the records, which needs no coordinator;
    * a ``WorkQueue``, as the first stage, which yields the queue's items; ``uses=[queue]`` names it as well.

    ``coordinate(name, chain(...), parallelism=n)`` runs it: to Spark and to checkpoints it is one operator, with one
    connection and one cut. Each stage keeps its coordinator, its state and its events. Calls reach the stages in their
    order; ``close`` has the reverse order. A failure of one is a failure of the chain. In Spark's actions, use
    ``handle.subtask()`` without arguments. The first stage gets Spark's records, which a source ignores. Spark gets
    what the last one yields.

    A checkpoint contains each record either in all stages or in none. So it is taken when the first stage takes or
    looks for its next record. If the first stage sets ``snapshot_anywhere``, as a ``SplitReader`` with positions does,
    it is also taken after any of its outputs.

    The names are those in checkpoints: a checkpoint is refused if it has the state of a stage that is gone. A new stage
    begins without a state.

    Raises ``ValueError`` without stages or for an invalid name, and ``TypeError`` for anything else than a stage.
    """
    if unnamed:
        raise TypeError(
            f"chain() was given {given('unnamed', unnamed[0], None)} as an unnamed stage: the stages of a chain need "
            "names, by which checkpoints know them: chain(read=..., write=...)"
        )
    if not stages:
        raise ValueError("a chain needs at least one stage: chain(source=..., transform=..., sink=...)")
    coordinators: dict[str, GivenCoordinator] = {}
    operators: dict[str, Callable[[], SubtaskOperator]] = {}
    sinks: dict[str, Callable[[], SubtaskOperator]] = {}
    for name, stage in stages.items():
        coordinators[name], operator = _halves(checked_name(name), stage)
        if isinstance(operator, Concurrently) and operator.rows:
            raise ValueError(
                f"stage {name!r} has rows=True, which is for Spark's batches: in a chain a checkpoint could cut a "
                "batch, so let a plain function before the stage yield its rows"
            )
        if isinstance(operator, Concurrently) and isinstance(operator.on_error, TwoPhaseSink):
            beside = f"{name}.failures"
            coordinators[beside], write = _halves_of_sink(operator.on_error)
            sinks[beside] = operator_factory(write)
            operator = replace(operator, failures_to=beside)
        operators[name] = operator_factory(operator)
    return Chain(coordinators, operators, sinks)


def _halves(name: str, stage: Any) -> tuple[GivenCoordinator, StageOperator]:
    coordinator: GivenCoordinator = OperatorCoordinator
    operator = stage
    if isinstance(stage, tuple):
        if len(stage) != 2:
            raise TypeError(f"stage {name!r} has {len(stage)} values, but it is a pair: (coordinator, operator)")
        coordinator, operator = stage
    elif isinstance(stage, TwoPhaseSink):
        coordinator, operator = _halves_of_sink(stage)
    elif isinstance(stage, WorkQueueInTask):
        operator = partial(QueueItems, stage)
    elif not isinstance(stage, type) and hasattr(stage, "coordinator") and hasattr(stage, "operator"):
        coordinator, operator = stage.coordinator, stage.operator
    made_by = operator.func if isinstance(operator, partial) else operator
    if isinstance(operator, SubtaskOperator):
        raise TypeError(f"stage {name!r} has an operator, but each task makes its own: pass the class, or a factory")
    if isinstance(made_by, type) and issubclass(made_by, SubtaskOperator):
        check_operator(made_by)
    elif isinstance(made_by, type) or not callable(operator) or iscoroutinefunction(made_by):
        raise TypeError(
            f"stage {name!r} is {stage!r:.80}: pass (coordinator, operator), an object with these attributes, or the "
            "class of a SubtaskOperator or a plain function"
        )
    return coordinator, operator


def _halves_of_sink(sink: TwoPhaseSink[Any]) -> tuple[GivenCoordinator, StageOperator]:
    from spark_bridge.sinks.two_phase.driver import TwoPhaseSinkCoordinator
    from spark_bridge.sinks.two_phase.task import TwoPhaseSinkOperator

    return partial(TwoPhaseSinkCoordinator, sink), partial(TwoPhaseSinkOperator, sink)


def _advice(value: Any) -> str:
    """What to do with something that is not a coordinator."""
    made_by = value.func if isinstance(value, partial) else value
    kind = made_by if isinstance(made_by, type) else type(made_by)
    if issubclass(kind, SubtaskOperator):
        return "a SubtaskOperator goes to job.run or job.subtask"
    if issubclass(kind, TwoPhaseSink):
        return "wrap a sink in TwoPhaseSinkCoordinator(sink), or put it into a chain, chain(write=sink)"
    if not isinstance(made_by, type):
        is_pair = hasattr(kind, "coordinator") and hasattr(kind, "operator")  # calls no property
        return "it has both halves, so put it into a chain, chain(read=...)" if is_pair else ""
    if not issubclass(kind, OperatorCoordinator):
        return f"derive {class_name(kind)} from OperatorCoordinator"
    needed = [
        name
        for name, one in signature(value).parameters.items()
        if one.default is Parameter.empty and one.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    return f"{name_of(made_by)} needs arguments ({', '.join(needed)}): pass lambda: {name_of(made_by)}(...)"


COORDINATOR = Rule("", lambda _: True, advice=_advice)
"""What ``coordinate`` takes, by its annotation."""


@dataclass(frozen=True)
class Composed:
    """An operator with its parts: those of the driver, what makes those in its tasks, its counters, and what it uses.

    ``stages`` are the names of a chain's; empty if there is no chain.
    """

    parts: Parts
    task_parts: Mapping[str, Callable[[], SubtaskOperator]]
    counters: CountersCoordinator
    used: Mapping[str, Primitive]
    stages: tuple[str, ...] = ()

    def figures(self) -> dict[str, Mapping[str, float]]:
        """Return the figures of each ready-made part that has some, by its name."""
        return {name: figures for name, part in self.used.items() if (figures := part.figures())}


@checked(uses=USES)
def composed(operator_id: str, given: GivenCoordinator | Chain, uses: Collection[Primitive]) -> Composed:
    """Compose an operator of what ``coordinate`` was given, the counters that every operator has, and what it uses.

    Raises:
        TypeError: something other than a part is used, or ``given`` is not a coordinator; see ``built_anew_or_kept``.
        ValueError: two parts have one name.
    """
    named: dict[str, Primitive] = {}
    stages = given.operators if isinstance(given, Chain) else {}
    for part in uses:
        if part.name in named or part.name in stages:
            raise ValueError(f"two parts of operator {operator_id!r} have the name {part.name!r}: give each its own")
        named[part.name] = part
    for name, make in stages.items():
        if isinstance(make, partial) and make.func is QueueItems and make.args[0] is not named.get(make.args[0].name):
            raise ValueError(
                f"stage {name!r} of operator {operator_id!r} takes its items from the work queue "
                f"{make.args[0].name!r}, which the operator does not use: coordinate(..., uses=[queue])"
            )
    outside = [QUESTIONS, *(name for name, part in named.items() if part.outside_checkpoints)]
    counters, questions = CountersCoordinator(), Questions()
    coordinators = {COUNTERS: counters, **{name: part.coordinator(operator_id) for name, part in named.items()}}
    coordinators[QUESTIONS] = questions
    task_parts = {**PARTS_OF_ALL, **{name: part.task_part() for name, part in named.items()}}
    if not isinstance(given, Chain):
        questions.parts = parts_of(built_anew_or_kept(given), coordinators, outside=outside)
        return Composed(questions.parts, task_parts, counters, named)
    of_stages = {name: built_anew_or_kept(coordinator) for name, coordinator in given.coordinators.items()}
    questions.parts = parts = parts_of(None, {**coordinators, **of_stages}, given.stages, outside)
    return Composed(parts, {**task_parts, **stages, **given.beside}, counters, named, given.stages)

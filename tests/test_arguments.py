# SPDX-License-Identifier: Apache-2.0

"""A wrong argument is refused where it is given, with its name, what was given, and what is expected.

Every public function, and every parameter, by introspection: a new name is covered when it is in an ``__all__``. The
annotation of a parameter says which of the wrong things are wrong for it. What is exempt is in the tables here, with
the reason.
"""

# H165

from __future__ import annotations

import argparse
import asyncio
import collections.abc
import dataclasses
import inspect
import math
import random
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from pyspark.sql import SparkSession

import headgate
import headgate.actors
import headgate.actors.testing
import headgate.sinks
import headgate.sources
import headgate.testing
import headgate.types
from actors import cell
from actors.coordination.host.context import Context
from protocol.arguments import SHOWN_CHARS_MAX, has_type
from protocol.describing import show
from protocol.errors import EventEncodeError
from protocol.wire.messages import RestoreMode
from spark_bridge.command import main as command_main
from spark_bridge.command import parser
from spark_bridge.common import command_line
from spark_bridge.subtask.parts import check_operator
from tests.spark_bridge.sinks.memory import MemoryCommitter, MemorySink, Server

MODULES = (
    headgate,
    headgate.sinks,
    headgate.sources,
    headgate.types,
    headgate.testing,
    headgate.actors,
    headgate.actors.testing,
)

HUGE = 10**400
SURROGATE, NUL = "a\ud800", "a\0b"
LONG = "x" * 100_000
THING, FUNCTION, NOTHING, MAPPING = object(), lambda: None, list[Any](), dict[str, Any]()
THINGS = [THING]
BYTES = b"bytes"
ARRAY = np.array([1, 2])


class Hostile:
    """Raises whatever it is asked."""

    __hash__ = None  # type: ignore[assignment]

    def _raise(self, *args: Any) -> Any:
        raise RuntimeError("asked")

    __eq__ = __bool__ = __len__ = __iter__ = __contains__ = __str__ = __repr__ = _raise


HOSTILE = Hostile()
NUMBERS: list[Any] = [5, 0, -1, HUGE, 0.5, math.nan, math.inf, -math.inf]
TEXTS: list[Any] = ["5", "", SURROGATE, NUL, LONG]
POOL: list[Any] = [None, True, *NUMBERS, *TEXTS, NOTHING, THINGS, MAPPING, THING, int, FUNCTION, BYTES, ARRAY, HOSTILE]

FITS: dict[Any, list[Any]] = {
    int: [one for one in NUMBERS if isinstance(one, int)],
    float: NUMBERS,
    str: TEXTS,
    bool: [True],
    bytes: [BYTES],
    type(None): [None],
    type: [int],
    collections.abc.Callable: [int, FUNCTION],
    collections.abc.Iterable: [NOTHING, THINGS, ARRAY, HOSTILE],
    collections.abc.Iterator: [],
    collections.abc.Collection: [NOTHING, THINGS, ARRAY, HOSTILE],
    collections.abc.Sequence: [NOTHING, THINGS],
    collections.abc.Mapping: [MAPPING],
    list: [NOTHING, THINGS],
    dict: [MAPPING],
}
"""What of the pool has a type. Nothing of it has a type that is not here."""

CALLED_BY_HEADGATE = (
    headgate.OperatorCoordinator,
    headgate.SubtaskOperator,
    headgate.AsyncOperator,
    headgate.sources.Source,
    headgate.sources.SplitEnumerator,
    headgate.sinks.TwoPhaseSink,
    headgate.sinks.TwoPhaseWriter,
    headgate.sinks.TwoPhaseCommitter,
    headgate.actors.Actor,
    headgate.actors.Hook,
)
"""A user implements these methods, and Headgate calls them."""

MADE_BY_HEADGATE = {
    *(
        "SidecarRuntime",
        "OperatorHandle",
        "AsyncOperatorHandle",
        "SubtaskContext",
        "GroupMember",
        "PermitUse",
        "RecordContext",
        "Failed",
        "Reservation",
        "RestoredFiles",
        "FailureReason",
        "Distribution",
    ),
    *("SplitEnumeratorContext", "SinkCommitterContext", "SinkWriterContext"),
    *("CompletedCheckpoint", "ExecutionAttempt", "GroupCheckpoint", "Chain", "LiveGateways", "Confirmation"),
    *("SidecarStatus", "OperatorStatus", "AttemptStatus", "OperatorStatistics", "LatencyRecorder"),
    *("ActorRef", "Background", "ChildFailed", "DeadLetter", "Decision", "MailboxStatistics", "SlowHandler"),
    *("Terminated", "Timers", "Reply", "Candidate", "Delivery", "DeterministicKit", "DeadLetters"),
    *("OperatorTask", "Task", "World", "Case", "CoordinatorContext", "ActorContext", "TestProbe"),
}
"""A user is given values of these types, and never makes one."""

INSTEAD: dict[Any, Any] = {headgate.CoordinatorContext: Context, headgate.actors.ActorContext: cell._Context}
"""Interfaces whose methods a user calls, and what has the methods."""

_RECORD = "called for each event or record"
_ENGINE = "public for other parts of Headgate only"
NOT_FOR_USERS: dict[str, str] = {
    **dict.fromkeys(
        [
            *(f"{part}.coordinator" for part in ("Budget", "Cache", "Group", "Permits", "SharedValue", "WorkQueue")),
            *("SharedValue.attach", "SharedValue.detach", "types.Confirmation.settle"),
            *("types.OperatorStatus.attempts_of",),
            *("types.SidecarStatus.from_dict", "types.LatencyRecorder.record", "types.LatencyRecorder.since"),
            *("SourceCoordinator.assign_splits", "SourceCoordinator.assigned_splits", "SourceCoordinator.attempts"),
            *("SourceCoordinator.has_no_more_splits", "SourceCoordinator.send", "SourceCoordinator.take_back_splits"),
            "SourceCoordinator.signal_no_more_splits",
            *(f"actors.ActorSystem.{name}" for name in ("fail", "forget", "join", "request_stop", "spawn_child")),
            *("actors.ActorSystem.start_task", "actors.DeadLetters.publish", "actors.ActorContext.spawn"),
            *("actors.testing.TurnGate.direct", "actors.testing.TurnGate.release", "actors.testing.TurnGate.turn"),
            *(
                "actors.testing.next_item",
                "actors.testing.VirtualClock.call_later",
                "actors.testing.VirtualClock.sleep",
            ),
            *("actors.Clock.call_later", "actors.Clock.sleep", "testing.OperatorTask.restore", "testing.Task.restore"),
            *("testing.OperatorTask.wait", "testing.Case.run", "Retry.pause_after"),
        ],
        _ENGINE,
    ),
    **dict.fromkeys(
        [
            *("SubtaskGateway.send_event", "SubtaskGateway.send_event_nowait", "SubtaskContext.count"),
            "SubtaskContext.observe",
            *(f"types.RecordContext.{name}" for name in ("count", "observe", "request")),
            *("types.LiveGateways.send", "types.LiveGateways.broadcast", "types.LiveGateways.broadcast_nowait"),
            *("sources.SplitEnumeratorContext.send_event", "actors.Reply.fail"),
            *("types.KeyGroups.of", "types.KeyGroups.subtask_of"),
            *(f"types.KeyedState.{name}" for name in ("delete", "get", "put", "scan")),
        ],
        _RECORD,
    ),
    **dict.fromkeys(
        ["types.KeyedState", *(f"types.KeyedState.{name}" for name in ("merge", "snapshot"))],
        "a user passes on what Headgate has given",
    ),
    "sinks.TwoPhaseSinkCoordinator.handle_other_event": "a user overrides it, and Headgate calls it",
    "sinks.TwoPhaseSinkOperator.restore_position": "a user overrides it, and Headgate calls it",
    **dict.fromkeys(
        [
            *(f"testing.SinkTarget.{name}" for name in ("kill", "leftovers", "other", "record", "sink")),
            *(f"testing.SourceTarget.{name}" for name in ("numbers", "source", "write")),
        ],
        "a user overrides it, and the cases call it",
    ),
}
"""Public functions whose arguments are not checked. The reason for each."""

CHECKED_WHEN_AWAITED = {"actors.ActorRef.ask", "SubtaskContext.request_async"}
"""They are called for each message, and look at their arguments themselves."""

HINTS: dict[str, Any] = {
    **dict.fromkeys(["Sidecar(spark)", "start(spark)", "check(spark)", "AttachedSidecar(spark)"], SparkSession),
}
"""Annotations of parameters that are ``Any`` because the class is not imported there."""

ANYTHING: dict[str, str] = {
    "OperatorHandle.subtask(operator)": "has a separate check, which knows what operators and chains are",
    "OperatorHandle.run(operator)": "the same",
    "types.AsyncOperatorHandle.run(operator)": "the same",
    "Cache.get_async(make)": "any function: what it returns is awaited if it can be",
    "chain(unnamed)": "every stage needs a name, so whatever is given without one is refused",
    "GroupMember.all_reduce(array)": "NumPy says what it can make an array of",
    "actors.DirectActor.handle(context)": "a user overrides it, and Headgate calls it",
    "actors.ActorRef.ask(build)": "it is called immediately",
    "actors.testing.TestProbe.expect(expected)": "a class, or a union of classes",
    **dict.fromkeys(
        ["actors.Timers.cancel(key)", "actors.Timers.is_active(key)", "actors.Timers.start(key)"], "any key of a dict"
    ),
}
"""Parameters that accept anything, or whose value another system judges. The reason for each."""

ALSO_RIGHT: dict[str, list[Any]] = {
    "GroupMember.save(step)": [-1],
    "WorkQueue.add(priority)": [-1],
    "TlsCertificate(password)": [""],
    "Reply.fail(error)": [""],
    "sinks.PostgresSink(conninfo)": [""],
    "sources.PostgresSource(conninfo)": [""],
    "sinks.SinkWriterContext.prepared_for(checkpoint_id)": [-1],
    "SubtaskContext.snapshot_folder(checkpoint_id)": [-1],
    "testing.running_operator(seed)": [-1, HUGE],
    "testing.sink_cases(seed)": [-1, HUGE],
    "testing.source_cases(seed)": [-1, HUGE],
    "testing.check_bookkeeping(seed)": [-1, HUGE],
    "actors.testing.deterministic_system(seed)": [-1, HUGE],
}
"""Values of the pool that are right, though a number or a text like this is usually wrong."""

FOR_PEOPLE = ("cause", "error", "failure", "reason")
"""Texts that are only shown."""

VALID: dict[str, Any] = {
    "columns": ["a"],
    "subtask": 0,
    "attempt": 0,
    "parallelism": 1,
    "every_s": 1.0,
    "delay_s": 1.0,
    "min": 1,
    "max": 2,
}
"""Values for required parameters, by name, for the calls in which another one is wrong."""


def is_in(value: Any, many: list[Any]) -> bool:
    return any(value is one for one in many)


def fitting(hint: Any) -> list[Any]:
    """What of the pool has the type of an annotation."""
    if hint is Any or isinstance(hint, typing.TypeVar) or hint is object:
        return POOL
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return [one for kind in get_args(hint) for one in fitting(kind)]
    if origin is typing.Literal:
        return []
    kind = origin or hint
    fits = FITS.get(kind, [])
    element = (*get_args(hint), Any)[0]
    if element in (str, int) and kind is not collections.abc.Mapping:
        fits = [one for one in fits if one is not THINGS]
    if element is not Any and not isinstance(element, typing.TypeVar):  # elements of any type are not looked at
        fits = [one for one in fits if one is not ARRAY and one is not HOSTILE]
    return fits


def takes_text(hint: Any) -> bool:
    return hint is str or str in get_args(hint)


def is_wrong(value: Any, name: str, hint: Any, default: Any, also_right: list[Any]) -> bool:
    """Whether a parameter must refuse a value of the pool."""
    if is_in(value, also_right) or value is default:
        return False
    if not is_in(value, fitting(hint)):
        return True
    if hint is Any or isinstance(hint, typing.TypeVar) or hint is object:
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return True
    if isinstance(value, int) and not isinstance(value, bool) and (value < 0 or value == HUGE):
        return True
    if isinstance(value, str):
        if name in ("operator_id", "name", "part") and (value in (SURROGATE, LONG)):
            return True
        if name in FOR_PEOPLE:
            return value == "" and default != ""
        return takes_text(hint) and (value in (SURROGATE, NUL) or (value == "" and default != ""))
    return False


class Stranger:
    """A class that makes nothing that is expected."""

    def __init__(self, *args: Any) -> None:
        pass


async def a_coroutine_function(*args: Any) -> None:
    """Has the wrong colour where its result is used."""


async def an_async_generator_function(*args: Any) -> Any:
    """Nothing awaits it."""
    yield


def a_generator_function(*args: Any) -> Any:
    """Cannot be awaited."""
    yield


def with_many_arguments(a: Any, b: Any, c: Any, d: Any, e: Any) -> None:
    """Takes more than any function that Headgate calls."""


def kinds_of(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def plausible(name: str, hint: Any) -> list[Any]:
    """What looks right and is wrong, for the annotation of one parameter."""
    wrong: list[Any] = []
    kinds = kinds_of(hint)
    callables = [one for one in kinds if (get_origin(one) or one) is collections.abc.Callable]
    for kind in kinds:
        origin, args = get_origin(kind) or kind, get_args(kind)
        if kind in callables:
            awaited = len(args) == 2 and get_origin(args[1]) in (collections.abc.Awaitable, collections.abc.Coroutine)
            wrong += [an_async_generator_function, a_generator_function if awaited else a_coroutine_function]
            wrong += [with_many_arguments] if isinstance(args[0], list) else []
            if is_own_class(args[1]):
                wrong += [Stranger, *([] if args[1] in kinds else [blank(args[1])])]
        elif origin is typing.Literal:
            wrong += [f"{args[0]}x", str(args[0]).upper(), str(args[0]).encode()]
        elif isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
            wrong += [dict.fromkeys(("a",), bad) for bad in wrong_elements(name, args[1])] if args else []
        elif isinstance(origin, type) and issubclass(origin, collections.abc.Iterable) and origin is not str:
            wrong += [[bad] for bad in wrong_elements(name, args[0])] if args and origin is not bytes else []
            wrong += [] if str in kinds or origin is collections.abc.Iterable else ["text"]
        elif is_own_class(origin) and not callables:
            wrong.append(origin)  # the class, where an instance is expected
    return wrong


def is_own_class(kind: Any) -> bool:
    return isinstance(kind, type) and kind.__module__ not in ("builtins", "typing", __name__)


def wrong_elements(name: str, hint: Any) -> list[Any]:
    """What must not be in a collection."""
    if hint is Any or isinstance(hint, typing.TypeVar) or hint is object:
        return []
    kinds = kinds_of(hint)
    wrong: list[Any] = [None, THING]
    wrong += ["", NUL, SURROGATE, BYTES] if str in kinds else ["text"]
    wrong += [math.nan, math.inf, -1.0, HUGE, True] if float in kinds else [0.5]
    wrong += [-1, HUGE, True] if int in kinds else []
    return wrong


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of one public function."""

    owner: str
    name: str
    function: Callable[..., Any]
    bound: tuple[Any, ...]
    hint: Any
    default: Any

    def __str__(self) -> str:
        return f"{self.owner}({self.name})"


class Unknown(type):
    """Stands for a type, or a module of types, that only type checkers import."""

    def __getattr__(cls, name: str) -> Unknown:
        return Unknown(name, (), {})

    def __getitem__(cls, item: Any) -> Unknown:
        return cls


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Its annotations, also those that only type checkers import."""
    inner = inspect.unwrap(function)
    names = dict(getattr(inner, "__globals__", vars(sys.modules[inner.__module__])))
    while True:
        try:
            return get_type_hints(inner, names)
        except NameError as error:
            names[error.name] = Unknown(str(error.name), (), {})


def functions() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """The name of each public function, the function, and what it is bound to."""
    for module in MODULES:
        for name in module.__all__:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = getattr(module, name)
            found = INSTEAD.get(found, found)
            if inspect.isfunction(found):
                yield f"{module.__name__}.{name}", found, ()
            elif inspect.isclass(found) and not issubclass(found, BaseException | Enum):
                yield from methods(f"{module.__name__}.{name}", found)


def methods(owner: str, kind: type) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    new = vars(kind).get("__new__")
    if isinstance(new, staticmethod) and owner.rpartition(".")[2] not in MADE_BY_HEADGATE:  # a named tuple
        yield owner, new.__func__, (kind,)
    made = vars(kind).get("__init__") or next(vars(one)["__init__"] for one in kind.__mro__ if "__init__" in vars(one))
    if (
        inspect.isfunction(made)
        and owner.rpartition(".")[2] not in MADE_BY_HEADGATE
        and not is_interface(kind, "__init__")
    ):
        yield owner, made, (blank(kind),)
    for name in dir(kind):
        static = inspect.getattr_static(kind, name)
        function = static.__func__ if isinstance(static, classmethod | staticmethod) else static
        if name.startswith("_") or not inspect.isfunction(function) or is_interface(kind, name):
            continue
        bound = (
            () if isinstance(static, staticmethod) else (kind,) if isinstance(static, classmethod) else (blank(kind),)
        )
        wrapped = getattr(function, "__wrapped__", None)
        if owner == "headgate.Sidecar" and wrapped is not None and "SidecarRuntime." in wrapped.__qualname__:
            function = wrapped  # a method of ``Sidecar`` that calls it on the sidecar's loop
        yield f"{owner}.{name}", function, bound


def is_interface(kind: type, name: str) -> bool:
    return any(issubclass(kind, one) and name in vars(one) for one in CALLED_BY_HEADGATE)


def blank(kind: type) -> Any:
    """An instance without attributes: a check needs none."""
    abstract = getattr(kind, "__abstractmethods__", ())
    return object.__new__(type(kind.__name__, (kind,), {"__del__": lambda self: None, **dict.fromkeys(abstract)}))


def parameters() -> Iterator[Parameter]:
    seen = set()
    for owner, function, bound in functions():
        short = owner.removeprefix("headgate.")
        if short in NOT_FOR_USERS or (function, owner.rpartition(".")[2]) in seen:
            continue
        seen.add((function, owner.rpartition(".")[2]))
        hints = hints_of(function)
        for parameter in list(inspect.signature(function).parameters.values())[len(bound) :]:
            kind = parameter.kind
            if kind is kind.VAR_KEYWORD or f"{short}({parameter.name})" in ANYTHING:
                continue
            hint = HINTS.get(f"{short}({parameter.name})", hints.get(parameter.name, Any))
            yield Parameter(short, parameter.name, function, bound, hint, parameter.default)


PARAMETERS = list(parameters())


def call_with(parameter: Parameter, value: Any, *, others: bool) -> BaseException | None:
    """Call the function with this value, and valid ones for all ``others`` that it needs; return what it raises."""
    signature = inspect.signature(parameter.function)
    given: dict[str, Any] = {}
    positional: list[Any] = list(parameter.bound)
    for one in list(signature.parameters.values())[len(parameter.bound) :]:
        wrong = one.name == parameter.name
        if one.kind is one.VAR_POSITIONAL:
            positional += [value] if wrong else []
            continue
        needed = one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if wrong or (needed and others):
            argument = value if wrong else VALID.get(one.name, "valid")
            if one.kind is one.POSITIONAL_ONLY:
                positional.append(argument)
            else:
                given[one.name] = argument
    try:
        result = parameter.function(*positional, **given)
    except BaseException as error:
        return error
    try:
        if parameter.owner in CHECKED_WHEN_AWAITED:
            result.send(None)
    except BaseException as error:
        return error
    finally:
        if hasattr(result, "close"):
            result.close()
    return None


@pytest.mark.parametrize("parameter", PARAMETERS, ids=str)
def test_a_wrong_argument_is_refused_with_its_name_what_was_given_and_what_is_expected(parameter: Parameter) -> None:
    also_right = ALSO_RIGHT.get(str(parameter), [])
    bad = []
    pool = [one for one in POOL if is_wrong(one, parameter.name, parameter.hint, parameter.default, also_right)]
    for value in [*pool, *plausible(parameter.name, parameter.hint)]:
        error = call_with(parameter, value, others=False)
        if error is not None and not names_all(str(error), parameter.name, value):
            error = call_with(parameter, value, others=True)
        if error is None:
            bad.append(f"{show(value, SHOWN_CHARS_MAX)} is accepted")
        elif not isinstance(error, TypeError | ValueError) or not names_all(str(error), parameter.name, value):
            bad.append(f"{show(value, SHOWN_CHARS_MAX)} raises {type(error).__name__}: {error}")
    assert not bad, f"{parameter}: " + "\n".join(bad)


HIDDEN = "Zq7Xw"
MISPLACED: list[Any] = [
    {"sasl.password": HIDDEN, "security.protocol": "ssl"},
    {"a": [{"api_key": HIDDEN}]},
    [("token", HIDDEN)],
    f"host=h password={HIDDEN}",
    f"PGPASSWORD = '{HIDDEN}'",
    f"Authorization: Bearer {HIDDEN}",
    f"ftp:u:{HIDDEN}@h/x",
    f"s3://u%3a{HIDDEN}@b/x",
    f"s3://u%253a{HIDDEN}%2540b/x",
    f"https://h/x?sig={HIDDEN}",
    f"-----BEGIN PRIVATE KEY-----\n{HIDDEN}",
    f"DefaultEndpointsProtocol=https;AccountKey={HIDDEN}".encode(),
    f"{HIDDEN}{'x' * 40}".encode(),
    type("Settings", (), {"__repr__": lambda self: f"Settings(secret={HIDDEN!r})"})(),
]
"""Settings with a secret in them, as they are given for another argument by mistake."""


@pytest.mark.parametrize("parameter", PARAMETERS, ids=str)
def test_a_secret_in_place_of_another_argument_is_not_shown(parameter: Parameter) -> None:
    """H76. A text that is right there is shown, however."""
    if str(parameter) in ("SidecarRuntime.permits(name)", "Permits(name)", "CheckpointStorage.read_file(url)"):
        return
    for value in [*MISPLACED, f"{HIDDEN}{'x' * 40}"]:
        if isinstance(value, str) and "x" * 40 in value and parameter.hint not in (int, float, bool):
            continue  # a token is a text like others
        for others in (False, True):
            error = call_with(parameter, value, others=others)
            assert HIDDEN not in f"{error} {error!r}", value


def test_a_secret_by_another_name_is_not_shown() -> None:
    """H76: with random names, places and notations."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    names = ["password", "passwd", "Token", "SECRET", "key", "keyId", "dsn", "sas", "credential", "signature", "pwd"]
    around: list[tuple[str, str]] = [("sasl.", ""), ("", "_1"), ("AWS_", ""), ("", ""), ("x-", "")]
    notations = ["{}={}", "{} = {}", "{}: {}", '{{"{}": "{}"}}', "('{}', '{}')", "--{} {}", "h?{}={}&", "\n{}\t{}"]
    for _ in range(2_000):
        name = chance.choice(names)
        before, after = chance.choice(around)
        after = "" if name in ("key", "keyId", "sas", "signature") else after
        text = chance.choice(notations).format(f"{before}{name}{after}", HIDDEN)
        value = chance.choice([text, [text], {"a": text}, text.encode(), ("a", {"b": [text]})])
        with pytest.raises((TypeError, ValueError)) as refused:
            headgate.FixedDelay(typing.cast("Any", value))
        assert HIDDEN not in str(refused.value), value


def names_all(text: str, name: str, value: Any) -> bool:
    return f"{name} must be" in text and (show(value, SHOWN_CHARS_MAX) in text or type(value).__name__ in text)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: headgate.FixedDelay(10**30), "restarts_max must be an int of at least 0, and less than 2**63, not 10"),
        (lambda: headgate.FixedDelay(delay_s=math.inf), ", and finite, not inf"),
        (
            lambda: headgate.SidecarLimits(ready_timeout_s=math.inf),
            "number of seconds, and finite, not inf",
        ),
    ],
)
def test_a_number_that_is_too_large_is_told_its_bound(make: Callable[[], object], says: str) -> None:  # H165
    with pytest.raises(ValueError, match=re.escape(says)):
        make()


NOT_CARRIED: dict[str, Callable[[Any], object]] = {
    "value": lambda thing: headgate.SharedValue("part", thing),
    "value ": lambda thing: headgate.SharedValue("part", 1).set(thing),
    "what function returned": lambda thing: headgate.SharedValue("part", 1).update(lambda _: thing),
    "a root": lambda thing: headgate.WorkQueue("part", [1, thing]),
    "the key of an item": lambda thing: headgate.WorkQueue("part", [1], key=lambda _: thing),
    "a split": lambda thing: headgate.StaticSplitEnumerator([1, thing]),
}
"""Calls with a value that is carried as an event, and what the error names in place of an event."""


@pytest.mark.parametrize("name", NOT_CARRIED)
@pytest.mark.parametrize(
    ("thing", "says"),
    [
        (THING, " is of type builtins.object"),
        ({"a": [THING]}, "['a'][0] is of type builtins.object"),
        (SURROGATE, " cannot be encoded: "),
        (HUGE, " cannot be encoded: "),
    ],
    ids=["object", "inside", "surrogate", "huge"],
)
def test_a_value_that_an_event_cannot_carry_is_refused_by_its_name(name: str, thing: Any, says: str) -> None:
    with pytest.raises(EventEncodeError) as refused:
        NOT_CARRIED[name](thing)
    assert str(refused.value).startswith(f"{name.strip()}{says}")
    assert refused.value.__suppress_context__  # the text of the cause speaks of an event


def test_the_tables_name_only_what_exists() -> None:
    owners = {owner.removeprefix("headgate.") for owner, _, _ in functions()}
    assert set(NOT_FOR_USERS) <= owners, set(NOT_FOR_USERS) - owners
    everything = {
        f"{owner.removeprefix('headgate.')}({name})"
        for owner, function, _ in functions()
        for name in inspect.signature(function).parameters
    }
    assert set(ANYTHING) | set(ALSO_RIGHT) <= everything, (set(ANYTHING) | set(ALSO_RIGHT)) - everything


OPTIONS_WRONG: dict[str, list[str]] = {
    "port": ["-1", "65536", "1e3", "nan", "", "x"],
    "open_port": ["-1", "0", "65536", "x", ""],
    "seconds": ["-1", "0", "nan", "inf", "x", ""],
    "host": ["", "a b", "127.0.0.1:7650", "[::1]", "http://a", "a/b", NUL, "x" * 1000],
    "label": ["", "a\nb", NUL, "x" * 1000],
    "path": ["", NUL],
    "server": ["", "sc://", "a:15002", "http://a", "sc://a b", NUL],
    "setting": ["spark.driver.host", "=x", "a b=c"],
    "text": ["", NUL],
}


def options() -> Iterator[tuple[str, str, list[str], list[str]]]:
    """Each option of each command that takes a value: its name, the arguments before it, and wrong values."""
    main_parser = parser()
    (commands,) = (one for one in main_parser._actions if isinstance(one, argparse._SubParsersAction))
    for command, sub in commands.choices.items():
        # What follows `example NAME --run` is for the example.
        taking = [one for one in sub._actions if one.nargs not in (0, argparse.REMAINDER)]
        for option in taking:
            needed = [one for one in taking if one is not option and (one.required or not one.option_strings)]
            before = [word for one in needed for word in (*one.option_strings[:1], "valid")]
            name = option.option_strings[0] if option.option_strings else option.metavar or option.dest
            wrong = ["resumed", ""] if option.choices else OPTIONS_WRONG[option_type_name(option)]
            yield f"{command} {name}", str(name), [command, *before], wrong


def option_type_name(option: argparse.Action) -> str:
    return next(name for name in command_line.__all__ if getattr(command_line, name) is option.type)


@pytest.mark.parametrize(("name", "arguments", "wrong"), [pytest.param(*rest, id=id_) for id_, *rest in options()])
def test_a_wrong_option_is_refused_with_its_name_what_was_given_and_what_is_expected(
    name: str, arguments: list[str], wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for value in wrong:
        given = [f"{name}={value}"] if name.startswith("-") else ["--", value]
        with pytest.raises(SystemExit) as ended:
            command_main([*arguments, *given])
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert f"argument {name}: " in said, said
        assert show(value, SHOWN_CHARS_MAX) in said, said
        assert "must be" in said or "choose from" in said, said


def must_not_be_called(*_: object) -> None:
    raise AssertionError("what is wrong is refused before anything is called")


async def start_with_committer(committer: type[MemoryCommitter]) -> None:
    """Start the coordinator of a sink, as far as it uses the committer."""

    class Sink(MemorySink):
        def committer(self, context: Any) -> MemoryCommitter:
            return committer(context, self)

    context: Any = SimpleNamespace(mode=RestoreMode.STREAMING, operator_id="op", log=None)
    await headgate.sinks.TwoPhaseSinkCoordinator(Sink(Server(), "rows")).start(context)


ATTRIBUTES: dict[str, tuple[Callable[[str, Any], object], dict[str, list[Any]]]] = {
    "Task": (
        lambda name, value: setattr(blank(headgate.testing.Task), name, value),
        {
            **{key: [None, 1, "yes", THING] for key in ("busy", "unresponsive", "handles_urgent")},
            "state": [None, "text", 5, [1]],
            "declines": [None, True, b"no", 5],
        },
    ),
    "World": (
        lambda name, value: setattr(blank(headgate.testing.World), name, value),
        {"input_id": ["", 5, b"x", NUL], "storage_error": ["full", OSError, 5]},
    ),
    "a subclass of SplitReader": (
        lambda name, value: check_operator(type("Reader", (headgate.SplitReader,), {name: value})),
        {
            "splits_open_max": [0, -1, 1.5, True, "2", None],
            "idle_wait_s": [0, -1, math.nan, "1", None],
            "rate_limit_per_s": [0, -1, math.inf, "1"],
            "snapshot_anywhere": [None, 1, "yes"],
        },
    ),
    "a subclass of TwoPhaseSink": (
        lambda name, value: headgate.sinks.TwoPhaseSinkCoordinator(
            type("Sink", (headgate.sinks.TwoPhaseSink,), {name: value})()
        ),
        {"name": ["", 5, b"x", "a" * 300], "atomic": [None, 1, "yes"]},
    ),
    "a subclass of TwoPhaseCommitter": (
        lambda name, value: asyncio.run(
            start_with_committer(type("Committer", (MemoryCommitter,), {name: value, "open": must_not_be_called}))
        ),
        {"transient_errors": [OSError, [OSError], (int,), ("OSError",), None]},
    ),
}
"""What a user sets as an attribute: how, and wrong values."""


@pytest.mark.parametrize("owner", ATTRIBUTES)
def test_a_wrong_attribute_is_refused_with_its_name_what_was_given_and_what_is_expected(owner: str) -> None:
    put, names = ATTRIBUTES[owner]
    for name, values in names.items():
        for value in values:
            with pytest.raises((TypeError, ValueError)) as refused:
                put(name, value)
            assert names_all(str(refused.value), name, value), f"{owner}.{name}: {refused.value}"


@pytest.mark.parametrize(
    "settings",
    [{"key": ["b"]}, {"key": ["a", "b"]}, {"columns": ["a", "a"]}, {"columns": []}, {"mode": "stagd"}],
)
def test_columns_of_a_sink_that_do_not_fit_together_are_refused(settings: Any) -> None:
    name = next(iter(settings))
    with pytest.raises(ValueError, match=f"{name} must be"):
        headgate.sinks.PostgresSink("", "t", **({"columns": ["a"]} | settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"columns": ["a", "a"]},
        {"columns": ["op"]},
        {"op_column": "lsn"},
        {"columns": ["id", "lsn"]},
        {"op_column": "id"},
    ],
)
def test_columns_of_a_source_that_do_not_fit_together_are_refused(settings: Any) -> None:
    with pytest.raises(ValueError, match="columns must be names that differ"):
        headgate.sources.PostgresSource("", "t", "id", **({"changes": "slot"} | settings))


def test_a_list_of_anything_is_not_looked_through() -> None:
    """There may be a million splits."""

    class Counted(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("it was looked through")

    for hint in (collections.abc.Iterable[Any], list[Any], collections.abc.Sequence[typing.TypeVar("T")]):  # type: ignore[misc]
        assert has_type(Counted([1]), hint)
    assert not has_type(["a"], list[int])


def test_what_has_only_another_form_is_passed_on_in_the_right_one(tmp_path: Path) -> None:
    config = headgate.CheckpointConfig(interval_s=np.float32(2), concurrent_max=np.int64(3))  # type: ignore[arg-type]
    assert (config.interval_s, type(config.interval_s)) == (2.0, float)
    assert (config.concurrent_max, type(config.concurrent_max)) == (3, int)
    group = headgate.Group("g", np.int64(2))  # type: ignore[arg-type]
    assert group.name == "g"
    sink = headgate.sinks.FileSink(tmp_path)  # type: ignore[arg-type]
    assert sink.url == str(tmp_path)


def test_a_setting_of_a_sink_that_does_not_exist_is_refused_where_it_is_given(tmp_path: Path) -> None:
    make: Any = headgate.sinks.FileSink
    with pytest.raises(TypeError, match="sufix"):
        make(str(tmp_path), sufix=".txt")
    with pytest.raises(TypeError, match=r"roll_bytes must be .*, not '1'"):
        make(str(tmp_path), roll_bytes="1")

# SPDX-License-Identifier: Apache-2.0

"""Wrong arguments whose mistake is not their type: what the action returned, two places for one setting, a question to
oneself. ``tests/test_arguments.py`` has the types and ranges of all others.
"""

# H165

from __future__ import annotations

import math
import os
import re
import threading
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import pandas
import pyarrow
import pytest

from actors.coordination import OperatorConfig
from headgate import (
    NO_RESTART,
    Addresses,
    CheckpointConfig,
    CheckpointFile,
    ExponentialDelay,
    FixedDelay,
    GatewayLimits,
    LedgerConfig,
    OperatorCoordinator,
    OperatorHandle,
    Sidecar,
    SidecarConfig,
    SidecarLimits,
    SidecarRuntime,
    StorageDetails,
    SubtaskContext,
    Watching,
    chain,
)
from headgate.errors import CoordinatorStartError
from headgate.sinks import FileSink
from headgate.sources import FileSource
from headgate.testing import RecordingCoordinator, running_operator
from protocol.arguments import SUBTASKS_MAX
from protocol.describing import type_name
from protocol.wire.framing import WireLimits
from protocol.wire.keys import KeyRing
from spark_bridge.common.endpoint import TaskEndpoint
from spark_bridge.common.errors import SidecarError
from spark_bridge.driver import config
from spark_bridge.driver.restarts import is_lazy, run_with_restarts
from spark_bridge.server.server import ServerConfig
from spark_bridge.subtask.operator import SubtaskOperator, iterated
from spark_bridge.subtask.parts import OperatorParts
from tests.conformance.application import application
from tests.spark_bridge.simulated_driver import SimulatedDriver
from tests.spark_bridge.test_restarts import Runs


def lazy(module: str, name: str) -> Any:
    """An instance of a class that Spark would make, without importing it."""
    base = type(name, (), {"__module__": module})
    return type(f"Special{name}", (base,), {})()


LAZY = [
    lazy("pyspark.core.rdd", "RDD"),
    lazy("pyspark.sql.classic.dataframe", "DataFrame"),
    lazy("pyspark.sql.connect.dataframe", "DataFrame"),
    lazy("pyspark.sql.readwriter", "DataFrameWriter"),
]
NOT_LAZY = [None, 5, [LAZY[0]], lazy("pandas.core.frame", "DataFrame"), lazy("pyspark.sql.types", "Row")]


@pytest.mark.parametrize("result", LAZY)
async def test_an_action_that_only_describes_a_computation_is_refused(result: Any) -> None:
    async def act(action_id: str) -> Any:
        return result

    with pytest.raises(TypeError, match=r"action must be a function that runs Spark, but it returned .*\.collect\(\)"):
        await run_with_restarts(Runs(), FixedDelay(), act)


@pytest.mark.parametrize("result", LAZY)
async def test_an_action_that_has_run_may_return_what_is_lazy(result: Any) -> None:
    runs = Runs()
    runs.ran = True

    async def act(action_id: str) -> Any:
        return result

    assert await run_with_restarts(runs, FixedDelay(), act) is result


@pytest.mark.parametrize("result", NOT_LAZY)
def test_other_results_are_not_lazy(result: Any) -> None:
    assert not is_lazy(result)


def test_an_action_in_place_of_its_function_is_refused_with_an_example() -> None:
    for method in (Sidecar.run, SidecarRuntime.run):
        with pytest.raises(TypeError, match=r"action must be a function .* such as lambda: rdd\.count\(\), not 42"):
            method(cast("Any", None), cast("Any", 42))


@pytest.mark.parametrize("setting", ["heartbeat_interval_s", "heartbeat_timeout_s"])
def test_heartbeats_are_set_in_one_place(setting: str) -> None:
    """``Sidecar.coordinate`` is the same call, on the sidecar's loop."""
    with pytest.raises(
        TypeError, match=rf"^coordinate\(\) takes {setting} in another place.*GatewayLimits\({setting}="
    ):
        cast("Any", SidecarRuntime).coordinate(None, "words", parallelism=1, gateway=GatewayLimits(), **{setting: 9.0})


@pytest.mark.parametrize("timeout_s", [1.0, 9.0])
def test_a_timeout_of_heartbeats_alone_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValueError, match=rf"heartbeat_interval_s must be given with heartbeat_timeout_s={timeout_s}"):
        GatewayLimits(heartbeat_timeout_s=timeout_s)
    with pytest.raises(ValueError, match="heartbeat_interval_s must be given with"):
        replace(GatewayLimits(heartbeat_interval_s=0.25, heartbeat_timeout_s=timeout_s), heartbeat_interval_s=None)


def test_an_interval_of_heartbeats_alone_has_a_timeout_of_a_second() -> None:
    assert GatewayLimits(heartbeat_interval_s=0.5) == GatewayLimits(heartbeat_interval_s=0.5, heartbeat_timeout_s=1.0)
    with pytest.raises(ValueError, match=r"at most half of heartbeat_timeout_s \(1\.0\), not 0\.6"):
        GatewayLimits(heartbeat_interval_s=0.6)


async def test_an_operator_has_the_limits_that_it_is_given_or_those_of_the_sidecar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With each of them, every field: two places that both set one of them would differ from both."""
    own = GatewayLimits(heartbeat_interval_s=0.5, heartbeat_timeout_s=20.0, events_max=7)
    of_all = GatewayLimits(heartbeat_interval_s=0.25, heartbeat_timeout_s=2.0, events_max=9)
    seen: dict[str, GatewayLimits] = {}
    async with SidecarRuntime(SimulatedDriver(), SidecarConfig(gateway=of_all)) as runtime:
        add = runtime._operators.add

        async def noting(config: OperatorConfig, *given: Any) -> Any:
            seen[config.operator_id] = config.gateway
            return await add(config, *given)

        monkeypatch.setattr(runtime._operators, "add", noting)
        await runtime.coordinate("own", parallelism=1, gateway=own)
        await runtime.coordinate("all", parallelism=1)
    assert seen == {"own": own, "all": of_all}


class Words(SubtaskOperator):
    def process(self, records: Any) -> None:
        """Return nothing."""


@pytest.mark.parametrize("outputs", [5, "abc", b"abc", {"a": 1}, Ellipsis], ids=str)
def test_a_process_that_returns_no_iterable_is_named_with_what_it_returned(outputs: object) -> None:
    with pytest.raises(TypeError, match=r"Words\.process must return an iterable of outputs, or None, not .*: yield"):
        iterated(Words(), outputs)
    assert list(iterated(Words(), None)) == []
    assert list(iterated(Words(), (1, 2))) == [1, 2]


def test_a_process_beside_ready_made_parts_is_named_by_its_own_class() -> None:
    class Five(SubtaskOperator):
        def process(self, records: Any) -> Any:
            return 5

    with pytest.raises(TypeError, match=r"^Five\.process must return an iterable"):
        OperatorParts(Five, {})._fed(iter([]))


async def test_a_coordinator_that_asks_itself_is_told_so_immediately() -> None:
    errors: list[BaseException] = []

    async def ask(subtask: int, attempt: int, request: Any) -> None:
        for call in (
            app.operators.request("words", "a question", timeout_s=30.0),
            app.operators.checkpoint(None, timeout_s=30.0),
        ):
            try:
                await call
            except SidecarError as error:
                errors.append(error)

    async with application() as app:
        await app.coordinate(RecordingCoordinator(handle_event_from_operator=ask))
        tasks = await app.running()
        tasks[0].send("go")
        await app.settle()
    assert len(errors) == 2
    assert all("the coordinator of operator 'words' asked itself" in str(error) for error in errors)


def test_a_method_of_the_sidecar_on_its_own_loop_is_refused_with_a_way_out() -> None:
    class Here:
        _thread_id = threading.get_ident()

    sidecar = object.__new__(Sidecar)
    sidecar._calls, sidecar._runtime = cast("Any", object()), cast("Any", Here())
    sidecar._process_id = os.getpid()
    for call in (
        sidecar.status,
        lambda: sidecar.request("words", 1),
        lambda: sidecar.coordinate("words", parallelism=1),
    ):
        with pytest.raises(SidecarError, match=r"on the sidecar's own event loop.*call_async"):
            call()


def test_an_argument_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(
        TypeError, match=r"Group\(\) has no argument 'min', but was given min=2: it has name, size, min"
    ):
        object.__new__(Sidecar).group("w", min=2)
    with pytest.raises(TypeError, match=r"^coordinate\(\) has no argument 'paralelism', but was given paralelism=2"):
        cast("Any", SidecarRuntime).coordinate(None, "words", paralelism=2)


UNKNOWN: list[tuple[Any, str, str]] = [
    (SidecarConfig, "storge", "storage"),
    (Addresses, "relay_prt", "relay_port"),
    (StorageDetails, "option", "options"),
    (Watching, "status_prt", "status_port"),
    (SidecarLimits, "start_timeout", "start_timeout_s"),
    (CheckpointConfig, "interval", "interval_s"),
    (GatewayLimits, "confirm_timeout", "confirm_timeout_s"),
    (LedgerConfig, "attempts", "attempts_max"),
    (FixedDelay, "restarts", "restarts_max"),
    (ExponentialDelay, "maximum", "maximum_s"),
]


@pytest.mark.parametrize(("settings", "name", "near"), UNKNOWN)
def test_a_setting_that_does_not_exist_is_refused_with_those_that_do(settings: Any, name: str, near: str) -> None:
    known = ", ".join(one.name for one in fields(settings) if one.init)
    text = (
        f"{settings.__name__}() has no argument '{name}', but was given {name}=3: it has {known}. Did you mean {near}?"
    )
    for make in (settings, partial(replace, settings())):
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            make(**{name: 3})


@pytest.mark.parametrize("name", ["checkpoint", "mode", "parallelism", "restore"])
def test_an_argument_of_coordinate_is_refused_in_the_settings_with_its_place(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name} is an argument of coordinate\(\), {name}=\.\.\.$"):
        cast("Any", SidecarConfig)(**{name: 1})


class NeedsLimit(OperatorCoordinator):
    def __init__(self, limit: int, more: int = 0, *others: int) -> None:
        """Need an argument."""


ADVICE: dict[str, tuple[Any, str]] = {
    "a class with arguments": (NeedsLimit, r"NeedsLimit needs arguments \(limit\): pass lambda: NeedsLimit\(\.\.\.\)"),
    "another class": (Path, "derive Path from OperatorCoordinator"),
    "an operator's class": (SubtaskOperator, r"a SubtaskOperator goes to job\.run or job\.subtask"),
    "an operator": (SubtaskOperator(), r"a SubtaskOperator goes to job\.run or job\.subtask"),
    "a sink": (FileSink("/tmp/x", name="w"), r"wrap a sink in TwoPhaseSinkCoordinator\(sink\)"),
    "a source": (FileSource("/tmp/x"), r"it has both halves, so put it into a chain, chain\(read=\.\.\.\)"),
}


@pytest.mark.parametrize(("given", "says"), ADVICE.values(), ids=ADVICE)
def test_what_is_not_a_coordinator_is_refused_with_where_it_belongs(given: Any, says: str) -> None:
    for call in (partial(cast("Any", SidecarRuntime).coordinate, None, "words"), running_operator):
        with pytest.raises(TypeError, match=says):
            call(coordinator=given, parallelism=1)


def test_the_stages_of_a_chain_need_names() -> None:
    with pytest.raises(TypeError, match=r"stages of a chain need names, .*: chain\(read=\.\.\., write=\.\.\.\)$"):
        cast("Any", chain)(FileSource("/tmp/x"), FileSink("/tmp/y", name="w"))


def test_a_word_that_is_not_one_of_the_choices_is_refused_with_the_choices_alone() -> None:
    with pytest.raises(ValueError, match=r"^mode must be 'batch' or 'streaming', not 'stream'$"):
        cast("Any", SidecarRuntime).coordinate(None, "words", mode="stream")


LABELS = ["a\x00b", "a\nb", "a\x9fb", "a\ud800", "x" * 257, "", " ", "\u2003\xa0", "a/b"]


@pytest.mark.parametrize("name", LABELS)
def test_the_name_of_an_operator_is_refused_where_it_is_given(name: str) -> None:  # H156
    text = "operator_id must be a str of 1 to 256 characters"
    with pytest.raises(ValueError, match=text):
        cast("Any", SidecarRuntime).coordinate(None, name, parallelism=1)
    with pytest.raises(ValueError, match=text):
        OperatorConfig(name, 1)
    with pytest.raises(ValueError, match=text):
        TaskEndpoint("h", 1, KeyRing(bytes(32)).task_key("words"), name, 1)
    with pytest.raises(ValueError, match=text):
        running_operator(parallelism=1, operator_id=name)


@pytest.mark.parametrize(
    "settings",
    [
        *(SidecarConfig, Addresses, StorageDetails, Watching, SidecarLimits),
        *(CheckpointConfig, GatewayLimits, LedgerConfig, WireLimits, ServerConfig),
    ],
)
def test_no_setting_accepts_what_is_not_a_finite_number(settings: Any) -> None:
    """Also those of settings that users do not see."""
    names = [
        name
        for name, one in settings.__dataclass_fields__.items()
        if one.init and any(kind in str(one.type).split(" | ") for kind in ("int", "float"))
    ]
    assert names
    for name in names:
        for value in (math.nan, math.inf, -1, 10**400, "5", True):
            with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
                settings(**{name: value})


FORMER = {
    "bind_host": "host=...",
    "advertised_host": "addresses=Addresses(advertised_host=...)",
    "storage_options": "storage_details=StorageDetails(options=...)",
    "savepoint_roots": "storage_details=StorageDetails(savepoint_roots=...)",
    "status_token": "watching=Watching(status_token=...)",
    "settle_timeout_s": "limits=SidecarLimits(settle_timeout_s=...)",
    "freeze_heap": "limits=SidecarLimits(freeze_heap=...)",
}


@pytest.mark.parametrize("name", FORMER)
def test_a_former_argument_of_the_settings_is_refused_with_its_place_in_a_group(name: str) -> None:
    place = re.escape(f"{name} is {FORMER[name]}")
    for make in (SidecarConfig, partial(replace, SidecarConfig())):
        with pytest.raises(TypeError, match=rf"^SidecarConfig\(\) takes {name} in another place: {place}$"):
            cast("Any", make)(**{name: "a-secret-text"})


def test_one_error_names_the_places_of_all_former_arguments() -> None:
    with pytest.raises(TypeError, match=f"takes {', '.join(FORMER)} in another place: ") as refused:
        cast("Any", SidecarConfig)(**dict.fromkeys(FORMER), port=1)
    assert all(f"{name} is {place}" in str(refused.value) for name, place in FORMER.items())


def test_every_field_of_a_group_is_refused_outside_of_it() -> None:
    """The groups are the registry of the places, so a new field has one."""
    flat = {one.name for one in fields(SidecarConfig)}
    for group, kind in config._GROUPS.items():
        assert type(getattr(SidecarConfig(), group)) is kind
        for one in fields(kind):
            assert one.name not in flat
            if one.name != "options":
                with pytest.raises(TypeError, match=rf"is {group}={kind.__name__}\({one.name}=\.\.\.\)$"):
                    cast("Any", SidecarConfig)(**{one.name: None})


RESTORES = ["newest", "", "checkpoint-7.hgc", "/s/checkpoint-7.hgc", "s3://bucket/x.hgc", 7, b"latest", True]


@pytest.mark.parametrize("restore", RESTORES)
def test_a_text_that_is_not_a_mode_of_restoring_is_refused_with_the_ways_to_name_a_file(restore: Any) -> None:
    text = r"^restore must be 'latest', 'none', a Path\(\.\.\.\), or CheckpointFile\(PATH_OR_URL\)"
    with pytest.raises((TypeError, ValueError), match=text):
        cast("Any", SidecarRuntime).coordinate(None, "words", parallelism=1, restore=restore)


@pytest.mark.parametrize("wrong", ["", None, 7, "a\x00b", "s3://me:geheim123@bucket/x.hgc"])
def test_a_file_to_start_from_is_a_path_or_a_url(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^url must (be|not have)") as refused:
        CheckpointFile(wrong)
    assert "geheim123" not in str(refused.value)


async def test_a_file_named_like_a_mode_can_be_restored(tmp_path: Path) -> None:
    """The word in place of the file starts from the newest checkpoint, so a path is never a word."""
    starts: list[int] = []

    class Counting(OperatorCoordinator):
        async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
            starts.append(checkpoint_id)

        async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
            return b"state"

    async with SidecarRuntime(SimulatedDriver(), SidecarConfig(storage=tmp_path / "kept")) as runtime:
        await runtime.coordinate("words", Counting, parallelism=1, mode="streaming")
        os.rename(await runtime.savepoint("words", directory=str(tmp_path)), tmp_path / "none")
        newest = await runtime.checkpoint("words")
        starts.clear()
        for restore in (tmp_path / "none", CheckpointFile(tmp_path / "none"), CheckpointFile(str(tmp_path / "none"))):
            again = partial(runtime.coordinate, "words", Counting, parallelism=1, mode="streaming", replace=True)
            await again(restore=restore)
        assert len(set(starts)) == 1
        assert starts[0] < newest


async def test_a_start_that_takes_too_long_fails_and_the_name_is_free_again() -> None:
    """``start_timeout_s``; the coordinator is cut off where it waits."""

    class Waiting(OperatorCoordinator):
        async def start(self, context: Any) -> None:
            await anyio.sleep_forever()

    limits = SidecarLimits(start_timeout_s=0.05, shutdown_timeout_s=0.1)
    async with SidecarRuntime(SimulatedDriver(), SidecarConfig(limits=limits)) as runtime:
        with pytest.raises(CoordinatorStartError, match="coordinator of operator 'words' failed in start") as late:
            await runtime.coordinate("words", Waiting, parallelism=1)
        assert "start_timeout_s" in str(late.value)
        await runtime.coordinate("words", OperatorCoordinator, parallelism=1)


def handle_of(operator_id: str, spark: object = None) -> OperatorHandle:
    """The handle of an operator whose tasks never run."""
    endpoint = TaskEndpoint("host", 1, KeyRing(bytes(32)).task_key(operator_id), operator_id, 2)
    return OperatorHandle(endpoint, dict, lambda: None, run=lambda action, **settings: [settings], spark=spark)


@pytest.mark.parametrize(
    "data", ["abc", {"a": 1}, 3, pandas.DataFrame({"a": [1]}), pyarrow.table({"a": [1]})], ids=type_name
)
def test_run_takes_only_records_of_the_program(data: Any) -> None:
    with pytest.raises(TypeError, match="data must be records of this program, such as a list; over an RDD"):
        handle_of("op", spark="a session").run(sorted, data)


class Squares(SubtaskOperator):
    def __init__(self, factor: int, *, name: str) -> None: ...


class Called:
    def __call__(self, records: Any, context: Any) -> None: ...


def turned(records: Any, context: Any) -> None: ...


def annotated(rows: Any, told_to: SubtaskContext) -> None: ...


def of_three(context: Any, records: Any, factor: int) -> None: ...


def without_factor(records: Any, factor: int) -> None: ...


def named(records: Any, *, factor: int) -> None: ...


def of_the_context(context: Any) -> None: ...


def of_nothing() -> None:
    print("works")


def yields_of_nothing(records: Any = ()) -> Any:
    yield from records


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            Squares,
            r"Squares\(factor, name\) .* 'factor'.* subtask\(Squares, ...\) or functools.partial\(Squares, ...\)",
        ),
        (partial(Squares, 2), r"Squares\(name\) cannot be called in a task: missing a required .*'name'"),
        (turned, r"would get the context as 'records'.*: write turned\(context, records\)"),
        (annotated, r"write annotated\(told_to, rows\)"),
        (Called(), r"write Called\(context, records\)"),
        (lambda records, context: None, r"write .*<lambda>\(context, records\)"),
        (
            of_three,
            r"missing a required argument: 'factor'. A function for tasks takes \(records\) or \(context, records\)",
        ),
        (named, r"missing a required argument: 'factor'.* functools.partial\(named, ...\)"),
        (without_factor, r"because 'factor' is missing: pass it along"),
        (of_the_context, r"would get only the records: write of_the_context\(context, records\)"),
        (of_nothing, r"write of_nothing\(records\), or of_nothing\(context, records\)"),
        (yields_of_nothing, r"no required argument that takes the records, and returns no SubtaskOperator"),
        (lambda: 3, "returns no SubtaskOperator"),
    ],
    ids=[
        "class",
        "partial-class",
        "turned",
        "annotated",
        "callable-object",
        "lambda",
        "three",
        "named",
        "without-factor",
        "only-context",
        "nothing",
        "yields",
        "constant",
    ],
)
async def test_what_no_task_can_call_is_refused_before_any_task(given: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        handle_of("op").subtask(given)
    with pytest.raises(TypeError, match=says):
        handle_of("op", spark="a session").run(given)
    with pytest.raises(TypeError, match=says):
        chain(only=given)
    async with running_operator(parallelism=1) as world:
        with pytest.raises(TypeError, match=says):
            await world.launch_operator(0, given, [])


def makes(factor: int = 2) -> SubtaskOperator | None:
    return Squares(factor, name="made") if factor else None


@pytest.mark.parametrize(
    ("given", "args"),
    [
        (Squares, (2,)),
        (makes, ()),
        (makes, (3,)),
        (lambda context, records: None, ()),
        (lambda first, second: None, ()),
        (without_factor, (2,)),
        (of_three, (2,)),
        (partial(named, factor=2), ()),
        (sum, ()),
        (Called().__call__, (1,)),
    ],
    ids=[
        "class",
        "factory",
        "factory-with-arguments",
        "function",
        "other-names",
        "given",
        "three",
        "named",
        "builtin",
        "method",
    ],
)
def test_what_a_task_can_call_is_taken(given: Any, args: tuple[Any, ...]) -> None:
    handle_of("op").subtask(given, *args, **({"name": "made"} if given is Squares else {}))


@pytest.mark.parametrize("name", ["request", "send_event", "broadcast"])
def test_a_method_that_a_handle_does_not_have_names_the_one_to_use(name: str) -> None:
    with pytest.raises(
        AttributeError, match=rf"'OperatorHandle' object has no attribute '{name}'\. .*sidecar\.request"
    ):
        getattr(handle_of("op"), name)
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        getattr(handle_of("op"), "nonsense")  # noqa: B009 - mypy knows that there is none


def test_tasks_of_one_operator_are_not_run_by_another_one_and_have_no_subtasks() -> None:
    job, other = handle_of("op", spark="a session"), handle_of("other", spark="a session")
    assert job.run(job.subtask(sorted), restart=NO_RESTART, input_id="today") == [
        {"restart": NO_RESTART, "operators": [job], "input_id": "today"}
    ]
    with pytest.raises(TypeError, match=r"tasks of operator 'other', and this is the handle of 'op': call run\(\) of"):
        job.run(other.subtask(sorted))
    with pytest.raises(TypeError, match=r"what subtask\(\) has returned is for Spark, or for run\(\)"):
        job.subtask(job.subtask(sorted))


def test_tasks_cannot_be_run_where_spark_is_in_another_process() -> None:
    with pytest.raises(SidecarError, match=r"Spark is in another process: run them there, with AttachedSidecar"):
        handle_of("op").run(sorted)


@pytest.mark.parametrize("parallelism", [0, SUBTASKS_MAX + 1, 10**9])
async def test_a_parallelism_that_no_operator_can_have_is_refused_where_it_is_given(parallelism: int) -> None:  # H165
    problem = f"parallelism must be an int from 1 to 1000000, not {parallelism}"
    async with SidecarRuntime(SimulatedDriver(), SidecarConfig()) as runtime:
        with pytest.raises(ValueError, match=problem):
            await runtime.coordinate("words", parallelism=parallelism)
        await runtime.coordinate("words", OperatorCoordinator, parallelism=1, mode="streaming")
        with pytest.raises(ValueError, match=problem):
            await runtime.rescale("words", parallelism)
    with pytest.raises(ValueError, match=problem):
        running_operator(parallelism=parallelism)

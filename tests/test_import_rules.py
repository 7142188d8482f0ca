# SPDX-License-Identifier: Apache-2.0

"""The import rules: every module's source is checked against the table of docs/architecture.md.

The layers make the protocol testable without a loop, the actors usable without Spark, and the executor's half small
enough to be shipped. `protocol/ruff.toml` also enforces the first of these rules as a lint ban.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("actors", "headgate", "protocol", "spark_bridge")

# The standard library modules that a machine may use: values, types and arithmetic. A further module needs a reason;
# clocks, random numbers, sockets and logs are never allowed.
PURE_STDLIB = frozenset(
    {
        "__future__",
        "abc",
        "bisect",
        "collections",
        "contextlib",
        "copy",
        "dataclasses",
        "difflib",
        "enum",
        "functools",
        "hashlib",
        "heapq",
        "hmac",
        "inspect",
        "itertools",
        "math",
        "numbers",
        "operator",
        "string",
        "struct",
        "types",
        "typing",
        "zlib",
    }
)
STDLIB = frozenset(sys.stdlib_module_names)
RUNTIME = STDLIB | {"protocol", "anyio"} | {f"actors.{file.stem}" for file in (ROOT / "actors").glob("*.py")}
# What users of an operator implement and see; all of its folders have it in common.
COORDINATION = RUNTIME | {
    f"actors.coordination.{module}" for module in ("interface", "statistics", "store", "user_calls")
}
ENGINE = (
    COORDINATION
    | {"actors.coordination.engine", "actors.coordination.host"}
    | {"actors.Actor", "actors.ActorContext", "actors.ActorRef", "actors.Background", "actors.DirectActor"}
    | {"actors.MailboxConfig", "actors.Reply", "actors.SystemNotRunning"}
)
COMMON = STDLIB | {"protocol", "spark_bridge.common"}
TASK = COMMON | {"spark_bridge.subtask"}
# What a task stores its state in files with. Each is imported where a task has such a state.
STATE_FILES = {f"spark_bridge.storage.{module}" for module in ("errors", "files", "state_files")}
PARTS = TASK | {"spark_bridge.primitives"}
SINK = TASK | {"fsspec", "spark_bridge.sinks"}
SOURCES = TASK | {"fsspec", "spark_bridge.sources"}


@dataclass(frozen=True)
class Layer:
    """One row of the table: a place, and the outermost names that it may import."""

    place: str
    may_import: frozenset[str]


# The first row that matches a file applies.
LAYERS = (
    # The front door loads lazily; its names come from any layer.
    Layer("headgate/__main__.py", STDLIB | {"spark_bridge.command"}),
    Layer("headgate/_pytest.py", STDLIB | {"headgate", "pyspark", "pytest", "pytest_asyncio"}),
    # The kit for users' tests, which needs neither Spark nor pytest.
    Layer(
        "headgate/testing/",
        STDLIB
        | {"headgate.testing", "actors", "protocol"}
        | {"spark_bridge.common", "spark_bridge.subtask", "spark_bridge.primitives", "spark_bridge.sinks.two_phase"}
        | {"spark_bridge.sources.source", "spark_bridge.storage.state_files"},
    ),
    Layer("headgate/", STDLIB | {"headgate._lazy", "actors", "protocol", "spark_bridge"}),
    # The door for what is shown: JSON as a value.
    Layer("protocol/describing.py", PURE_STDLIB | {"json", "traceback.TracebackException"}),
    # Texts only.
    Layer("protocol/secret_names.py", PURE_STDLIB | {"re", "urllib.parse.unquote"}),
    Layer("protocol/wire/codec.py", PURE_STDLIB | {"protocol", "msgpack"}),
    Layer("protocol/wire/events.py", PURE_STDLIB | {"protocol", "msgpack", "gc"}),
    # Values only: nothing here asks what time it is. NumPy is optional, and imported where it is needed.
    Layer(
        "protocol/wire/leaf_values.py", PURE_STDLIB | {"protocol", "datetime", "decimal", "numpy", "re", "sys", "uuid"}
    ),
    # A buffer in memory that becomes bytes without a copy.
    Layer("protocol/wire/fragments.py", PURE_STDLIB | {"protocol", "io.BytesIO"}),
    Layer("protocol/wire/state.py", PURE_STDLIB | {"protocol", "io.BytesIO"}),
    Layer("protocol/wire/large_leaves.py", PURE_STDLIB | {"protocol", "io.BytesIO"}),
    # It imports the module of a user's class, which the driver names, and keeps no combination of flags alive.
    Layer(
        "protocol/wire/event_classes.py",
        PURE_STDLIB | {"protocol", "importlib.import_module", "weakref.WeakValueDictionary"},
    ),
    Layer("protocol/wire/checkpoint_format.py", PURE_STDLIB | {"protocol", "msgpack"}),
    # For type checkers only, which bring it along.
    Layer("protocol/event_types.py", PURE_STDLIB | {"typing_extensions"}),
    Layer("protocol/", PURE_STDLIB | {"protocol"}),
    Layer("actors/coordination/engine/", ENGINE),
    # It is used only if the program has imported it.
    Layer("actors/coordination/host/traces.py", COORDINATION | {"opentelemetry"}),
    Layer("spark_bridge/subtask/traces.py", TASK | {"opentelemetry"}),
    Layer("spark_bridge/subtask/coroutines/loop.py", TASK | {"uvloop"}),
    Layer("spark_bridge/subtask/keyed_state.py", TASK | STATE_FILES | {"rocksdict"}),
    Layer("actors/coordination/host/", COORDINATION | {"actors.coordination.host"}),
    # A coordinator like a user's.
    Layer("actors/coordination/sources/", COORDINATION | {"actors.coordination.sources"}),
    Layer("actors/", STDLIB | {"actors", "protocol", "anyio", "structlog"}),
    # These run before anything else, and decide whether the other packages can be imported.
    Layer("spark_bridge/common/bootstrap.py", STDLIB),
    Layer("spark_bridge/common/foreign_packages.py", STDLIB),
    # What both halves import, and which imports neither. Some modules use an optional extra where it is needed.
    Layer("spark_bridge/common/arrow_types.py", COMMON | {"pyarrow", "pyspark"}),
    Layer("spark_bridge/common/certificates.py", COMMON | {"cryptography"}),
    Layer("spark_bridge/common/conninfo.py", COMMON | {"psycopg"}),
    Layer("spark_bridge/common/redis_clients.py", COMMON | {"redis"}),
    Layer("spark_bridge/common/urls.py", COMMON | {"fsspec"}),
    Layer("spark_bridge/common/", COMMON),
    Layer("spark_bridge/subtask/", TASK | STATE_FILES),
    # The parent of the executor's half: importing `spark_bridge.subtask` runs it there too.
    Layer(
        "spark_bridge/__init__.py", STDLIB | {"spark_bridge.common.bootstrap", "spark_bridge.common.foreign_packages"}
    ),
    # The command that looks at checkpoints runs without Spark and Java.
    Layer(
        "spark_bridge/storage/",
        STDLIB
        | {
            "spark_bridge.storage",
            "spark_bridge.common",
            "actors.logs",
            "actors.threads",
            "protocol",
            "anyio",
            "fsspec",
        },
    ),
    Layer(
        "spark_bridge/command.py",
        STDLIB
        | {"spark_bridge.driver.check", "spark_bridge.driver.examples", "spark_bridge.driver.installation"}
        | {"spark_bridge.storage"}
        | {"spark_bridge.observability.history", "spark_bridge.standalone.command", "spark_bridge.standalone.top"}
        | {"spark_bridge.connect.server_files"},
    ),
    # The sinks: `driver.py` of each runs on the driver and writes nothing; everything else goes into tasks too.
    Layer("spark_bridge/sinks/two_phase/driver.py", SINK | {"actors", "anyio"}),
    # The optional extras `postgres`, `redis`, `delta` and `iceberg`: each in one package, in modules that load lazily.
    Layer("spark_bridge/sinks/postgres/", SINK | {"psycopg"}),
    Layer("spark_bridge/sinks/redis/", SINK | {"redis"}),
    Layer("spark_bridge/sinks/parquet/", SINK | {"pyarrow"}),
    Layer("spark_bridge/sinks/delta/", SINK | {"deltalake", "pyarrow"}),
    Layer("spark_bridge/sinks/iceberg/", SINK | {"pyarrow", "pyiceberg"}),
    Layer("spark_bridge/sinks/", SINK),
    # The sources: `driver.py` of each runs on the driver, `task.py` in tasks. pyarrow is an optional extra.
    Layer("spark_bridge/sources/source.py", SOURCES | {"actors"}),
    Layer("spark_bridge/sources/files/driver.py", SOURCES | {"actors", "pyarrow"}),
    Layer("spark_bridge/sources/files/", SOURCES | {"pyarrow"}),
    Layer("spark_bridge/sources/kafka/driver.py", SOURCES | {"actors", "confluent_kafka", "pyarrow"}),
    Layer("spark_bridge/sources/kafka/task.py", SOURCES | {"confluent_kafka", "pyarrow"}),
    Layer("spark_bridge/sources/postgres/driver.py", SOURCES | {"actors", "anyio", "psycopg", "pyarrow"}),
    Layer("spark_bridge/sources/postgres/stream.py", SOURCES | {"psycopg"}),
    Layer("spark_bridge/sources/postgres/table.py", SOURCES | {"psycopg", "pyarrow"}),
    Layer("spark_bridge/sources/postgres/task.py", SOURCES | {"psycopg", "pyarrow"}),
    Layer("spark_bridge/sources/redis/driver.py", SOURCES | {"actors", "pyarrow"}),
    Layer("spark_bridge/sources/redis/task.py", SOURCES | {"pyarrow", "redis"}),
    Layer("spark_bridge/sources/", SOURCES),
    # The ready-made parts: `driver.py` of each runs on the driver, everything else in tasks too.
    Layer("spark_bridge/primitives/primitive.py", PARTS | {"actors"}),
    Layer("spark_bridge/primitives/chain.py", PARTS | {"actors", "spark_bridge.sinks"}),
    Layer("spark_bridge/primitives/budget/driver.py", PARTS | {"actors", "anyio", "spark_bridge.storage"}),
    Layer("spark_bridge/primitives/cache/driver.py", PARTS | {"actors", "anyio", "spark_bridge.storage"}),
    *(
        Layer(f"spark_bridge/primitives/{part}/driver.py", PARTS | {"actors"})
        for part in ("counters", "group", "permits", "shared_value", "work_queue")
    ),
    # The optional extras `xgboost` and `torch`, each imported in one module, where it is needed.
    Layer("spark_bridge/primitives/group/xgboost_group.py", PARTS | {"xgboost"}),
    Layer("spark_bridge/primitives/group/torch_group.py", PARTS | {"torch"}),
    Layer("spark_bridge/primitives/group/", PARTS | {"numpy"}),  # `arrays.py`, imported where arrays are; and types
    Layer("spark_bridge/primitives/", PARTS),
    # The command that reads an event log runs without Spark and Java; packages for zstd are found by their names.
    Layer(
        "spark_bridge/observability/history.py",
        STDLIB | {"protocol.describing", "spark_bridge.common"},
    ),
    # The optional extras `observability`, `opentelemetry` and `progress`, each imported in one module.
    Layer(
        "spark_bridge/observability/",
        STDLIB
        | {"spark_bridge", "protocol", "actors", "pyspark", "py4j", "anyio", "structlog"}
        | {"ddsketch", "opentelemetry", "prometheus_client", "tqdm"},
    ),
    # What makes a plan by hand. PyArrow comes with every client of Spark Connect.
    Layer("spark_bridge/connect/tunnel_calls.py", COMMON | {"actors.logs", "pyarrow", "pyspark"}),
    Layer(
        "spark_bridge/",
        STDLIB | {"spark_bridge", "protocol", "actors", "pyspark", "py4j", "anyio", "structlog"},
    ),
)


LIBRARY = ("spark_bridge/primitives/", "spark_bridge/sinks/", "spark_bridge/sources/", "spark_bridge/streams/")
ENGINES = ("actors", "headgate", "protocol", "spark_bridge")

# What the library may import besides itself: what users have too, and values, texts and encodings without a state.
PUBLIC = frozenset(
    {
        # What users implement and are given.
        *(f"actors.coordination.{name}" for name in ("Confirmation", "CoordinatorContext", "CoordinatorStore")),
        *(f"actors.coordination.{name}" for name in ("OperatorCoordinator", "Reply", "SubtaskGateway")),
        *(f"actors.coordination.{name}" for name in ("SourceCoordinator", "SplitEnumerator", "SplitEnumeratorContext")),
        "actors.coordination.GivenCoordinator",
        "actors.coordination.StaticSplitEnumerator",
        "actors.coordination.sources",
        "protocol.attempts.FailureReason",
        "protocol.wire.messages.RestoreMode",
        "spark_bridge.subtask.context.SubtaskContext",
        "spark_bridge.subtask.context.refuse_on_loop",
        "spark_bridge.subtask.errors",
        "spark_bridge.subtask.operator.SubtaskOperator",
        "spark_bridge.subtask.source.SplitReader",
        # Long work in turns and in threads, and log lines.
        *(f"actors.coordination.user_calls.{name}" for name in ("Begun", "call_each", "in_turns")),
        "actors.logs.get_logger",
        "actors.threads.USER",
        # How a ready-made part finds its half in a task.
        *(f"spark_bridge.subtask.parts.{name}" for name in ("COUNTERS", "ON_DRIVER", "PartInTask", "TaskPart")),
        *(f"spark_bridge.subtask.parts.{name}" for name in ("current_part", "runs_in_task")),
        # Values, checks and texts.
        *(f"protocol.{module}" for module in ("arguments", "describing", "enumerations", "errors", "ids")),
        *(f"protocol.{module}" for module in ("kept_bytes", "source_events", "splits", "values", "wire.state")),
        *(f"protocol.wire.codec.{name}" for name in ("decode_event", "encode_argument", "encode_event")),
        "protocol.wire.framing",
        *(f"spark_bridge.common.{module}" for module in ("arrow_types", "bootstrap", "conninfo", "errors", "extras")),
        *(f"spark_bridge.common.{module}" for module in ("local_folders", "redis_clients", "secret_texts", "urls")),
        # The machine of a group: pure, and only the group has it.
        "protocol.group",
        "protocol.machine.TimePassed",
    }
)

_COMPOSED = "it puts together the parts of an operator, which the engine then runs as one"
_GIVEN = "a stage is made and checked as what is given to handle.subtask()"
INTERNALS = {
    **dict.fromkeys(
        [
            (f"spark_bridge/primitives/{part}/driver.py", f"spark_bridge.storage.port.{name}")
            for part in ("budget", "cache")
            for name in ("ValuePort", "ValueUser")
        ],
        "a durable part outlives its application in the sidecar's storage",
    ),
    ("spark_bridge/primitives/budget/driver.py", "spark_bridge.storage.StorageFenced"): "its jobs end with it",
    ("spark_bridge/primitives/chain.py", "actors.coordination.Parts"): _COMPOSED,
    ("spark_bridge/primitives/chain.py", "actors.coordination.parts_of"): _COMPOSED,
    ("spark_bridge/primitives/chain.py", "actors.coordination.host.given.built_anew_or_kept"): _COMPOSED,
    ("spark_bridge/primitives/chain.py", "spark_bridge.subtask.parts.check_operator"): _GIVEN,
    ("spark_bridge/primitives/chain.py", "spark_bridge.subtask.operator.operator_factory"): _GIVEN,
    ("spark_bridge/primitives/chain.py", "spark_bridge.subtask.context.QUESTIONS"): _COMPOSED,
    ("spark_bridge/primitives/chain.py", "spark_bridge.subtask.coroutines.concurrently.Concurrently"): _GIVEN,
    ("spark_bridge/primitives/group/driver.py", "protocol.gateway.types.CONNECTION_GONE"): (
        "tells a member that lost its connection from one that failed, by the text of the failure"
    ),
    **{
        ("spark_bridge/primitives/work_queue/task.py", f"spark_bridge.subtask.{name}"): (
            "async stages work off its items: it hears what has left, and what coroutines add"
        )
        for name in ("context.runs_on_loop", "items.ADDS", "operator.PAUSE", "parts.parts_here")
    },
    ("spark_bridge/sources/hybrid.py", "spark_bridge.subtask.context.inner_context"): (
        "the events of the readers inside it name the reader, on both ends"
    ),
    ("spark_bridge/sources/hybrid.py", "spark_bridge.subtask.operator.close_quietly"): (
        "a reader that raises anything at its end keeps no other one open, as with the engine's own"
    ),
    ("spark_bridge/sources/hybrid.py", "spark_bridge.subtask.source.is_reader_state"): (
        "a checkpoint of before may have the state of a single reader in its place"
    ),
    ("spark_bridge/streams/driver.py", "actors.coordination.host.alone.HostAlone"): (
        "an enumerator is asked for a plan where no operator is"
    ),
    ("spark_bridge/streams/driver.py", "protocol.barrier_tracker.CompletedCheckpoint"): (
        "a plan is stored as a checkpoint, which the same tools show"
    ),
    ("spark_bridge/streams/driver.py", "spark_bridge.storage.StoragePort"): (
        "a plan outlives its application in the sidecar's storage"
    ),
}
"""The internals of the engine that the library imports nevertheless, each with its reason."""


def internals(path: str, source: str) -> set[tuple[str, str]]:
    """Return what a file of the library imports from the engine, other than what is public."""
    allowed = PUBLIC | {folder.rstrip("/").replace("/", ".") for folder in LIBRARY}
    return {
        (path, name)
        for _, name in imported_names(source, ".".join(Path(path).parent.parts))
        if name.partition(".")[0] in ENGINES and not any(name == one or name.startswith(f"{one}.") for one in allowed)
    }


def imported_names(source: str, module: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the full dotted name of each import in ``source``, anywhere in the file.

    ``from a import b`` yields ``a.b``, whether b is a module or not: only its place matters. Relative imports are
    resolved against ``module``, the dotted name of the package that the source belongs to.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name
            case ast.ImportFrom(module=name, names=names, level=level):
                base = ".".join(module.split(".")[: len(module.split(".")) - level + 1]) if level else ""
                prefix = ".".join(part for part in (base, name) if part)
                for alias in names:
                    yield node.lineno, f"{prefix}.{alias.name}"
            case ast.Call(
                func=ast.Name(id="__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str() as name), *_],
            ):
                yield node.lineno, name


def layer_of(path: str) -> Layer:
    """Return the row of the table that applies to ``path``, which is relative to the root of the repository."""
    return next(layer for layer in LAYERS if path == layer.place or path.startswith(layer.place))


def violations(path: str, source: str) -> list[str]:
    """Return the file's imports that violate the table, as readable lines."""
    layer = layer_of(path)
    module = ".".join(Path(path).parent.parts)
    return [
        f"{path}:{line}: {layer.place} may not import {name}"
        for line, name in imported_names(source, module)
        if not any(name == allowed or name.startswith(f"{allowed}.") for allowed in layer.may_import)
    ]


def every_module() -> list[str]:
    return sorted(str(file.relative_to(ROOT)) for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", every_module())
def test_a_module_imports_only_what_its_layer_allows(path: str) -> None:
    assert violations(path, (ROOT / path).read_text(encoding="utf-8")) == []


def test_the_library_imports_public_interfaces_of_the_engine_and_what_is_listed() -> None:
    found: set[tuple[str, str]] = set()
    for path in every_module():
        if path.startswith(LIBRARY):
            found |= internals(path, (ROOT / path).read_text(encoding="utf-8"))
    assert sorted(found) == sorted(INTERNALS)


@pytest.mark.parametrize(
    "source",
    [
        "from actors.coordination.engine.coordinator import CoordinatorActor",
        "from actors.coordination import BarrierTrackerActor",
        "from actors.coordination import host",
        "from protocol.gateway.machine import GatewayMachine",
        "def f():\n    from spark_bridge.subtask.channel import SubtaskChannel",
        "import spark_bridge.driver.sidecar",
        "from spark_bridge.subtask.parts import OperatorParts",
        "from headgate import start",
    ],
)
def test_an_internal_of_the_engine_is_found_in_the_library(source: str) -> None:
    assert len(internals("spark_bridge/sinks/rows.py", source)) == 1


def test_the_library_may_import_itself_and_what_is_public() -> None:
    source = "import json\nimport pyarrow\nfrom actors.coordination import Reply\nfrom spark_bridge.sinks import rows\n"
    assert internals("spark_bridge/sinks/rows.py", source + "from protocol import errors") == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_there_and_has_modules(package: str) -> None:
    assert any(path.startswith(f"{package}/") for path in every_module()), f"{package}/ has no modules"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("protocol/gateway/machine.py", "import time"),
        ("protocol/gateway/machine.py", "from asyncio import Queue"),
        ("protocol/gateway/machine.py", "def f():\n    import random"),
        ("protocol/gateway/machine.py", "import msgpack"),
        ("protocol/gateway/machine.py", "from actors.ref import Ref"),
        ("protocol/gateway/machine.py", "import collections, socket"),
        ("protocol/gateway/machine.py", "import importlib"),
        ("protocol/wire/codec.py", "import structlog"),
        ("protocol/gateway/machine.py", "__import__('time')"),
        ("actors/ref.py", "import pyspark"),
        ("actors/ref.py", "from spark_bridge import Sidecar"),
        (
            "actors/coordination/engine/gateway.py",
            "if TYPE_CHECKING:\n    from spark_bridge.bridge.relay.records import Fact",
        ),
        ("actors/coordination/host/part.py", "from actors.coordination.engine.messages import Hold"),
        ("actors/coordination/sources/source.py", "from actors.coordination.host.part import Part"),
        ("actors/coordination/sources/source.py", "from actors.coordination.engine.reply import Reply"),
        ("actors/coordination/engine/reply.py", "from actors.coordination.sources.source import SplitEnumerator"),
        ("actors/coordination/host/part.py", "from actors.coordination import OperatorConfig"),
        ("actors/ref.py", "from tests.tools import probe"),
        ("actors/ref.py", "import protocolx"),
        ("spark_bridge/subtask/operator.py", "import anyio"),
        ("spark_bridge/subtask/operator.py", "from pyspark import TaskContext"),
        ("spark_bridge/subtask/operator.py", "from spark_bridge import sidecar"),
        ("spark_bridge/subtask/operator.py", "from ..sidecar import Sidecar"),
        ("spark_bridge/subtask/operator.py", "from actors import Actor"),
        ("spark_bridge/__init__.py", "import pyspark"),
        ("spark_bridge/common/bootstrap.py", "from protocol.errors import HeadgateError"),
        ("spark_bridge/common/tls.py", "from spark_bridge.subtask.channel import Channel"),
        ("spark_bridge/common/tls.py", "from spark_bridge.server.server import AuthenticatedServer"),
        ("spark_bridge/common/certificates.py", "from actors import Actor"),
        ("spark_bridge/common/urls.py", "import psycopg"),
        ("protocol/wire/checkpoint_format.py", "import fsspec"),
        ("spark_bridge/storage/store.py", "import pyspark"),
        ("spark_bridge/storage/store.py", "from spark_bridge.driver.sidecar import Sidecar"),
        ("spark_bridge/storage/store.py", "from actors import Actor"),
        ("spark_bridge/command.py", "from spark_bridge.driver.sidecar import Sidecar"),
        ("spark_bridge/sinks/files/task.py", "from actors.coordination import OperatorCoordinator"),
        ("spark_bridge/sinks/files/task.py", "import anyio"),
        ("spark_bridge/sinks/two_phase/driver.py", "import pyspark"),
        ("spark_bridge/driver/sidecar.py", "import pandas"),
        ("spark_bridge/driver/sidecar.py", "from benchmarks import figures"),
    ],
)
def test_the_checker_catches_a_violation(path: str, source: str) -> None:
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("protocol/wire/codec.py", "import msgpack"),
        ("protocol/wire/checkpoint_format.py", "import msgpack"),
        ("spark_bridge/storage/files.py", "from fsspec.core import url_to_fs"),
        ("protocol/gateway/machine.py", "from collections import deque\nfrom protocol.ids import AttemptId"),
        ("actors/ref.py", "import asyncio\nimport anyio.abc\nfrom protocol.gateway.machine import GatewayMachine"),
        ("spark_bridge/subtask/operator.py", "import socket\nfrom spark_bridge.subtask import channel"),
        ("spark_bridge/subtask/operator.py", "from .context import SubtaskContext"),
        ("spark_bridge/sinks/files/task.py", "from fsspec.core import url_to_fs"),
        ("spark_bridge/sinks/two_phase/driver.py", "from actors.coordination import CoordinatorContext"),
        ("spark_bridge/driver/sidecar.py", "from py4j.java_gateway import JavaObject\nimport pyspark.sql"),
    ],
)
def test_the_checker_lets_lawful_imports_pass(path: str, source: str) -> None:
    assert violations(path, source) == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        # An executor has only Spark's packages and the shipped ones; the parent package is imported there too.
        ("spark_bridge.subtask", ["ssl", "actors", "anyio", "structlog", "pyspark", "py4j", "pandas", "pyarrow"]),
        ("spark_bridge.common.control", ["actors", "anyio", "structlog", "pyspark", "py4j", "spark_bridge.subtask"]),
        ("spark_bridge.sinks.files.task", ["actors", "anyio", "structlog", "pyspark", "py4j", "pandas", "pyarrow"]),
        # The settings of a sink can be made, and travel, without the package that its halves need.
        ("spark_bridge.sinks.postgres.sink", ["actors", "anyio", "pyspark", "psycopg"]),
        ("spark_bridge.sinks.delta.sink", ["actors", "anyio", "pyspark", "pyarrow", "deltalake"]),
        ("spark_bridge.sinks.iceberg.sink", ["actors", "anyio", "pyspark", "pyarrow", "pyiceberg"]),
        ("spark_bridge.sinks.redis.sink", ["actors", "anyio", "pyspark", "redis"]),
        # A task has no driver's half.
        ("spark_bridge.sinks.redis.task", ["actors", "anyio", "structlog", "pyspark", "pyarrow"]),
        ("spark_bridge.sources.kafka.task", ["actors", "anyio", "structlog", "pyspark"]),
        ("spark_bridge.sources.postgres.task", ["actors", "anyio", "structlog", "pyspark"]),
        ("spark_bridge.streams.task", ["actors", "anyio", "structlog", "pyspark", "pyarrow"]),
        ("spark_bridge.sinks.postgres.task", ["actors", "anyio", "structlog", "pyspark", "pyarrow"]),
        ("spark_bridge.sinks.parquet.task", ["actors", "anyio", "structlog", "pyspark", "deltalake", "pyiceberg"]),
        ("actors.coordination", ["spark_bridge", "pyspark", "py4j"]),
        ("actors.testing", ["spark_bridge", "pyspark", "py4j"]),
        ("spark_bridge.storage", ["pyspark", "py4j"]),
        ("spark_bridge.command", ["pyspark", "py4j"]),
        ("headgate", ["actors", "protocol", "pyspark", "anyio", "structlog", "msgpack"]),
        ("headgate.__main__", ["pyspark", "py4j"]),
        ("headgate._pytest", ["actors", "protocol", "pyspark", "py4j", "anyio", "structlog", "msgpack"]),
        ("headgate.testing", ["pyspark", "py4j", "pytest", "hypothesis"]),
        ("protocol", ["actors", "spark_bridge", "pyspark", "anyio", "structlog", "asyncio"]),
    ],
)
def test_a_layer_can_be_imported_where_the_others_are_not_installed(module: str, absent: list[str]) -> None:
    program = "import importlib, sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in absent)
    program += f"importlib.import_module({module!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("absent", "need_it"),
    [
        # `pyspark-client` has neither, and so no SparkContext and no RDD: Spark Connect needs none of them.
        (["py4j", "pyspark.core"], []),
        # Nothing of Spark. Spark itself loads the one that needs it: the classes of a format are subclasses of Spark's.
        (["py4j", "pyspark"], ["spark_bridge.task_source"]),
    ],
    ids=["with the client of Spark Connect", "without Spark"],
)
def test_every_module_can_be_imported(absent: list[str], need_it: list[str]) -> None:
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
    ]
    program = (
        f"import importlib, sys\nsys.modules.update(dict.fromkeys({absent!r}))\nfailed = []\n"
        f"for name in {modules!r}:\n"
        "    try:\n        importlib.import_module(name)\n"
        "    except ImportError:\n        failed.append(name)\n"
        "print(failed)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert (done.stderr, done.stdout) == ("", f"{need_it}\n")

# SPDX-License-Identifier: Apache-2.0

"""Systems of actors and the test kit in ordinary fixtures, whose two halves run in different tasks (H163)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headgate import OperatorCoordinator
from headgate.actors import Actor, ActorContext, ActorSystem, Reply
from headgate.actors.testing import DeterministicKit, deterministic_system
from headgate.testing import World, running_operator

ROOT = Path(__file__).parents[2]


class Echo(Actor[Reply[str]]):
    """Answers each message."""

    async def receive(self, context: ActorContext[Reply[str]], message: Reply[str]) -> None:
        message.answer("heard")


class Answers(OperatorCoordinator):
    """Returns what a task asks with."""

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return request


async def use_system(system: ActorSystem) -> None:
    echo = system.spawn(Echo)
    assert await echo.ask(lambda reply: reply, timeout_s=60.0) == "heard"
    await system.stop(echo)


async def use_kit(kit: DeterministicKit) -> None:
    assert await kit.drive(kit.system.spawn(Echo).ask(lambda reply: reply, timeout_s=1.0)) == "heard"


async def use_world(world: World) -> None:
    task = (await world.launch_all())[0]
    answer = task.request("x")
    await world.settle()
    assert answer.value == "x"


# --- for each test ------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem("of a fixture") as system:
        yield system


@pytest_asyncio.fixture
async def kit() -> AsyncIterator[DeterministicKit]:
    async with deterministic_system() as kit:
        yield kit


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running_operator(Answers()) as world:
        yield world


@pytest.mark.parametrize("time", [1, 2])
async def test_fixture_for_each_test(system: ActorSystem, kit: DeterministicKit, world: World, time: int) -> None:
    await use_system(system)
    await use_kit(kit)
    await use_world(world)


# --- for a module -------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system_of_module() -> AsyncIterator[ActorSystem]:
    async with ActorSystem("of a module") as system:
        yield system


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world_of_module() -> AsyncIterator[World]:
    async with running_operator(Answers()) as world:
        yield world


@pytest.mark.parametrize("time", [1, 2])
@pytest.mark.asyncio(loop_scope="module")
async def test_fixture_for_a_module(system_of_module: ActorSystem, world_of_module: World, time: int) -> None:
    await use_system(system_of_module)
    if time == 1:
        await use_world(world_of_module)


# --- with anyio's plugin, in a process without the other one --------------------------------------------------------

WITH_ANYIO = """
import pytest
from headgate.actors import ActorSystem
from headgate.testing import running_operator
from tests.headgate.test_fixtures import Answers, use_system, use_world

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
async def system():
    async with ActorSystem("of a module") as system:
        yield system


@pytest.fixture
async def world():
    async with running_operator(Answers()) as world:
        yield world


async def test_one(system, world):
    await use_system(system)
    await use_world(world)


async def test_two(world, system):
    await use_world(world)
    await use_system(system)
"""


def test_fixtures_of_anyios_own_plugin(tmp_path: Path) -> None:
    (tmp_path / "test_with_anyio.py").write_text(WITH_ANYIO)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", "-p", "no:cacheprovider", "-W", "error"]
    command += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]  # of what this file itself uses
    ran = subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 passed" in ran.stdout


# --- in a notebook --------------------------------------------------------------------------------------------------


async def run_cell(text: str, names: dict[str, Any]) -> None:
    """Run one cell as a kernel does: in a separate task."""
    from IPython.core.interactiveshell import InteractiveShell

    shell: Any = InteractiveShell.instance()
    shell.user_ns.update(names)
    result = await shell.run_cell_async(text, store_history=False, transformed_cell=shell.transform_cell(text))
    result.raise_error()


async def test_two_cells_of_a_notebook() -> None:
    import asyncio

    names = {"ActorSystem": ActorSystem, "running_operator": running_operator, "Answers": Answers, "__name__": "cells"}
    names |= {"use_system": use_system, "use_world": use_world}
    loop = asyncio.get_running_loop()
    for cell in (
        "system = ActorSystem()\nawait system.__aenter__()\nrunning = running_operator(Answers())",
        "world = await running.__aenter__()\nawait use_system(system)",
        "await use_world(world)",
        "await running.__aexit__(None, None, None)\nawait system.__aexit__(None, None, None)",
    ):
        await loop.create_task(run_cell(cell, names))
    assert asyncio.all_tasks() == {asyncio.current_task()}

# SPDX-License-Identifier: Apache-2.0

"""Worker threads are never shared by those who wait and those they wait for (H161)."""

from __future__ import annotations

import threading

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from actors import Actor, ActorContext
from actors.coordination.sources.enumerators import DiscoveringSplitEnumerator
from actors.threads import ACTIONS, DRIVER, USER, ThreadPool
from tests.actors.actors_under_test import running_system

MANY = 200
PATIENCE_S = 120.0


class Runs(Actor[object]):
    """Runs each message, a function, in a thread."""

    async def receive(self, context: ActorContext[object], message: object) -> None:
        assert callable(message)
        context.run_in_thread(message)


async def test_functions_in_threads_can_wait_for_one_another_however_many_there_are() -> None:  # H161
    come = threading.Barrier(MANY)
    passed = threading.Semaphore(0)

    def meet() -> None:
        come.wait(PATIENCE_S)  # until all of them run
        passed.release()

    async with running_system() as system:
        actors = [system.spawn(Runs) for _ in range(MANY)]
        for actor in actors:
            actor.tell(meet)
        for _ in range(MANY):
            assert await DRIVER.run(passed.acquire, True, PATIENCE_S)


@pytest.mark.parametrize("pool", [ACTIONS, USER], ids=["actions", "user"])
async def test_calls_that_wait_leave_threads_to_everything_that_they_may_wait_for(pool: ThreadPool) -> None:  # H161
    found = threading.Event()

    class Context:
        """An enumerator's, as far as ``start`` needs it."""

    def look() -> list[str]:
        found.set()
        return ["a"]

    async def discover() -> None:
        enumerator = DiscoveringSplitEnumerator(look)
        await enumerator.start(Context())  # type: ignore[arg-type]

    def wait() -> bool:
        return found.wait(PATIENCE_S)

    async with anyio.create_task_group() as tasks:
        for _ in range(MANY):
            tasks.start_soon(pool.run, wait)
        await anyio.wait_all_tasks_blocked()
        assert await DRIVER.run(lambda: not found.is_set())
        tasks.start_soon(discover)


async def test_everything_runs_while_the_users_own_code_holds_all_threads_of_anyio() -> None:  # H161
    begun = 0
    release = threading.Event()
    limiter = anyio.to_thread.current_default_thread_limiter()
    async with anyio.create_task_group() as tasks:
        for _ in range(int(limiter.total_tokens)):
            tasks.start_soon(anyio.to_thread.run_sync, release.wait, PATIENCE_S)
        await anyio.wait_all_tasks_blocked()
        assert limiter.available_tokens == 0
        for pool in (ACTIONS, USER, DRIVER, ThreadPool("storage", 1)):
            begun += await pool.run(lambda: 1)
        release.set()
    assert begun == 4


async def test_pool_with_a_bound_runs_no_more_at_a_time() -> None:
    pool = ThreadPool("of two", 2)
    running, most = 0, 0
    lock = threading.Lock()
    meet = threading.Barrier(2)

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        meet.wait(PATIENCE_S)
        with lock:
            running -= 1

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(pool.run, work)
    assert most == 2


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


async def test_what_is_left_to_do_is_done_on_the_loop_when_the_interpreter_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """H120: from Python 3.12 on, no thread can be started then."""

    def fail() -> None:
        raise RuntimeError("the user's own, at interpreter shutdown")

    with pytest.raises(RuntimeError, match="the user's own"):
        await USER.run(fail)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    async with anyio.create_task_group() as tasks:
        idle = threading.Event()  # keeps the idle thread of before busy
        tasks.start_soon(USER.run, idle.wait)
        await anyio.lowlevel.checkpoint()
        try:
            assert await USER.run(threading.get_ident) == threading.get_ident()
        finally:
            idle.set()

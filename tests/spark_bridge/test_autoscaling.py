# SPDX-License-Identifier: Apache-2.0

"""H199: an operator is scaled by its backlog, and nothing that goes wrong with that ends anything. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from actors.coordination import OperatorCoordinator, SourceCoordinator, StaticSplitEnumerator
from actors.virtual_loop import VirtualClock, VirtualLoop, virtual_loop
from protocol.attempts import RunEnded, RunStarted
from protocol.autoscaling import Autoscale
from spark_bridge.common.errors import SidecarError
from spark_bridge.driver.config import SidecarConfig, Watching
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.observability.status import AutoscaleStatus, SidecarStatus
from spark_bridge.primitives.chain import chain
from spark_bridge.storage import MemoryStorage, StorageError
from spark_bridge.subtask import SubtaskOperator
from tests.spark_bridge.simulated_driver import SimulatedDriver
from tests.spark_bridge.test_cancelled_calls import others

POLICY = Autoscale(1, 8, backlog_per_subtask=100, up_after_s=5.0, down_after_s=10.0, pause_s=20.0)


class Known(SourceCoordinator):
    """A source whose backlog the test sets."""

    left: int | str = 100
    refuses: int = 0

    def __init__(self) -> None:
        super().__init__(lambda state: StaticSplitEnumerator([], state))

    async def start(self, context: Any) -> None:
        if context.parallelism == self.refuses:
            raise ValueError(f"{context.parallelism} is too many")
        await super().start(context)

    def _whole_backlog(self, *, in_splits: bool) -> int | str:
        if self.left == "broken":
            raise ValueError("no figures")
        return self.left


class Bench:
    """A sidecar whose operator runs, as far as it knows."""

    def __init__(self, runtime: SidecarRuntime, virtual: VirtualLoop, clock: VirtualClock) -> None:
        self.runtime = runtime
        self._virtual = virtual
        self._clock = clock
        self._runs = 0  # 0: it has none

    def task(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        with self._virtual.enter():
            return asyncio.get_running_loop().create_task(call)

    async def do(self, call: Coroutine[Any, Any, Any]) -> Any:
        running = self.task(call)
        await self._clock.advance(0.0)
        return await running

    async def coordinate(self, kind: type[Known] = Known, **options: Any) -> None:
        options = {"parallelism": 1, "mode": "streaming", "autoscale": POLICY, **options}
        await self.do(self.runtime.coordinate("a", kind, **options))

    def run(self, *, plain: bool = False) -> None:
        """From now on it runs in one action, which is called again a second after it was stopped."""
        self._runs = 1
        if not plain:
            self.runtime._running_jobs.begin_action("x", None)

        async def stop(action_id: str, cause: str) -> None:
            self.runtime._running_jobs.note(RunEnded("a", self._runs, False, cause))
            self._runs += 1

        self.runtime._actions.stop = stop  # type: ignore[method-assign]

    async def after(self, seconds: int) -> int:
        jobs = self.runtime._running_jobs
        for _ in range(seconds):
            if self._runs and not jobs.operator_ids:
                jobs.registered(self._runs, "x")
                jobs.note(RunStarted("a", self._runs))
            await self._clock.advance(1.0)
        return self.runtime.handles["a"].parallelism

    async def status(self) -> AutoscaleStatus:
        status: SidecarStatus = await self.do(self.runtime.status())
        assert SidecarStatus.from_dict(status.to_dict()) == status
        found = status.operators["a"].autoscale
        assert found is not None
        return found


@asynccontextmanager
async def bench(monkeypatch: pytest.MonkeyPatch, slots: int | None = None) -> AsyncIterator[Bench]:
    class Driver(SimulatedDriver):
        async def cores_max(self) -> int | None:
            return slots

    monkeypatch.setattr(Known, "left", 100)
    monkeypatch.setattr(Known, "refuses", 0)
    before = others()
    clock = VirtualClock()
    with virtual_loop(clock) as virtual:
        runtime = SidecarRuntime(Driver(), SidecarConfig(watching=Watching(stalled_report_s=3600.0)))
        it = Bench(runtime, virtual, clock)
        await it.do(runtime.__aenter__())
        try:
            yield it
        finally:
            runtime._running_jobs.note(RunEnded("a", it._runs, True, ""))
            virtual.close()
            await it.do(runtime.__aexit__(None, None, None))
    assert others() == before


async def test_it_grows_and_shrinks_with_the_backlog_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(monkeypatch) as it:
        await it.coordinate()
        assert await it.after(60) == 1
        assert (await it.status()).why == "the operator has no run"
        it.run()
        Known.left = 450
        assert await it.after(5) == 1
        with capture_logs() as logs:
            assert await it.after(5) == 5
        [said] = [one for one in logs if one["event"] == "operator scaled"]
        assert (said["before"], said["parallelism"], said["log_level"]) == (1, 5, "info")
        assert said["why"] == "450 left to read, at 100 for each subtask"
        status = await it.status()
        assert status.last_change is not None
        assert (status.wanted, status.last_change[1:]) == (5, (1, 5, said["why"]))
        Known.left = 0
        assert await it.after(15) == 5
        assert (await it.status()).why.endswith("but the last change was less than 20 s ago")
        assert await it.after(10) == 1


@pytest.mark.parametrize("left", ["subtask 3 does not say", "broken"])
async def test_without_a_figure_it_stays_and_says_what_is_missing(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(monkeypatch) as it:
        await it.coordinate()
        it.run()
        Known.left = left
        with capture_logs() as logs:
            assert await it.after(50) == 1
            assert logs == []
            assert await it.after(100) == 1
        assert [one["event"] for one in logs] == ["operator not scaled, its backlog is not known"]
        status = await it.status()
        assert status.wanted is None
        assert ("no figures" if left == "broken" else left) in status.why


async def test_what_is_refused_is_tried_again_later_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise StorageError("no space left")

    async with bench(monkeypatch) as it:
        await it.coordinate()
        it.run()
        Known.left, Known.refuses = 450, 5
        with capture_logs() as logs:
            assert await it.after(40) == 1
        refused = [one for one in logs if one["event"] == "operator not scaled"]
        assert len(refused) == 3
        assert refused[0]["log_level"] == "warning"
        assert "5 is too many" in refused[0]["error"]
        status = await it.status()
        assert status.last_refusal is not None
        assert "5 is too many" in status.last_refusal.why
        assert status.why.endswith("but the last change was refused, and is tried again later")
        Known.refuses = 0
        with monkeypatch.context() as patch:
            patch.setattr(MemoryStorage, "store", fail)
            assert await it.after(40) == 1
        status = await it.status()
        assert status.last_refusal is not None
        assert "no space left" in status.last_refusal.why
        assert await it.after(100) == 5


async def test_a_change_by_hand_is_not_disturbed_and_is_followed_by_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(monkeypatch) as it:
        await it.coordinate()
        it.run()
        Known.left = 450
        assert await it.after(5) == 1
        await it.do(it.runtime.rescale("a", 2))
        assert await it.after(19) == 2
        assert await it.after(5) == 5


async def test_a_change_by_hand_may_take_longer_than_the_scaling_looks_away(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Known):
        waits_at = 2
        gate = asyncio.Event()

        async def start(self, context: Any) -> None:
            if context.parallelism == self.waits_at:
                await self.gate.wait()
            await super().start(context)

    async with bench(monkeypatch) as it:
        await it.coordinate(Slow)
        it.run()
        by_hand = it.task(it.runtime.rescale("a", 2))
        assert await it.after(5) == 1
        Slow.gate.set()
        Known.left = 450
        assert await it.after(15) == 2
        await by_hand
        assert await it.after(15) == 5


async def test_it_does_not_grow_beyond_the_tasks_that_spark_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(monkeypatch, slots=3) as it:
        await it.coordinate()
        it.run()
        Known.left = 450
        assert await it.after(10) == 3


@pytest.mark.parametrize("replace", [True, False])
async def test_an_operator_that_is_released_is_not_scaled_any_more(
    replace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(monkeypatch) as it:
        await it.coordinate()
        if replace:
            await it.coordinate(autoscale=None, replace=True)
        else:
            await it.do(it.runtime.release("a"))
            await it.coordinate(autoscale=None)
        it.run()
        Known.left = 450
        assert await it.after(60) == 1
        status = await it.do(it.runtime.status())
        assert status.operators["a"].autoscale is None


@pytest.mark.parametrize(
    ("given", "options", "problem"),
    [
        (OperatorCoordinator, {}, "'a' cannot have autoscale, because it has no source"),
        (lambda: OperatorCoordinator(), {}, "'a' cannot have autoscale, because it has no source"),  # noqa: PLW0108
        (chain(one=(OperatorCoordinator, SubtaskOperator)), {}, "'a' cannot have autoscale, because it has no source"),
        (Known, {"mode": "batch"}, "'a' cannot have autoscale, because in batch mode"),
        (Known, {"parallelism": 9}, "parallelism must be from 1 to 8, the limits of autoscale, not 9"),
    ],
)
async def test_what_can_never_be_scaled_is_refused(
    given: Any, options: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(monkeypatch) as it:
        with pytest.raises(ValueError, match=problem):
            await it.coordinate(given, **options)
        assert it.runtime.handles == {}


async def test_the_call_of_a_program_that_is_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(monkeypatch) as it:
        monkeypatch.setattr(SimulatedDriver, "is_here", False)
        with pytest.raises(SidecarError, match="'a' cannot have autoscale in this process"):
            await it.coordinate()

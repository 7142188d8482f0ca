# SPDX-License-Identifier: Apache-2.0

"""The faults of a run: what fails and when is drawn from a seed, and the pipeline's own two ends carry it out.

A fault is due when a certain part of all numbers has passed. Every other one then waits for the next checkpoint's
cut. It strikes a random moment later, from a separate thread, in the middle of whatever the process does then.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from examples.exactly_once.faulty_storage import TROUBLES, FaultyFileSystem
from examples.exactly_once.pipeline import NumberCoordinator, NumberSubtask
from headgate import FailureKind, FailureReason

FAULT = "fault"
TASK, UNRESPONSIVE, COORDINATOR, DRIVER, STORAGE = "task", "unresponsive", "coordinator", "driver", "storage"
KINDS = (TASK, UNRESPONSIVE, COORDINATOR, DRIVER)
ALL_KINDS = (*KINDS, STORAGE)
WHAT = {
    TASK: "a task is killed (SIGKILL)",
    UNRESPONSIVE: "an attempt stops responding (SIGSTOP)",
    COORDINATOR: "the coordinator fails the job",
    DRIVER: "the driver is killed (SIGKILL)",
    STORAGE: "the storage does not answer, and the job fails",
}
EARLIEST, LATEST, ALMOST_DONE = 0.05, 0.8, 0.85  # part of all numbers
DELAY_MAX_S = 0.3
CHECKPOINT_DELAY_MAX_S = 0.05  # about as long as a checkpoint takes from its cut to its completion
DAWDLE_S = 0.01
TROUBLE_MAX_S = 2.0
FAILS_AFTER_S, DIES_AFTER_S = 0.05, 0.5  # after the storage stops answering
SIGNALS = {TASK: signal.SIGKILL, UNRESPONSIVE: signal.SIGSTOP}
NOT_ITS_OWN_FAULT = (FailureKind.GLOBAL_FAILURE, FailureKind.RUN_ENDED, FailureKind.SUPERSEDED, FailureKind.REVOKED)


class Fault(NamedTuple):
    """One planned fault. ``at`` is a part of all numbers, 0 to 1; ``delay_s`` is how much later it strikes.

    ``in_checkpoint``: it waits for a cut first. ``by_exception``: the coordinator fails by an exception, not by
    ``fail_job``. ``trouble`` is the storage's, and lasts for ``lasts_s``; ``dies``: the driver is killed meanwhile.
    """

    kind: str
    at: float
    delay_s: float
    subtask: int
    in_checkpoint: bool
    by_exception: bool
    trouble: str = ""
    lasts_s: float = 0.0
    dies: bool = False


def plan_faults(seed: int, kinds: Iterable[str], parallelism: int) -> list[Fault]:
    """The faults of one run, in the order in which they are due. The same seed gives the same plan."""
    dice = random.Random(seed)
    faults = []
    for kind in kinds:
        in_checkpoint = dice.random() < 0.5
        fault = Fault(
            kind,
            at=dice.uniform(EARLIEST, LATEST),
            delay_s=dice.uniform(0.0, CHECKPOINT_DELAY_MAX_S if in_checkpoint else DELAY_MAX_S),
            subtask=dice.randrange(parallelism),
            in_checkpoint=in_checkpoint,
            by_exception=dice.random() < 0.5,
        )
        if kind == STORAGE:
            trouble, lasts_s = dice.choice(TROUBLES), dice.uniform(0.0, TROUBLE_MAX_S)
            fault = fault._replace(trouble=trouble, lasts_s=lasts_s, dies=dice.random() < 0.5)
        faults.append(fault)
    return sorted(faults, key=lambda fault: fault.at)


class CoordinatorFault(Exception):
    """Raised on purpose, as any exception of a coordinator might be."""


# --- in the tasks -------------------------------------------------------------------------------------------------


class FaultySubtask(NumberSubtask):
    """Dies or stops responding when told to, and takes snapshots slowly, as with a large state."""

    def __init__(self, numbers: int, sink_url: str) -> None:
        super().__init__(numbers, sink_url)
        self._timer: threading.Timer | None = None

    def handle_event(self, event: Any) -> None:
        match event:
            case ["fault", kind, delay_s]:
                self._timer = strike_later(delay_s, SIGNALS[kind])
            case _:
                super().handle_event(event)

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        """Leave time for a fault between the first acknowledgement and the last."""
        time.sleep(DAWDLE_S * ((checkpoint_id + self.context.subtask) % 4))
        return super().snapshot_state(checkpoint_id)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()  # Spark may use this process for the next task
        super().close()


def strike_later(delay_s: float, number: signal.Signals) -> threading.Timer:
    """Send this process a signal after ``delay_s`` seconds, whatever it is doing then."""
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()
    return timer


# --- in the driver ------------------------------------------------------------------------------------------------


class FaultyCoordinator(NumberCoordinator):
    """Causes the faults that are due, one after the other, and checks whether they happened."""

    def __init__(
        self,
        numbers: int,
        sink_url: str,
        faults: Iterable[Fault],
        *,
        on_wrong: Callable[[str], None],
        on_fault: Callable[..., None],
    ) -> None:
        """``on_fault`` gets the kind of a fault that happened; the driver's own death is visible only from outside.

        With ``kills=True``, the fault is about to kill the driver. It may be called in another thread.
        """
        super().__init__(numbers, sink_url, on_wrong)
        self._faults = list(faults)
        self._on_fault = on_fault
        self._struck: dict[tuple[int, int], Fault] = {}  # subtask and attempt -> the fault it was told to cause

    async def send_more(self) -> None:
        await super().send_more()
        self._cause_if_due(in_checkpoint=False)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        state = await super().checkpoint_coordinator(checkpoint_id)
        self._cause_if_due(in_checkpoint=True)
        return state

    def _cause_if_due(self, *, in_checkpoint: bool) -> None:
        if self._faults and self._faults[0].in_checkpoint == in_checkpoint and self.progress >= self._faults[0].at:
            self._cause(self._faults[0])

    def _cause(self, fault: Fault) -> None:
        match fault.kind:
            case "driver":
                self._faults.pop(0)
                strike_later(fault.delay_s, signal.SIGKILL)
            case "coordinator":
                self._faults.pop(0)
                self.context.call_later(fault.delay_s, self._fail_by_exception if fault.by_exception else self._give_up)
            case "storage":
                self._faults.pop(0)
                on_struck = partial(self._storage_struck, asyncio.get_running_loop(), fault)
                FaultyFileSystem.trouble.begin(fault.trouble, fault.lasts_s, on_struck)
            case _:
                subtask = self._victim(fault)
                for gateway in self.context.gateways.gateways(subtask):  # none: it is being started again, so try later
                    self._faults.pop(0)
                    self._struck[subtask, gateway.attempt.attempt] = fault
                    gateway.send_event_nowait([FAULT, fault.kind, fault.delay_s])

    def _storage_struck(self, loop: asyncio.AbstractEventLoop, fault: Fault) -> None:
        """A checkpoint exists but will be reported as failed: the job fails, and perhaps the driver dies."""
        self._on_fault(STORAGE, kills=fault.dies)
        loop.call_soon_threadsafe(self.context.call_later, FAILS_AFTER_S, self._fail_for_storage)
        if fault.dies:
            strike_later(DIES_AFTER_S + fault.delay_s, signal.SIGKILL)

    async def _fail_for_storage(self) -> None:
        self.context.fail_job(CoordinatorFault("it gives up beside a storage that does not answer, on purpose"))

    async def _fail_by_exception(self) -> None:
        self._on_fault(COORDINATOR)
        raise CoordinatorFault("a bug, on purpose")

    async def _give_up(self) -> None:
        self._on_fault(COORDINATOR)
        self.context.fail_job(CoordinatorFault("it gives up, on purpose"))

    def _victim(self, fault: Fault) -> int:
        """The chosen subtask, unless it might end before the fault strikes: then the slowest one."""
        if self.progress_of(fault.subtask) <= ALMOST_DONE:
            return fault.subtask
        return min(range(self.context.parallelism), key=self.progress_of)

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        await super().subtask_failed(subtask, attempt, reason)
        fault = self._struck.pop((subtask, attempt), None)
        if fault is None:
            return
        if reason.kind in NOT_ITS_OWN_FAULT:  # another failure came first; the next attempt must do it
            self._faults.insert(0, fault)
        else:
            self._on_fault(fault.kind)

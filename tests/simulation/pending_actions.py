# SPDX-License-Identifier: Apache-2.0

"""The actions that the simulated Spark has yet to do: kill tasks, submit stages again, read outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from random import Random

from tests.simulation.jobs import Faults

PAUSE_S = 0.1
"""How long a waiting party rests at a time."""
KILL_S_MAX = 0.5
"""The maximum duration of a kill on the clock of a world.

There the ledger asks after 1 s, in production after 5 s; a real kill takes up to 2.6 s (spark-facts 16 and 17).
"""


@dataclass
class PendingAction:
    """``put_off``: how often it will be postponed. ``victim``: the task that it kills, at ``due`` at the latest."""

    do: Callable[[], None]
    put_off: int
    victim: int | None = None
    due: float = inf


@dataclass
class PendingActions:
    random: Random
    faults: Faults
    open: list[PendingAction] = field(default_factory=list)
    resting_s: float = 0.0
    now: float = 0.0  # on the world's clock

    def add(self, do: Callable[[], None], *, victim: int | None = None) -> bool:
        """Add an action; return whether it will take long."""
        put_off = self.random.choice([0, 2, 8] if victim is None else [0, 0, 4, 12, 25])
        self.open.append(PendingAction(do, put_off, victim, inf if victim is None else self.now + KILL_S_MAX))
        return put_off == 25

    def catch_up(self, now: float) -> None:
        """Carry out the due kills, however often they were to be postponed."""
        self.now = now
        for action in [action for action in self.open if action.due <= now]:
            if action in self.open:  # the action before it may have made it unnecessary
                self.open.remove(action)
                action.do()

    def kills(self, task_attempt_id: int) -> bool:
        return any(action.victim == task_attempt_id for action in self.open)

    def forget_kill(self, task_attempt_id: int) -> None:
        self.open = [action for action in self.open if action.victim != task_attempt_id]

    def do_one(self) -> None:
        """Carry out a random action, or postpone it; never indefinitely, and not if everything is to heal."""
        place = self.random.randrange(len(self.open))
        action = self.open[place]
        if action.put_off > 0 and self.faults.budget > 0:
            action.put_off -= 1
            self.resting_s += KILL_S_MAX / 25
            return
        del self.open[place]
        action.do()

    def rest(self) -> float:
        """Return how many seconds are to pass because something was postponed."""
        resting_s, self.resting_s = self.resting_s, 0.0
        return resting_s

# SPDX-License-Identifier: Apache-2.0

"""Checks that must hold in a state where nothing more can happen (H48)."""

from __future__ import annotations

from actors.coordination.engine.inputs import NamedInput
from tests.exploration.subtask_end import Life
from tests.exploration.vocabulary import demand
from tests.exploration.world import (
    COORDINATOR,
    COORDINATOR_BOX,
    GATEWAY,
    GATEWAY_BOX,
    LEDGER,
    LEDGER_BOX,
    LINK,
    TASK,
    TRACKER,
    TRACKER_BOX,
    State,
    World,
    base_of,
)


def check_end(world: World, state: State) -> None:
    """Check that everything was answered, exchanged and settled, and each subtask has a live or successful attempt."""
    scope, coordinator = world.scope, world.coordinators.facts[state[COORDINATOR]]
    boxes = state[TRACKER_BOX], state[COORDINATOR_BOX], state[LEDGER_BOX]
    demand(not any(boxes), "H48", "a mailbox of the driver is never emptied")
    demand(world.trackers.facts[state[TRACKER]].idle, "H45", "a checkpoint is never answered")
    demand(not coordinator.pending, "H48", f"the coordinator waits for the end of {sorted(coordinator.pending)}")
    demand(not coordinator.aborted, "H64", f"nobody is told that {sorted(coordinator.aborted)} are discarded")
    demand(not coordinator.suspected, "H87", f"{sorted(coordinator.suspected)} live, and stay suspected")
    for slot in range(world.slots):
        base = base_of(slot)
        name = f"attempt {slot // scope.starts}#{slot % scope.starts}"
        gateway, task = world.gateways.facts[state[base + GATEWAY]], world.tasks.facts[state[base + TASK]]
        link = world.links.values[state[base + LINK]]
        demand(gateway.idle, "H26", f"the gateway of {name} holds something forever")
        demand(not state[base + GATEWAY_BOX], "H48", f"the gateway of {name} has mail forever")
        over = gateway.over or not gateway.exists
        if not over:
            demand(task.life is Life.RUNNING, "H19", f"{name} has a gateway, and is {task.life.value}")
        elif task.life in (Life.WAITING, Life.RUNNING, Life.LEAVING):
            demand(False, "H48", f"{name} is {task.life.value}, and nobody listens")
        if task.life is Life.RUNNING:
            demand(link.bound == 1 and link.open, "H24", f"{name} has no connection")
            demand(task.done, "H48", f"{name} has not exchanged everything, or holds something forever")
            demand(task.sent_seq == gateway.taken_seq, "H30", f"not all that {name} has said was taken")
    ledger, committed = world.ledgers.facts[state[LEDGER]], world.trackers.facts[state[TRACKER]].committed
    if ledger.succeeded:
        text = f"input {ledger.input} is done, and {committed} is committed"
        done = committed is not None and committed.done and committed.input == NamedInput(f"input {ledger.input}")
        demand(done, "H174", text)
    if not (ledger.active or ledger.succeeded):
        return  # the last run was interrupted
    for subtask in range(scope.subtasks):
        places = [slot for slot in world.slots_of_run(state) if slot // scope.starts == subtask]
        lives = [world.tasks.facts[state[base_of(slot) + TASK]].life for slot in places]
        told = coordinator.told[subtask][0]
        demand(Life.RUNNING in lives or Life.SUCCEEDED in lives, "H48", f"subtask {subtask} is lost: {lives}")
        expected = "finished" if Life.SUCCEEDED in lives else "ready"
        demand(told == expected, "H10", f"subtask {subtask} is {expected}, and the coordinator was told last: {told}")
        inputs = ledger.input + 1
        whole = coordinator.counts[subtask] == (scope.events_up * inputs, scope.events_down * inputs)
        demand(whole, "exactly once", f"subtask {subtask} has exchanged {coordinator.counts[subtask]}")

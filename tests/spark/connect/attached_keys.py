# SPDX-License-Identifier: Apache-2.0

"""Which keys the processes around a client of Spark Connect have that is attached to a sidecar."""

from __future__ import annotations

from typing import Any

from headgate import AttachedSidecar
from tests.spark.attached_keys import keys_of_an_attached_job, workers
from tests.spark.connect.jobs import CountInArrow
from tests.spark.connect.server import ConnectServer
from tests.spark.faults.own_process import OPERATOR, SidecarProgram
from tests.spark.memory import children, command_of


def keys_around(
    sidecar: AttachedSidecar, program: SidecarProgram, session: Any, server: ConnectServer
) -> list[set[str]]:
    """Check client and sidecar, in the middle of a job; return what the server and both tasks have."""
    tasks = session.range(0, 2, 1, 2).mapInArrow(
        sidecar.operator(OPERATOR).subtask(CountInArrow), "subtask long, last long"
    )
    below = server.process.pid
    [jvm] = [pid for pid in (below, *children(below)) if command_of(pid).partition(" ")[0].endswith("java")]

    machine, *found = keys_of_an_attached_job(sidecar, program, tasks.collect, lambda: [jvm, *workers(jvm)])
    return [machine, *filter(None, found)]  # others run no task at present

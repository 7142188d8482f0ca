# SPDX-License-Identifier: Apache-2.0

"""Which keys the processes around a sidecar in a separate process have."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headgate import AttachedSidecar
from protocol.wire.keys import NO_IDENTITY, Holder, KeyRing, identity_of
from spark_bridge.standalone.secret_file import read_secret
from tests.spark.faults.own_process import OPERATOR, SidecarProgram, callbacks
from tests.spark.faults.waiting import wait_until
from tests.spark.memory import SECRET, Name, check, children, command_of, keys_in, parent_of


def keys_of_an_attached_job(
    sidecar: AttachedSidecar, process: SidecarProgram, action: Callable[[], Any], others: Callable[[], list[int]]
) -> list[set[str]]:
    """Check driver or client, and the sidecar, in the middle of a job of two tasks; return what ``others`` have.

    Both have the key of the driver's requests for a moment in each, so they are searched until it is seen.
    """
    names: dict[str, Name] = {
        "TASKS": ("TASKS", identity_of(OPERATOR)),
        "RELAY": ("RELAY", sidecar._driver),
        "CONTROL": ("CONTROL", sidecar._driver),
        "STREAMS": ("STREAMS", identity_of(OPERATOR)),
        "ATTEMPTS": ("ATTEMPTS", sidecar._driver),
        "CERTIFICATE": ("CERTIFICATE", NO_IDENTITY),
    }
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            sidecar.request(OPERATOR, "seen")

    both: tuple[set[str], set[str]] = (set(), set())
    keys = KeyRing(read_secret(process.secret_file))
    with ThreadPoolExecutor(2) as pool:
        job, asking = pool.submit(sidecar.run, action), pool.submit(ask)
        try:
            wait_until(lambda: len(callbacks(sidecar, "ready")) == 2, "both tasks are ready")
            found = keys_in(others(), keys, names)
            while not both[0] & both[1] >= {"CONTROL"} and not asking.done():
                looks = keys_in([os.getpid(), process.pid], keys, names)
                both = (both[0] | looks[0], both[1] | looks[1])
        finally:
            over.set()
            sidecar.request(OPERATOR, "stop")
            job.result()
    asking.result()
    driver, beside = both
    check(driver, Holder.ATTACHED, {SECRET, "TASKS", "CONTROL"})
    check(beside, Holder.SIDECAR, {SECRET, "CONTROL"})
    return found


def workers(jvm: int) -> list[int]:
    """The processes of running tasks."""
    return [pid for pid in children(jvm) if "daemon pyspark.worker" in command_of(pid) and parent_of(pid) != jvm]

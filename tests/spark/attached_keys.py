# SPDX-License-Identifier: Apache-2.0

"""Which keys the processes around a sidecar in a separate process have."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from headgate import AttachedSidecar
from protocol.wire.handshake import NONCE_BYTES, ClientHandshake
from protocol.wire.keys import KEY_BYTES, NO_IDENTITY, Holder, Key, KeyRing, identity_of
from spark_bridge.common.tls import client_context
from spark_bridge.standalone.secret_file import read_secret
from tests.spark.faults.own_process import OPERATOR, SidecarProgram, callbacks
from tests.spark.faults.waiting import wait_until
from tests.spark.memory import SECRET, Name, check, children, command_of, keys_in, parent_of


def keys_of_an_attached_job(
    sidecar: AttachedSidecar, process: SidecarProgram, action: Callable[[], Any], others: Callable[[], list[int]]
) -> list[set[str]]:
    """Check driver or client, and the sidecar, in the middle of a job of two tasks; return what ``others`` have.

    Each of the two has the key of the driver's requests for a moment only. So the driver waits for the answer to a
    request while they are searched, and the sidecar is held in the middle of a handshake.
    """
    names: dict[str, Name] = {
        "TASKS": ("TASKS", identity_of(OPERATOR)),
        "RELAY": ("RELAY", sidecar._driver),
        "CONTROL": ("CONTROL", sidecar._driver),
        "STREAMS": ("STREAMS", identity_of(OPERATOR)),
        "ATTEMPTS": ("ATTEMPTS", sidecar._driver),
        "CERTIFICATE": ("CERTIFICATE", NO_IDENTITY),
    }
    keys = KeyRing(read_secret(process.secret_file))
    with ThreadPoolExecutor(2) as pool:
        job = pool.submit(sidecar.run, action)
        asking = pool.submit(sidecar.request, OPERATOR, "wait", timeout_s=600.0)
        try:
            wait_until(lambda: len(callbacks(sidecar, "ready")) == 2, "both tasks are ready")
            wait_until(lambda: sidecar.request(OPERATOR, "waiting") == 1, "the driver waits for an answer")
            *found, driver = keys_in([*others(), os.getpid()], keys, names)
            with _held_in_a_handshake(sidecar, process):  # not for long: the driver's lease runs on
                [beside] = keys_in([process.pid], keys, names)
        finally:
            sidecar.request(OPERATOR, "stop")
            job.result()
    asking.result()
    check(driver, Holder.ATTACHED, {SECRET, "TASKS", "CONTROL"})
    check(beside, Holder.SIDECAR, {SECRET, "CONTROL"})
    return found


@contextmanager
def _held_in_a_handshake(sidecar: AttachedSidecar, process: SidecarProgram) -> Iterator[None]:
    """Let the sidecar wait for the proof of a peer that calls itself its driver, and stop the process there.

    That peer does not know the key, so it is not what puts the key in the memory of this process.
    """
    address = sidecar._address
    hello = ClientHandshake(Key(sidecar._driver, bytes(KEY_BYTES)), secrets.token_bytes(NONCE_BYTES)).initial_bytes()
    with socket.create_connection((address.host, address.port), 60.0) as plain:
        connection = client_context().wrap_socket(plain) if address.certificate_sha256 else plain
        with connection:
            connection.sendall(hello)
            assert connection.recv(1), "the sidecar has dropped the peer"  # else it has answered, and has the key
            os.kill(process.pid, signal.SIGSTOP)  # so that it does not drop the peer however long the search takes
            try:
                yield
            finally:
                os.kill(process.pid, signal.SIGCONT)


def workers(jvm: int) -> list[int]:
    """The processes of running tasks."""
    return [pid for pid in children(jvm) if "daemon pyspark.worker" in command_of(pid) and parent_of(pid) != jvm]

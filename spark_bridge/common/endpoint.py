# SPDX-License-Identifier: Apache-2.0

"""What a task needs to find its coordinator and to identify itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol.arguments import AT_LEAST_1, NAME, PORT, WAIT, check_fields
from protocol.wire.framing import DEFAULT_LIMITS, WireLimits
from protocol.wire.keys import Key
from protocol.wire.messages import RestoreMode

__all__ = ["StateStorage", "TaskEndpoint", "TaskIdentity"]


@dataclass(frozen=True, slots=True)
class StateStorage:
    """Where tasks store states in files, and the application as the storage knows it.

    ``url``: of the storage. ``options``: the arguments of its filesystem. They may be secrets, and ``repr`` does not
    show them. ``epoch`` and ``token``: those of the application's claim, which are in the names of its files.
    """

    url: str
    options: Mapping[str, Any] | None = field(repr=False)
    epoch: int
    token: str


@dataclass(frozen=True, slots=True)
class TaskEndpoint:
    """The sidecar's address, and the settings of one operator. All times are in seconds.

    It travels inside Spark's closure. ``repr`` and logs never show the secret of ``key``, which is the key of this
    operator's tasks and of nothing else. ``certificate_sha256`` is the digest of the sidecar's certificate; empty if
    the connection is not encrypted.
    """

    host: str
    port: int
    key: Key = field(repr=False)
    operator_id: str
    parallelism: int
    mode: RestoreMode = RestoreMode.BATCH
    certificate_sha256: bytes = field(default=b"", repr=False)
    connect_timeout_s: float = 10.0  # until a first connection is up; at most 2 s if the port is refused
    register_timeout_s: float = 60.0  # until the driver accepts the task; it may wait for older attempts to end
    ready_timeout_s: float = 120.0  # until the coordinator's ``subtask_ready`` has returned
    send_timeout_s: float = 60.0  # how long a task may wait for capacity to send
    finish_timeout_s: float = 60.0  # until the coordinator has taken everything that the task sent
    failure_timeout_s: float = 2.0  # the same, for the report of a failed task
    kill_wait_s: float = 1.0  # how long a task whose attempt is over waits for Spark's kill before it raises
    mailbox_events_max: int = 100_000  # at either bound the task stops reading its socket
    mailbox_bytes_max: int = 256 * 1024 * 1024
    event_bytes_max: int = DEFAULT_LIMITS.event_bytes_max  # ``SidecarLimits.event_bytes_max``
    local_files: bool = True  # tasks may keep values in clear in the executor's own directory
    spin_s: float = 0.0002  # how long a wait polls first, if the previous one was shorter; 0: never
    switch_interval_s: float = 0.0005  # CPython's switch interval while a task is attached; 0 leaves it alone
    state_storage: StateStorage | None = None  # None if the storage ends with the driver

    def __post_init__(self) -> None:
        check_fields(
            self,
            port=PORT,
            operator_id=NAME,
            parallelism=AT_LEAST_1,
            failure_timeout_s=WAIT,
            kill_wait_s=WAIT,
            mailbox_events_max=AT_LEAST_1,
            mailbox_bytes_max=AT_LEAST_1,
            spin_s=WAIT,
            switch_interval_s=WAIT,
        )

    @property
    def wire_limits(self) -> WireLimits:
        """The limits of the wire, which both ends have."""
        return WireLimits.for_events(self.event_bytes_max)


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """The identity of a Spark task. ``run_id`` is the stage id, ``subtask`` the partition.

    ``action`` is the id of the ``run`` call that started the job; empty if there is none.
    """

    task_attempt_id: int
    subtask: int
    run_id: int
    attempt_number: int
    action: str = ""

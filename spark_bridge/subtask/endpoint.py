"""What a task must know to find its coordinator, and who it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.wire.messages import RestoreMode

__all__ = ["TaskEndpoint", "TaskIdentity"]


@dataclass(frozen=True, slots=True)
class TaskEndpoint:
    """Where the sidecar listens, and what this operator agreed with it. All times are in seconds.

    It travels inside Spark's closure. ``secret`` is never shown by ``repr`` and never logged (H61).
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    operator_id: str
    parallelism: int
    mode: RestoreMode = RestoreMode.BATCH
    connect_timeout_s: float = 10.0  # until a first connection stands; 2 s at most where the port is refused
    register_timeout_s: float = 60.0  # until the driver has taken the task: it may wait for older attempts to end
    ready_timeout_s: float = 120.0  # until the coordinator's ``subtask_ready`` has returned
    send_timeout_s: float = 60.0  # how long a full window may hold up the task
    finish_timeout_s: float = 60.0  # until the coordinator has taken everything that the task sent
    failure_timeout_s: float = 2.0  # the same, for the goodbye of a task that fails anyway
    kill_wait_s: float = 1.0  # how long an attempt that was given up waits for Spark's kill before it raises
    mailbox_events_max: int = 100_000  # at either bound the task stops reading its socket
    mailbox_bytes_max: int = 256 * 1024 * 1024
    spin_s: float = 0.0002  # how long a wait looks again and again, where the last one was that short; 0: never
    switch_interval_s: float = 0.0005  # CPython's switch interval while a task is attached; 0 leaves it alone


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """Which of Spark's tasks this is. ``run_id`` is the stage id, ``subtask`` the partition.

    ``action`` is the id of the ``run`` call whose job this is; empty where the job belongs to none.
    """

    task_attempt_id: int
    subtask: int
    run_id: int
    attempt_number: int
    action: str = ""

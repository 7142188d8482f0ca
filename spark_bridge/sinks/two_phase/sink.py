# SPDX-License-Identifier: Apache-2.0

"""What a sink implements: its writer, which runs in tasks, and its committer, which runs on the driver."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from protocol.arguments import AT_LEAST_1, ID, checked
from protocol.describing import show
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT
from spark_bridge.sinks.two_phase.parts import Committable, PartName, token_of

Record_contra = TypeVar("Record_contra", contravariant=True)


def check_rows(payload: object) -> None:
    """Raise ``ValueError`` unless a payload is a number of rows."""
    if not _is_count(payload):
        raise ValueError(f"the payload of a part is its number of rows, not {show(payload, 80)}")


def check_rows_and_bytes(payload: object) -> None:
    """Raise ``ValueError`` unless a payload is a list of a number of rows and a number of bytes."""
    if not (type(payload) is list and len(payload) == 2 and all(map(_is_count, payload))):
        raise ValueError(f"the payload of a part is [rows, bytes], not {show(payload, 80)}")


def _is_count(number: object) -> bool:
    return type(number) is int and number >= 0


class SinkWriterContext:
    """Who writes, and the names of what is prepared. One for each execution attempt; not thread-safe.

    ``sink`` is the sink's name. ``subtask`` and ``attempt`` are those of the task. ``checkpoint_id`` is the checkpoint
    that the attempt restored, -1 for none.
    """

    @checked(checkpoint_id=ID, parallelism=AT_LEAST_1)
    def __init__(
        self, sink: str, subtask: int, attempt: int, checkpoint_id: int = VIRTUAL_EMPTY_CHECKPOINT, parallelism: int = 1
    ) -> None:
        self.sink = sink
        self.subtask = subtask
        self.attempt = attempt
        self.parallelism = parallelism
        self.proof = secrets.token_hex(16)
        """Shows that the parts of this writer are its own. Attempt numbers begin at 0 again in every application."""
        self._token = token_of(self.proof)
        self._after = checkpoint_id
        self._parts_begun = 0

    @checked()
    def next_name(self, prefix: str = "part", suffix: str = "") -> str:
        """Return the name of a new part. Give the part this name in the target system, before it gets its first row.

        A name has about 80 letters, digits and hyphens, between ``prefix`` and ``suffix``. In the order of their names,
        the parts of a subtask are in the order in which they were begun.
        """
        name = PartName(self.subtask, self._after, self.attempt, self._token, self._parts_begun, prefix, suffix)
        self._parts_begun += 1
        return str(name)

    @checked(checkpoint_id=ID)
    def prepared_for(self, checkpoint_id: int) -> None:
        """What begins from now on comes after ``checkpoint_id``. The operator calls this after ``prepare``."""
        self._after = max(self._after, checkpoint_id)


class TwoPhaseWriter(Generic[Record_contra]):
    """The half of a sink that runs in a task. One for each execution attempt, on the task's own thread.

    The operator calls ``write`` for each record, ``prepare`` inside each snapshot and at the end, and ``close`` last,
    however the attempt has ended. An exception in ``write`` or ``prepare`` fails the task.
    """

    def write(self, record: Record_contra) -> None:
        """Write one record, where no reader sees it. It may be kept in memory until ``prepare``."""
        raise NotImplementedError(f"{type(self).__name__} must define write(self, record)")

    def prepare(self) -> Iterable[Committable]:
        """Make everything written since the last call durable, and return what is needed to commit it.

        When this returns, the rows survive the death of this process and of the target's server, and stay invisible
        until the committer is given the committables. Return nothing if nothing was written.
        """
        raise NotImplementedError(f"{type(self).__name__} must define prepare(self)")

    def close(self) -> None:
        """Release resources, and give up what was not prepared. Must not touch what was prepared."""


@dataclass
class SinkCommitterContext:
    """For whom a committer works. ``sink`` is the sink's name, ``operator_id`` the operator's, ``log`` its logger."""

    sink: str
    operator_id: str
    log: Any


class TwoPhaseCommitter:
    """The half of a sink that runs on the driver. Its methods may block: they run in a worker thread, one at a time.

    Any process may die at any moment, and any call may have had its effect although it failed. So each method must do
    no harm when it is repeated, by this committer or by that of the next driver.
    """

    transient_errors: tuple[type[BaseException], ...] = (OSError,)
    """Errors of ``commit`` after which the same call is worth another try. All others fail the job immediately."""

    def open(self) -> None:
        """Prepare the target: connect, create what is missing. An exception makes ``coordinate`` fail."""

    def commit(self, committables: Sequence[Committable]) -> None:
        """Make these parts visible, in this order.

        Some or all of them may be committed already: skip those. The parts of one writer always come in the order of
        their numbers. So it is enough if the target remembers, for each ``committable.writer``, the highest
        ``committable.number`` that is committed, in the same transaction as the rows.

        Raises:
            SinkDataLost: a part is gone that was never committed.
            Exception: one of ``transient_errors``, for another try with the same parts; or any other, which fails the
                job. The restore that follows commits the same parts again.
        """
        raise NotImplementedError(f"{type(self).__name__} must define commit(self, committables)")

    def check_payload(self, payload: Any) -> None:
        """Raise ``ValueError`` for a payload that no part of this sink has: then the task that lists it fails alone.

        Otherwise a checkpoint may keep it, and each commit would fail. Called on the event loop: do not block.
        """

    def abort(self, names: Sequence[str]) -> None:
        """Destroy these parts, which no checkpoint will ever commit. Some may be gone. An exception is only logged."""
        raise NotImplementedError(f"{type(self).__name__} must define abort(self, names)")

    def prepared(self) -> Iterable[str]:
        """Return the names of all parts of this sink in the target that are neither committed nor destroyed.

        Those that are still being written may be among them. Whatever a dead process of any application has left must
        be: this is how orphans are found.
        """
        raise NotImplementedError(f"{type(self).__name__} must define prepared(self)")

    def committed(self, checkpoint_id: int) -> None:
        """``checkpoint_id`` is complete, and all parts that it covers and that were listed so far are committed.

        For what follows a commit, such as a refreshed view or a message to readers. It may be called again after a
        restore. An exception fails the job.
        """

    def close(self) -> None:
        """Release resources, even if ``open`` has failed. What is prepared stays: a checkpoint may cover it."""


class TwoPhaseSink(Generic[Record_contra]):
    """A target that rows are written to exactly once: it makes the two halves that do so.

    Give the same sink to ``TwoPhaseSinkCoordinator`` and, in ``handle.subtask``, to ``TwoPhaseSinkOperator``; or give
    it to ``chain(..., sink=sink)``. It travels to the tasks with pickle, so it holds settings only.
    """

    name: str | None = None
    """Distinguishes the sinks of one target. None means the operator's id. One application at a time may use it."""

    takes_rows: bool = True
    """Whether a record may be a dict of a row's values, as the failures of an async stage are."""

    atomic: bool = False
    """Whether one ``commit`` makes all its parts visible at the same moment.

    Then the coordinator waits until it knows what all subtasks have prepared for a checkpoint, and commits it with one
    call: readers see all of a checkpoint or nothing.
    """

    @property
    def target(self) -> str:
        """Where the rows go: the same text in the tasks and on the driver. It is shown in errors: put no secret in it.

        A checkpoint can only be restored with the target that it was taken with.
        """
        raise NotImplementedError(f"{type(self).__name__} must define the property target")

    def writer(self, context: SinkWriterContext) -> TwoPhaseWriter[Record_contra]:
        """Make the writer of one execution attempt. Called in the task."""
        raise NotImplementedError(f"{type(self).__name__} must define writer(self, context)")

    def committer(self, context: SinkCommitterContext) -> TwoPhaseCommitter:
        """Make the committer. Called on the driver, in a worker thread; ``open`` follows."""
        raise NotImplementedError(f"{type(self).__name__} must define committer(self, context)")

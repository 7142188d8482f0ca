# SPDX-License-Identifier: Apache-2.0

"""The stages of a chain in a task, each of which gets what the one before it yields (H80).

Each stage pulls from the one before it, so at any moment one stage runs: the stages after it wait for a record, and
those before it wait after an output, or have ended. A snapshot is a cut through all of them. It has to find each
stage where its state says all: a stage that waits for a record has processed the earlier ones, but a stage that waits
after an output may be in the middle of a record, unless it sets ``snapshot_anywhere``. So a snapshot can be taken

    where                                             if these set ``snapshot_anywhere``
    stage k takes a record of Spark (k = 0)           -
    stage k takes a record of stage k - 1             stages 0 to k - 1
    stage k calls ``wait_for_event`` and the like     stages 0 to k - 1
    stage k waits in ``send_event`` or ``request``    stages 0 to k
    the last stage n has yielded an output            stages 0 to n

Elsewhere, a barrier waits in the mailbox until the next of these moments; in the third and the fourth row, where the
stage itself may wait for what comes after the barrier, the checkpoint is declined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from protocol.describing import a_type
from protocol.errors import LocalProtocolError
from spark_bridge.subtask.errors import CheckpointDeclinedByOperator
from spark_bridge.subtask.operator import SubtaskOperator, iterated

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

__all__ = ["Flow"]


class Flow(SubtaskOperator):
    """The main operator of a chain: passes records through its stages. Its chain calls ``connect`` before ``open``."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.waits_for_subtask_ready = False  # the stages say it
        self._stages: list[SubtaskOperator] = []
        self._ended: set[int] = set()
        self._running = 0
        self._context: SubtaskContext

    def connect(self, parts: Mapping[str, SubtaskOperator]) -> None:
        """Use the stages among the parts of the task.

        Raises:
            TypeError: one of them is no ``SubtaskOperator``.
        """
        for name in self.names:
            stage: object = parts[name]
            if not isinstance(stage, SubtaskOperator):
                raise TypeError(
                    f"the factory of stage {name!r} returned {a_type(stage)}; a stage needs a "
                    "SubtaskOperator, or a function whose first required argument takes the records"
                )
            self._stages.append(stage)

    @property
    def snapshot_anywhere(self) -> bool:  # type: ignore[override]  # depends on the stage that runs
        """Whether a snapshot can be taken now, if the stage that runs is waiting or has yielded."""
        return self._consistent(self._running + 1)

    @property
    def counts_records(self) -> bool:
        """Whether a stage does that has the records before a restored checkpoint again."""
        for stage in self._stages:
            if stage.counts_records or stage.goes_on_after_restore:
                return stage.counts_records
        return False

    def _consistent(self, count: int) -> bool:
        """Whether each of the first ``count`` stages can be cut after an output."""
        return all(stage.snapshot_anywhere or k in self._ended for k, stage in enumerate(self._stages[:count]))

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        if state:
            raise LocalProtocolError(
                "the checkpoint has a state of this subtask that belongs to no stage, so it is not that of a chain: "
                'restore it with the operator that took it, or start without the checkpoint (restore="none")'
            )
        self._context = context

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return b"".join(states.values())

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        flowing = records
        for index in range(len(self._stages)):
            flowing = self._outputs(index, flowing)
        return flowing

    def _outputs(self, index: int, records: Iterator[Any]) -> Iterator[Any]:
        outputs: Iterator[Any] | None = None
        after = min(index + 1, len(self._stages) - 1)
        try:
            self._running = index
            produced: Iterable[Any] | None = self._stages[index].process(records)
            outputs = iterated(self._stages[index], produced)
            while True:
                try:
                    output = next(outputs)
                except StopIteration:
                    break
                self._running = after
                yield output
                self._running = index
                if index < after:  # the runner does the same after the last stage
                    self._context.between_outputs()
            self._ended.add(index)
        except Exception as error:
            _note(error, self.names[index])
            raise
        finally:
            self._running = after
            for generator in (outputs, records if index else None):
                close = getattr(generator, "close", None)
                if close is not None:
                    close()

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        if not self._consistent(self._running):
            raise CheckpointDeclinedByOperator(
                f"stage {self.names[self._running]!r} waits while a stage before it may be in the middle of a record: "
                "set snapshot_anywhere on that stage if its state is complete after each output"
            )
        return b""

    def final_state(self) -> bytes:
        return b""


def _note(error: Exception, name: str) -> None:
    """Say in a failure which stage it comes from: the first one to pass it on."""
    if not any(note.startswith("in the stage ") for note in getattr(error, "__notes__", ())):
        error.add_note(f"in the stage {name!r} of the chain")

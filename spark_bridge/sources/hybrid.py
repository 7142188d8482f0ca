# SPDX-License-Identifier: Apache-2.0

"""Reads several sources, one after the other: the task's half of a ``HybridSplitEnumerator``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from protocol.describing import type_name
from protocol.errors import LocalProtocolError
from protocol.wire.state import decode_entry, decode_state, encode_state, is_state_of
from spark_bridge.subtask.context import inner_context
from spark_bridge.subtask.operator import close_quietly
from spark_bridge.subtask.source import SplitReader, is_reader_state

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

_STATE = "a reader of a hybrid source"
_OLD_STATE = b"\xc1headgate-hybrid-1"
"""How states began when all of them were one encoded event, which followed this."""


class HybridReader(SplitReader):
    """Reads a split ``[index, split]`` with the reader of that index. Each reader must define ``read_from``.

    Splits of the last source may be open at the same time, as its reader says; all others are read one at a time. What
    a reader yields counts against its own rate limit. A reader keeps its own state, and is notified of checkpoints.
    """

    def __init__(self, make_readers: Sequence[Callable[[], SplitReader]]) -> None:
        self._readers: list[SplitReader] = [make() for make in make_readers]
        for reader in self._readers:
            if type(reader).read_from is SplitReader.read_from:
                raise TypeError(f"{type_name(reader)} has no positions: define read_from to use it in a hybrid source")
        self._latest = self._readers[-1]  # which has yielded the latest output
        self.idle_wait_s = self._readers[-1].idle_wait_s

    @property
    def splits_open_max(self) -> int:  # type: ignore[override]  # depends on the source that is being read
        last = len(self._readers) - 1
        in_last = bool(self._open) and all(reading.split[0] == last for reading in self._open)
        return self._readers[last].splits_open_max if in_last else 1

    @property
    def rate_limit_per_s(self) -> float | None:  # type: ignore[override]  # that of the reader
        return self._latest.rate_limit_per_s

    def weight(self, output: Any) -> float:
        return self._latest.weight(output)

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        own, inner = self._unpacked(state)
        super().open(context, own)
        for index, (reader, its_own) in enumerate(zip(self._readers, inner, strict=True)):
            reader.open(inner_context(context, index), its_own)

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any] | None]:
        reader = self._reader(split)
        for item in reader.read_from(split[1], position):
            self._latest = reader
            yield item

    def backlog(self, split: Any, position: Any) -> int | None:
        return self._reader(split).backlog(split[1], position)

    def _reader(self, split: list[Any]) -> SplitReader:
        index: int = split[0]
        return self._readers[index]

    def handle_source_event(self, event: Any) -> None:
        index, inner = event
        self._readers[index].handle_source_event(inner)

    def close(self) -> None:
        for reader in self._readers:
            close_quietly(reader)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        inner = [reader.snapshot_state(checkpoint_id) for reader in self._readers]
        return _packed(super().snapshot_state(checkpoint_id), inner)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        for reader in self._readers:
            reader.notify_checkpoint_complete(checkpoint_id)

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        for reader in self._readers:
            reader.notify_checkpoint_aborted(checkpoint_id)

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        unpacked = {subtask: self._unpacked(state) for subtask, state in states.items()}
        own = super().merge_states({subtask: state or b"" for subtask, (state, _) in unpacked.items()})
        inner = [
            reader.merge_states({subtask: its_own[index] or b"" for subtask, (_, its_own) in unpacked.items()})
            for index, reader in enumerate(self._readers)
        ]
        return _packed(own, inner)

    def _unpacked(self, state: bytes | None) -> tuple[bytes | None, Sequence[bytes | None]]:
        """The state of this reader and those of its readers; theirs are None if the state is only of splits."""
        if not state or is_reader_state(state):
            return state, [None] * len(self._readers)
        if state.startswith(_OLD_STATE):
            own, inner = decode_entry(state[len(_OLD_STATE) :])
        elif is_state_of(_STATE, state):
            own, *inner = decode_state(_STATE, state).values()
        else:
            raise LocalProtocolError(
                "the checkpoint has a state of this subtask that was not made by a hybrid source: restore it with the "
                "source that took it"
            )
        if len(inner) > len(self._readers):
            raise LocalProtocolError(
                f"the checkpoint has the state of a hybrid source of {len(inner)} sources, but there are "
                f"{len(self._readers)}: add sources only at the end"
            )
        return own, [*inner, *[None] * (len(self._readers) - len(inner))]


def _packed(own: bytes, inner: Sequence[bytes]) -> bytes:
    return encode_state(_STATE, {"own": own, **{str(index): state for index, state in enumerate(inner)}})

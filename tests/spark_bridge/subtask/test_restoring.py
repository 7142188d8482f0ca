# SPDX-License-Identifier: Apache-2.0

"""The state that a task restores: none, one, or several of another parallelism (H52)."""

from __future__ import annotations

import pytest

from protocol.wire.messages import EventMessage, Opened, SubtaskState
from protocol.wire.state_handles import StateHandle
from spark_bridge.storage.errors import StorageError
from spark_bridge.subtask import SubtaskContext
from tests.spark_bridge.subtask.operators import Recorder
from tests.spark_bridge.subtask.peer import Peer, PeerConnection, RunningTask


class Merging(Recorder):
    def merge_states(self, states: dict[int, bytes]) -> bytes:
        self.calls.append(("merge", states))
        return b"+".join(states.values())


def restore(peer: Peer, operator: Recorder, *states: SubtaskState) -> tuple[RunningTask, PeerConnection]:
    task = peer.start(operator)
    connection = peer.register(checkpoint_id=8, states=states)
    return task, connection


@pytest.mark.parametrize(
    ("states", "calls"),
    [
        ((), [("open", None)]),
        ((SubtaskState(6, b"of another"),), [("open", b"of another")]),
        (
            (SubtaskState(2, b"own"), SubtaskState(6, b"other")),
            [("merge", {2: b"own", 6: b"other"}), ("open", b"own+other")],
        ),
    ],
)
def test_an_operator_restores_nothing_one_state_or_what_it_makes_of_several(
    peer: Peer, states: tuple[SubtaskState, ...], calls: list[object]
) -> None:  # H52
    operator = Merging()
    task, connection = restore(peer, operator, *states)
    connection.expect(Opened)
    peer.finish(task)
    assert operator.calls[: len(calls)] == calls


def test_several_states_for_an_operator_that_cannot_merge_them_are_an_error_that_names_the_fix(peer: Peer) -> None:
    # H52
    task, connection = restore(peer, Recorder(), SubtaskState(2, b"a"), SubtaskState(6, b"b"))
    failure = connection.finish().failure  # never Opened (H11)
    error = task.error()
    assert isinstance(error, TypeError)
    for words in ("subtasks 2, 6", "Recorder.merge_states", "the parallelism that it was taken with"):
        assert words in str(error)
        assert words in failure


def test_a_merged_state_that_is_not_bytes_is_an_error_that_says_so(peer: Peer) -> None:  # H46, H52
    class Forgetful(Recorder):
        def merge_states(self, states: dict[int, bytes]) -> bytes:
            return None  # type: ignore[return-value]

    task, connection = restore(peer, Forgetful(), SubtaskState(2, b"a"), SubtaskState(6, b"b"))
    assert "merge_states must return bytes, not NoneType" in connection.finish().failure
    assert isinstance(task.error(), TypeError)


def test_an_operator_may_send_while_it_opens(peer: Peer) -> None:
    # H11, H32: counting continues from the restored history
    class Greeting(Recorder):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            super().open(context, state)
            context.send_event("hello")

    task = peer.start(Greeting)
    connection = peer.register(events_sent=(3,))
    connection.expect(EventMessage)
    connection.expect(Opened)
    assert connection.finish().events_sent == (4,)
    task.outputs()


def test_a_state_with_files_is_refused_where_no_storage_has_them(peer: Peer) -> None:  # H190
    files = StateHandle("7-1-ab/2-100-cd-manifest", 4711, bytes(32), 2**30, 12)
    task, connection = restore(peer, Recorder(), SubtaskState(2, b"a", files))
    assert "needs a storage that all executors can write" in connection.finish().failure  # never Opened (H11)
    assert isinstance(task.error(), StorageError)

# SPDX-License-Identifier: Apache-2.0

"""State in files, one machine at a time: the cut, the upload after it, savepoints and restores (H190 to H193)."""

from __future__ import annotations

from typing import Any

import pytest

from protocol import barrier_tracker as b
from protocol.attempts import RunEnded, SubtaskFailed, SubtaskFinished, SubtaskReady, SubtaskReset
from protocol.barrier_tracker.pending import Phase, Step
from protocol.barrier_tracker.tracker import BarrierTracker
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.gateway import types as g
from protocol.gateway.machine import GatewayMachine
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine
from protocol.wire import messages as m
from protocol.wire.state_handles import StateHandle
from tests.protocol import test_gateway_checkpoints as down
from tests.protocol import test_unheld_checkpoints as unheld
from tests.protocol.barrier_tracker_kit import A2, FAILED, A, B, Dialogue, accepted, kinds, stored
from tests.protocol.refusals import unchanged
from tests.protocol.test_gateway import hear as hear_up
from tests.protocol.test_gateway import sent as sent_down
from tests.protocol.test_state_handles import HANDLE
from tests.protocol.test_subtask import hear, sent
from tests.protocol.test_subtask_checkpoints import a_closed_subtask, events, mailbox, send

FOLDER = "s3://bucket/savepoint-one.state"


def handle(name: str) -> StateHandle:
    return HANDLE._replace(manifest=name)


# --- the subtask ----------------------------------------------------------------------------------------------------


def an_uploading_subtask(*checkpoint_ids: int) -> SubtaskMachine:
    subtask = a_closed_subtask(*checkpoint_ids)
    for seq, checkpoint_id in enumerate(checkpoint_ids, start=len(checkpoint_ids) + 1):
        hear(subtask, m.BarrierMessage(7, seq, checkpoint_id, 0))
        subtask.handle(s.SnapshotTaken(checkpoint_id, b"inline", state_follows=True), 1.0)
    subtask.check_invariants()
    return subtask


def test_the_valve_opens_at_the_cut_and_the_upload_begins_after_it() -> None:  # H192
    subtask = a_closed_subtask(5)
    send(subtask, b"held")
    hear(subtask, m.BarrierMessage(7, 2, 5, 0))
    effects = subtask.handle(s.SnapshotTaken(5, b"inline", state_follows=True), 1.0)
    held = (m.HeldEvent(2, b"held"),)
    assert sent(effects) == [
        m.CheckpointAcknowledged(7, 3, 5, b"inline", held, (), 2, state_follows=True),
        m.EventMessage(7, 4, b"held"),
    ]
    assert effects[-1] == s.StartUpload(5)
    assert send(subtask, b"during the upload") == [b"during the upload"]


def test_what_becomes_of_the_files_follows_the_snapshot_once() -> None:  # H190
    subtask = an_uploading_subtask(5)
    send(subtask, b"a")
    assert sent(subtask.handle(s.StateUploaded(5, HANDLE), 2.0)) == [m.StateStored(7, 5, 5, HANDLE)]
    for input in (s.StateUploaded(5, HANDLE), s.UploadFailed(5, "late")):
        with (
            unchanged(subtask),
            pytest.raises(LocalProtocolError, match="the end of an upload for checkpoint 5, at snap"),
        ):
            subtask.handle(input, 2.0)
    assert hear(subtask, m.CheckpointCompleted(7, 3, 5))[0] == s.PutInMailbox(s.MailboxCompleted(5))


def test_an_upload_that_fails_leaves_the_valve_open() -> None:  # H192: a decline would close it
    subtask = an_uploading_subtask(5)
    assert sent(subtask.handle(s.UploadFailed(5, "disk full"), 2.0)) == [m.StateFailed(7, 4, 5, "disk full")]
    subtask.check_invariants()
    assert send(subtask, b"a") == [b"a"]
    assert subtask.may_finish


def test_an_upload_cannot_end_before_its_snapshot() -> None:
    subtask = a_closed_subtask(5)
    with unchanged(subtask), pytest.raises(LocalProtocolError, match="at closed"):
        subtask.handle(s.StateUploaded(5, HANDLE), 2.0)


@pytest.mark.parametrize("end", [m.CheckpointAborted, m.SavepointTaken, m.CheckpointCompleted])
def test_the_end_of_the_checkpoint_stops_its_upload_whose_report_then_has_no_effect(end: Any) -> None:  # H44
    subtask = an_uploading_subtask(5, 6)
    effects = hear(subtask, end(7, 5, 5))
    assert [effect for effect in effects if isinstance(effect, s.StopUpload)] == [s.StopUpload(5)]
    with unchanged(subtask):
        assert subtask.handle(s.StateUploaded(5, HANDLE), 2.0) == []
        assert subtask.handle(s.UploadFailed(5, "stopped"), 2.0) == []
    assert sent(subtask.handle(s.StateUploaded(6, HANDLE), 2.0)) == [m.StateStored(7, 6, 6, HANDLE, 5)]


def test_a_checkpoint_that_ends_without_an_upload_stops_none() -> None:
    subtask = an_uploading_subtask(5)
    subtask.handle(s.StateUploaded(5, HANDLE), 2.0)
    assert not any(isinstance(effect, s.StopUpload) for effect in hear(subtask, m.CheckpointAborted(7, 3, 5)))


def test_a_snapshot_that_is_too_large_or_too_late_begins_no_upload() -> None:  # H62, H44
    subtask = a_closed_subtask(5, 6)
    for seq, checkpoint_id in ((3, 5), (4, 6)):
        hear(subtask, m.BarrierMessage(7, seq, checkpoint_id, 0))
    too_large = s.SnapshotTaken(5, bytes(s.SubtaskLimits(1, 1, 1).snapshot_bytes_max + 1), state_follows=True)
    effects = subtask.handle(too_large, 1.0)
    assert [type(message) for message in sent(effects)] == [m.CheckpointDeclined]
    hear(subtask, m.CheckpointAborted(7, 5, 6))
    assert subtask.handle(s.SnapshotTaken(6, b"", state_follows=True), 1.0) == []
    assert not any(isinstance(effect, s.StartUpload) for effect in effects)


def ended_well(subtask: SubtaskMachine) -> bool:
    return subtask.may_finish


def test_a_task_that_ends_during_its_upload_completes_it_first() -> None:  # H190, H47
    subtask = an_uploading_subtask(5)
    assert not ended_well(subtask)
    with unchanged(subtask), pytest.raises(LocalProtocolError, match="checkpoint 5 are being uploaded: wait"):
        subtask.handle(s.OperatorFinished("", b"s"), 2.0)
    subtask.handle(s.StateUploaded(5, HANDLE), 2.0)
    assert ended_well(subtask)
    finished = m.Finished(7, 5, "", b"s", (), handle("last"))
    assert sent(subtask.handle(s.OperatorFinished("", b"s", handle("last")), 3.0)) == [finished]
    assert subtask.handle(s.StateUploaded(5, HANDLE), 4.0) == []


def test_a_failure_and_the_end_of_the_attempt_stop_every_upload() -> None:
    subtask = an_uploading_subtask(5, 6)
    effects = subtask.handle(s.OperatorFinished("boom", b""), 2.0)
    assert effects[:2] == [s.StopUpload(5), s.StopUpload(6)]
    ended = an_uploading_subtask(5)
    effects = hear(ended, m.AttemptEnded(7, "killed"))
    assert effects == [s.StopUpload(5), s.EndAttempt("killed")]
    assert ended.handle(s.StateUploaded(5, HANDLE), 2.0) == []


def test_what_is_reported_without_a_connection_waits_for_one() -> None:  # H24
    subtask = an_uploading_subtask(5)
    subtask.handle(s.ConnectionLost(), 2.0)
    assert subtask.handle(s.StateUploaded(5, HANDLE), 2.0) == []
    assert m.StateStored(7, 4, 5, HANDLE) in sent(subtask.handle(s.ConnectionAttached(1), 3.0))


def test_the_files_of_a_savepoint_go_into_its_folder() -> None:  # H193
    subtask = a_closed_subtask(5, 6)
    assert mailbox(hear(subtask, m.SavepointTarget(7, 3, 5, FOLDER))) == []
    for seq, checkpoint_id in ((4, 5), (5, 6)):
        hear(subtask, m.BarrierMessage(7, seq, checkpoint_id, 0))
    assert subtask.handle(s.SnapshotTaken(5, b"", state_follows=True), 1.0)[-1] == s.StartUpload(5, FOLDER)
    assert subtask.handle(s.SnapshotTaken(6, b"", state_follows=True), 1.0)[-1] == s.StartUpload(6)
    hear(subtask, m.SavepointTaken(7, 6, 5))
    subtask.check_invariants()


def test_the_folder_of_a_savepoint_cannot_come_after_its_barrier() -> None:
    subtask = a_closed_subtask(5)
    with unchanged(subtask), pytest.raises(RemoteProtocolError, match="the folder of savepoint 6"):
        hear(subtask, m.SavepointTarget(7, 2, 6, FOLDER))
    hear(subtask, m.BarrierMessage(7, 2, 5, 0))
    with unchanged(subtask), pytest.raises(RemoteProtocolError, match="the folder of savepoint 5"):
        hear(subtask, m.SavepointTarget(7, 3, 5, FOLDER))


def test_without_closing_the_folder_of_a_savepoint_is_the_first_sign_of_it() -> None:  # H79
    subtask = SubtaskMachine(7, 2, s.SubtaskLimits(10, 1000, 30), hold_events=False)
    subtask.handle(s.ConnectionAttached(0), 0.0)
    hear(subtask, m.SavepointTarget(7, 1, 5, "never to come"))
    hear(subtask, m.SavepointTarget(7, 2, 6, FOLDER))
    hear(subtask, m.BarrierMessage(7, 3, 6, 0))
    assert subtask.handle(s.SnapshotTaken(6, b"", state_follows=True), 1.0)[-1] == s.StartUpload(6, FOLDER)
    with pytest.raises(RemoteProtocolError, match="the folder of savepoint 6"):
        hear(subtask, m.SavepointTarget(7, 4, 6, FOLDER))


# --- the gateway ----------------------------------------------------------------------------------------------------


def an_acknowledged_gateway() -> GatewayMachine:
    gateway = down.a_wide_gateway()
    down.cut(gateway, 5)
    down.submit(gateway, 1)
    effects = hear_up(gateway, m.CheckpointAcknowledged(7, 1, 5, b"inline", (), (), state_follows=True))
    assert effects[0] == g.ReportAcknowledged(5, b"inline", (), (), state_follows=True)
    assert down.ids(sent_down(effects)) == [1]  # H41, H192: it is open
    return gateway


@pytest.mark.parametrize(
    ("item", "report"),
    [
        (m.StateStored(7, 2, 5, HANDLE), g.ReportStateStored(5, HANDLE)),
        (m.StateFailed(7, 2, 5, "disk full"), g.ReportStateFailed(5, "disk full")),
    ],
)
def test_what_becomes_of_the_files_is_reported_once(item: Any, report: g.GatewayEffect) -> None:  # H190
    gateway = an_acknowledged_gateway()
    assert hear_up(gateway, item) == [report]
    [refused] = hear_up(gateway, m.StateStored(7, 3, 5, HANDLE))
    assert refused == g.RefuseMessage(
        f"StateStored of {down.a_wide_gateway()._inbound._attempt} for checkpoint 5, which is acknowledged"
    )
    gateway.handle(g.CheckpointOver(5, g.CheckpointOutcome.ABORTED), 2.0)
    [refused] = hear_up(gateway, m.StateFailed(7, 4, 5, "late"))
    assert isinstance(refused, g.RefuseMessage)


def test_files_that_no_snapshot_has_announced_are_refused() -> None:  # H62
    gateway = down.a_wide_gateway()
    down.cut(gateway, 5)
    [refused] = hear_up(gateway, m.StateStored(7, 1, 5, HANDLE))
    assert isinstance(refused, g.RefuseMessage)
    hear_up(gateway, m.CheckpointAcknowledged(7, 2, 5, b"", (), ()))
    [refused] = hear_up(gateway, m.StateStored(7, 3, 5, HANDLE))
    assert isinstance(refused, g.RefuseMessage)


def test_the_folder_of_a_savepoint_leaves_at_the_cut_before_the_barrier() -> None:  # H193
    gateway = down.a_wide_gateway()
    down.submit(gateway, 1)
    gateway.handle(g.CloseRequested(5), 1.0)
    assert sent_down(gateway.handle(g.CutReached(5, FOLDER), 1.0)) == [m.SavepointTarget(7, 3, 5, FOLDER)]
    assert [type(one) for one in sent_down(hear_up(gateway, m.Confirm(7, 1)))] == [m.BarrierMessage]
    assert gateway.handle(g.CutReached(9, FOLDER), 1.0) == []  # an unknown one


def test_a_barrier_apart_comes_after_the_folder_of_its_savepoint() -> None:  # H23, H193
    gateway = down.a_wide_gateway(apart=True)
    gateway.handle(g.CloseRequested(5), 1.0)
    effects = gateway.handle(g.CutReached(5, FOLDER), 1.0)
    assert effects == [g.SendToAttempt(m.SavepointTarget(7, 2, 5, FOLDER)), g.InjectBarrier(5, 2)]


def test_without_closing_the_folder_of_a_savepoint_precedes_the_barrier() -> None:  # H79, H193
    gateway = unheld.an_open_gateway()
    effects = unheld.do(gateway, g.CutReached(5, FOLDER))
    assert [type(effect.message) for effect in effects] == [m.SavepointTarget, m.BarrierMessage]
    unheld.do(gateway, g.CheckpointOver(6, g.CheckpointOutcome.ABORTED))
    assert unheld.do(gateway, g.CutReached(6, FOLDER)) == []


def test_the_files_of_the_last_state_come_up_with_it() -> None:  # H47, H190
    gateway = down.a_wide_gateway()
    hear_up(gateway, m.Opened(7, 1))
    effects = hear_up(gateway, m.Finished(7, 2, "", b"s", (), HANDLE))
    assert effects[0] == g.ReportFinished("", b"s", (), HANDLE)


# --- the tracker ----------------------------------------------------------------------------------------------------


def acknowledged(attempt: Any, checkpoint_id: int, **changes: Any) -> b.SubtaskAcknowledged:
    return b.SubtaskAcknowledged(attempt, checkpoint_id, b"inline", state_follows=True, **changes)


def a_waiting_dialogue(checkpoint_id: int = 5, **settings: Any) -> Dialogue:
    """Two subtasks, whose snapshots have come and whose files have not."""
    dialogue = Dialogue(**settings).run(A, B).cut(checkpoint_id, A, B)
    assert dialogue.tell(acknowledged(A, checkpoint_id)) == []
    assert dialogue.tell(acknowledged(B, checkpoint_id)) == [b.AwaitUploads(checkpoint_id)]
    return dialogue


def states(checkpoint: b.CompletedCheckpoint) -> list[tuple[m.SubtaskState, ...]]:
    return [part.states for part in checkpoint.subtask_states.values()]


def test_a_checkpoint_is_written_when_every_file_is_stored() -> None:  # H190
    dialogue = a_waiting_dialogue()
    assert dialogue.tracker.phase is Phase.UPLOADING
    [view] = dialogue.tracker.view()
    assert view.steps == {0: Step.AWAITING_STATE, 1: Step.AWAITING_STATE}
    assert dialogue.tell(b.SubtaskStateStored(B, 5, handle("b"))) == []
    checkpoint = stored(dialogue.tell(b.SubtaskStateStored(A, 5, handle("a"))))
    assert states(checkpoint) == [
        (m.SubtaskState(0, b"inline", handle("a")),),
        (m.SubtaskState(1, b"inline", handle("b")),),
    ]
    assert kinds(dialogue.tell(b.CheckpointStored(5))) == [b.NotifyCheckpointComplete]
    dialogue.tell(SubtaskFailed(A, FAILED), SubtaskReset("words", 0))
    [restore] = dialogue.tell(accepted(A2))
    assert isinstance(restore, b.RestoreAttempt)
    assert (restore.states, restore.elsewhere) == ((m.SubtaskState(0, b"inline", handle("a")),), False)


def test_files_may_be_stored_before_the_last_snapshot_and_before_the_cut_is_reported() -> None:  # H41
    dialogue = Dialogue().run(A, B).close(5, A, B)
    dialogue.tell(acknowledged(A, 5), b.SubtaskStateStored(A, 5, handle("a")))
    assert dialogue.tell(b.CoordinatorSnapshotTaken(5, b"c")) == []
    assert kinds(dialogue.tell(b.SubtaskAcknowledged(B, 5, b"inline"))) == [b.StoreCheckpoint]


def test_without_holding_events_the_coordinator_is_asked_before_the_files_are_stored() -> None:  # H79
    config = b.CheckpointConfig(10.0, mode=m.RestoreMode.STREAMING, hold_events=False)
    tracker = BarrierTracker("words", 1, config)

    def tell(*inputs: b.TrackerInput) -> list[b.TrackerEffect]:
        out = [effect for input in inputs for effect in tracker.handle(input, 0.0)]
        tracker.check_invariants()
        return out

    tell(accepted(A), SubtaskReady(A), b.CheckpointTriggered(5), b.CoordinatorSnapshotTaken(5, b"c", {100: (1,)}))
    assert kinds(tell(acknowledged(A, 5, events_sent=(2,)))) == [b.CollectRecorded]
    recorded = (m.HeldEvent(0, b"recorded"),)
    assert tell(b.RecordedCollected(5, {100: recorded})) == [b.AwaitUploads(5)]
    checkpoint = stored(tell(b.SubtaskStateStored(A, 5, HANDLE)))
    assert checkpoint.subtask_states[0] == b.SubtaskSnapshot((m.SubtaskState(0, b"inline", HANDLE),), recorded, (1,))


def test_files_that_are_stored_while_the_coordinator_is_asked_are_kept() -> None:  # H79
    config = b.CheckpointConfig(10.0, mode=m.RestoreMode.STREAMING, hold_events=False)
    tracker = BarrierTracker("words", 1, config)
    for input in (
        accepted(A),
        SubtaskReady(A),
        b.CheckpointTriggered(5),
        b.CoordinatorSnapshotTaken(5, b"c"),
        acknowledged(A, 5, events_sent=(1,)),
        b.SubtaskStateStored(A, 5, HANDLE),
    ):
        tracker.handle(input, 0.0)
    tracker.check_invariants()
    collected = b.RecordedCollected(5, {100: (m.HeldEvent(0, b"recorded"),)})
    assert stored(tracker.handle(collected, 0.0)).subtask_states[0].states[0].files == HANDLE


def test_an_upload_that_fails_counts_as_a_failure_of_its_checkpoint_alone() -> None:  # H45
    dialogue = a_waiting_dialogue(tolerated_failures=1)
    effects = dialogue.tell(b.SubtaskStateFailed(A, 5, "disk full"))
    assert effects == [b.NotifyCheckpointAborted(5, f"{A} could not store the files of its state: disk full")]
    assert kinds(dialogue.tell(b.SubtaskStateStored(B, 5, HANDLE))) == [b.ReportStale]
    assert b.RaiseGlobalFailure in kinds(
        dialogue.cut(6, A, B).tell(acknowledged(A, 6), b.SubtaskStateFailed(A, 6, "disk full"))
    )


def test_uploads_that_take_too_long_are_named() -> None:  # H48
    dialogue = a_waiting_dialogue(tolerated_failures=1)
    dialogue.tell(b.SubtaskStateStored(B, 5, HANDLE))
    [aborted] = dialogue.wait(10.0)
    assert isinstance(aborted, b.NotifyCheckpointAborted)
    assert aborted.reason == f"not complete within 10 s: {A}: not stored the files of its state"
    assert not aborted.in_doubt


def test_files_that_no_snapshot_has_announced_give_the_checkpoint_up() -> None:  # H44
    dialogue = Dialogue(tolerated_failures=1).run(A, B).cut(5, A, B)
    [aborted] = dialogue.tell(b.SubtaskStateStored(A, 5, HANDLE))
    assert isinstance(aborted, b.NotifyCheckpointAborted)
    assert "stored files before its snapshot" in aborted.reason


def test_a_second_report_about_files_is_stale() -> None:  # H44
    dialogue = a_waiting_dialogue()
    dialogue.tell(b.SubtaskStateStored(A, 5, HANDLE))
    for repeated in (b.SubtaskStateStored(A, 5, handle("x")), b.SubtaskStateFailed(A, 5, "x"), acknowledged(A, 5)):
        assert kinds(dialogue.tell(repeated)) == [b.ReportStale]


@pytest.mark.parametrize("phase", [Phase.UPLOADING, Phase.STORING])
def test_an_attempt_that_fails_gives_up_what_is_uploaded_and_what_is_stored(phase: Phase) -> None:  # H16, H190
    dialogue = a_waiting_dialogue()
    if phase is Phase.STORING:
        dialogue.tell(b.SubtaskStateStored(A, 5, handle("a")), b.SubtaskStateStored(B, 5, handle("b")))
    assert dialogue.tracker.phase is phase
    [aborted, *rest] = dialogue.tell(SubtaskFailed(A, FAILED))
    assert isinstance(aborted, b.NotifyCheckpointAborted)
    assert aborted.in_doubt == (phase is Phase.STORING)
    assert kinds(rest) == [*([b.DiscardCheckpoint] if aborted.in_doubt else []), SubtaskFailed]


def test_a_final_state_does_not_replace_the_files_of_an_earlier_cut() -> None:
    """H190: it is of a later moment, so the checkpoint would be torn."""
    dialogue = a_waiting_dialogue(tolerated_failures=1)
    effects = dialogue.tell(b.SubtaskFinalState(A, b"later", (), handle("later")))
    [aborted] = effects
    assert isinstance(aborted, b.NotifyCheckpointAborted)
    assert "ended before it had stored the files of its state" in aborted.reason


def test_the_end_of_a_run_gives_up_what_is_uploaded() -> None:
    dialogue = a_waiting_dialogue()
    assert b.NotifyCheckpointAborted in kinds(dialogue.tell(RunEnded("words", 7, succeeded=False)))


def a_finished(dialogue: Dialogue, files: StateHandle) -> None:
    dialogue.tell(b.SubtaskFinalState(A, b"final", (), files), SubtaskFinished(A))


def test_a_savepoint_copies_what_was_not_stored_in_it() -> None:  # H193
    dialogue = Dialogue().run(A, B)
    a_finished(dialogue, handle("final"))
    dialogue.tell(b.CheckpointTriggered(5, True, FOLDER))
    assert dialogue.tell(b.SubtaskClosed(B, 5)) == [b.SnapshotCoordinator(5, FOLDER)]
    dialogue.tell(b.CoordinatorSnapshotTaken(5, b"c"), acknowledged(B, 5))
    [store] = dialogue.tell(b.SubtaskStateStored(B, 5, handle("inside")))
    assert isinstance(store, b.StoreCheckpoint)
    assert (store.savepoint, store.to_copy) == (True, (handle("final"),))
    copied = {handle("final"): handle("copy")}
    assert kinds(dialogue.tell(b.CheckpointStored(5, copied))) == [b.EndSavepoint]


def test_a_checkpoint_copies_nothing_that_the_application_has_stored_itself() -> None:
    dialogue = Dialogue().run(A, B)
    a_finished(dialogue, handle("final"))
    dialogue.cut(5, B).tell(acknowledged(B, 5))
    [store] = dialogue.tell(b.SubtaskStateStored(B, 5, handle("b")))
    assert isinstance(store, b.StoreCheckpoint)
    assert store.to_copy == ()


def restored_dialogue(*, elsewhere: bool) -> Dialogue:
    dialogue = Dialogue(concurrent_max=2)
    parts = {n: b.SubtaskSnapshot((m.SubtaskState(n, b"", handle(f"old-{n}")),)) for n in range(2)}
    point = b.CompletedCheckpoint(4, 2, b"c", parts)
    config = b.CheckpointConfig(10.0, mode=m.RestoreMode.STREAMING, concurrent_max=2)
    dialogue.tracker = BarrierTracker("words", 2, config, point, restored_elsewhere=elsewhere)
    return dialogue


def test_the_first_checkpoint_after_a_savepoint_takes_its_files_over_and_the_next_does_not() -> None:
    """H193: the user may delete the savepoint. B is at rest all the time."""
    dialogue = restored_dialogue(elsewhere=True)
    [restore] = dialogue.tell(accepted(A))
    assert isinstance(restore, b.RestoreAttempt)
    assert restore.elsewhere
    dialogue.tell(SubtaskReady(A))
    dialogue.cut(5, A).tell(acknowledged(A, 5))
    dialogue.cut(6, A).tell(acknowledged(A, 6))
    [store] = dialogue.tell(b.SubtaskStateStored(A, 5, handle("a")))
    assert isinstance(store, b.StoreCheckpoint)
    assert store.to_copy == (handle("old-1"),)
    for wrong in ({}, {handle("a"): handle("x")}, {handle("old-0"): handle("x")}):
        with unchanged(dialogue.tracker), pytest.raises(LocalProtocolError, match="copies of other files"):
            dialogue.tell(b.CheckpointStored(5, wrong))
    dialogue.tell(b.CheckpointStored(5, {handle("old-1"): handle("copy-1")}))
    [store] = dialogue.tell(b.SubtaskStateStored(A, 6, handle("a6")))  # it began before the copies were there
    assert isinstance(store, b.StoreCheckpoint)
    assert store.to_copy == (handle("old-1"),)
    dialogue.tell(b.AbortRequested(6, "not wanted"))
    dialogue.cut(7, A).tell(acknowledged(A, 7))
    [store] = dialogue.tell(b.SubtaskStateStored(A, 7, handle("a7")))
    assert isinstance(store, b.StoreCheckpoint)
    assert store.to_copy == ()
    assert store.checkpoint.subtask_states[1].states == (m.SubtaskState(1, b"", handle("copy-1")),)
    [restore] = dialogue.tell(accepted(B))
    assert isinstance(restore, b.RestoreAttempt)
    assert (restore.states[0].files, restore.elsewhere) == (handle("copy-1"), False)


def test_what_a_checkpoint_of_this_application_has_is_used_as_it_is() -> None:
    dialogue = restored_dialogue(elsewhere=False)
    [restore] = dialogue.tell(accepted(A))
    assert isinstance(restore, b.RestoreAttempt)
    assert not restore.elsewhere
    dialogue.tell(SubtaskReady(A))
    dialogue.cut(5, A).tell(acknowledged(A, 5))
    [store] = dialogue.tell(b.SubtaskStateStored(A, 5, handle("a")))
    assert isinstance(store, b.StoreCheckpoint)
    assert store.to_copy == ()


def test_events_keep_their_order_around_an_upload() -> None:  # H22
    subtask = an_uploading_subtask(5)
    left = events(subtask.handle(s.EventSubmitted(b"a"), 1.0)) + send(subtask, b"b")
    subtask.handle(s.StateUploaded(5, HANDLE), 2.0)
    assert [*left, *send(subtask, b"c")] == [b"a", b"b", b"c"]

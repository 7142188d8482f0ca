# SPDX-License-Identifier: Apache-2.0

"""Mutants of state in files: the cut and the upload after it, savepoints, and what the driver may delete."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

STATE_FILES = catalogue(r"""
valve-waits-for-the-upload [feared; H192]
  The valve of a subtask opens at the end of its upload.
  @ protocol.subtask.outbound:SubtaskOutbound.acknowledge
  - if checkpoint_id in self._closed:
  + if checkpoint_id in self._closed and not state_follows:
gateway-waits-for-the-upload [feared; H192]
  The gateway opens when the files are stored.
  @ protocol.gateway.outbound:GatewayOutbound.acknowledge
  - if checkpoint_id in self.closed:
  + if checkpoint_id in self.closed and not follows:
failed-upload-declines [found; H192]
  A subtask whose upload fails declines the checkpoint, although its valve is open.
  @ protocol.subtask.machine:SubtaskMachine._end_upload
  ~ self._outbound.state_failed( => self._outbound.decline(
upload-is-not-stopped [feared; H190]
  Nobody is told that the upload of a checkpoint that is over may stop.
  @ protocol.subtask.outbound:SubtaskOutbound.end_checkpoint
  - effects.append(StopUpload(checkpoint_id))
complete-before-its-files [feared; H190]
  A checkpoint is written when the last snapshot has come, whether its files are stored or not.
  @ protocol.barrier_tracker.pending:CheckpointsUnderWay._acknowledged
  F if report.state_follows:
  @ protocol.barrier_tracker.pending:PendingCheckpoint.take_one_of_many
  ~ report.state_follows or => False or
final-state-replaces-the-files [found; H190]
  A subtask may end during an upload, and its final state becomes its part of the earlier cut.
  @ protocol.subtask.machine:SubtaskMachine.may_finish
  ~ and not self._outbound.uploading() => and True
  @ protocol.subtask.machine:SubtaskMachine._finish
  F if uploading := self._outbound.uploading():
  @ protocol.barrier_tracker.pending:CheckpointsUnderWay.end_part
  F if pending.parts[attempt.subtask].step is Step.AWAITING_STATE:
files-of-another-part [feared; H190]
  The files of a subtask are dropped when the coordinator hands over what it has recorded.
  @ protocol.barrier_tracker.pending:Part.collect
  ~ SubtaskSnapshot(snapshot.states, => SubtaskSnapshot(tuple(one._replace(files=None) for one in snapshot.states),
write-survives-a-failure [model; H190]
  A checkpoint that is being written goes on when an attempt that has a part in it fails.
  @ protocol.barrier_tracker.tracker:BarrierTracker._failed
  - self._under_way.abort_all(f"{attempt}: {input.reason}", out)
  + self._under_way.give_up([p for p in self._under_way.pending.values() if p.phase is not Phase.STORING], \
  + f"{attempt}: {input.reason}", out)
savepoint-copies-nothing [model; H193]
  A savepoint refers to the files of subtasks that have finished or are at rest.
  @ protocol.barrier_tracker.pending:PendingCheckpoint.store
  F if self.savepoint:
savepoint-is-not-taken-over [model; H193]
  A checkpoint refers to the files of the savepoint that the application started from.
  @ protocol.barrier_tracker.pending:PendingCheckpoint.store
  ~ elif self.elsewhere: => elif False:
hanging-request-holds-up-the-next-upload [found; H192]
  A request to the storage that hangs holds up the uploads of all later checkpoints of its attempt.
  @ spark_bridge.subtask.uploads:UploadThread.stop
  F if self._running is not None and self._running.stopped and len(self._threads) <= LEFT_BEHIND_MAX:
any-number-of-uploads-may-hang [feared; H192]
  Each checkpoint that is aborted while the storage hangs leaves a thread and the files of a snapshot behind.
  @ spark_bridge.subtask.uploads:UploadThread.stop
  ~ and len(self._threads) <= LEFT_BEHIND_MAX => and True
late-answer-is-remembered [feared; H190]
  A file whose request hung until after a later checkpoint is named again, although the driver may have deleted it.
  @ protocol.file_retention:UploadedFiles.stored
  ~ and checkpoint_id > self._completed_id => and True
copies-are-forgotten [feared; H193]
  A reset refers to the files of the savepoint, and not to the copies.
  @ protocol.barrier_tracker.pending:CheckpointsUnderWay.complete
  ~ if copied else => if False else
folder-after-the-barrier [feared; H193]
  A barrier that travels apart may come before the folder of its savepoint.
  @ protocol.gateway.outbound:GatewayOutbound._send_target
  ~ seq = self._last_event_seq = => seq =
folder-is-not-told [feared; H193]
  The upload for a savepoint goes to the files of checkpoints.
  @ protocol.subtask.outbound:SubtaskOutbound.acknowledge
  ~ self._targets.get(checkpoint_id, "") => ""
reuses-for-a-savepoint [model; H193]
  A savepoint names files of earlier checkpoints.
  @ protocol.file_retention:UploadedFiles.find
  F if target:
reuses-of-a-restored-savepoint [model; H193]
  A checkpoint names files of the savepoint that its task has restored.
  @ protocol.file_retention:UploadedFiles.restored
  T if not elsewhere:
reuses-of-a-written-savepoint [model; H193]
  A checkpoint names files that were uploaded into a savepoint.
  @ protocol.file_retention:UploadedFiles.stored
  ~ if not target and => if True and
names-are-used-again [model; H191]
  Two attempts of a subtask upload files under the same name.
  @ protocol.file_retention:file_name
  ~ {task_attempt_id}-{nonce}-{number} => 0-0-{number}
reuses-by-name [model; H191]
  A file is named again because another one with its path was uploaded.
  @ protocol.file_retention:UploadedFiles.find
  - self._names.get(identity)
  + next((one for known, one in self._names.items() if known[0] == identity[0]), None)
names-are-not-checked [feared; H191]
  The name of a manifest may lead out of the folder of the files.
  @ protocol.wire.state_handles:check_file_name
  F if not all(map(_is_part, name.split("/"))):
forgets-nothing [model; H190]
  After a completion, a task still names files that are in no state of it.
  @ protocol.file_retention:UploadedFiles.completed
  ~ if name in own or born > checkpoint_id => if True
sweeps-too-early [model; H190]
  A sweep does not wait for the checkpoints that were triggered before the completion.
  @ protocol.file_retention:FileRetention._begin_sweep
  F if any(checkpoint_id <= due for checkpoint_id in self._pending):
sweeps-at-an-abort [model; H190]
  The files of an aborted checkpoint are deleted before a later one completes.
  @ protocol.file_retention:FileRetention._abort
  - self._pending.discard(checkpoint_id)
  + self._pending.discard(checkpoint_id); self._completed = max(self._completed, checkpoint_id + 1); \
  + self._due = self._latest
writes-what-may-be-gone [model; H190]
  A checkpoint is written although it names files that a sweep may have deleted.
  @ protocol.file_retention:FileRetention._name
  F if doubtful:
forgets-what-is-in-doubt [model; H190 H64]
  The files of a checkpoint whose write was reported as failed are deleted.
  @ protocol.file_retention:FileRetention._abort
  F if input.in_doubt and names is not None:
sweeps-before-the-record [model; H190]
  Files are deleted before it is recorded which checkpoint the application goes on from.
  @ protocol.file_retention:FileRetention._choose
  - out.append(RecordRestore())
  + self._sweep = _Sweep.LISTING; out.extend((ListFiles(), RecordRestore()))
  @ protocol.file_retention:FileRetention.handle
  F if _START_OF.get(type(input), _Start.RECORDED) is not self._start:
files-before-their-record [model; H190]
  The files of a checkpoint are deleted before its record.
  @ protocol.file_retention:FileRetention._complete
  - self._kept[checkpoint_id] = self._written.pop(checkpoint_id)
  + self._kept = {checkpoint_id: self._written.pop(checkpoint_id)}
deletes-without-the-claim [model; H190 H81]
  Files are deleted after another application has begun to use the storage.
  @ protocol.file_retention:FileRetention._go_on
  - out.append(ConfirmClaim())
  + self._confirm(ClaimConfirmed(held=True), out)
shell-deletes-without-the-claim [feared; H190]
  The shell says that the application still has the storage, without a look.
  @ actors.coordination.engine.state_retention:StateRetention._carry_out
  - self._run(port.has_claim, ClaimConfirmed)
  + self.tell(ClaimConfirmed(True))
shell-writes-what-is-refused [feared; H190]
  A checkpoint is written although its retention refuses it.
  @ actors.coordination.engine.state_retention:StateRetention._carry_out
  ~ self._refused( => (lambda n, why: self._allowed(n))(
shell-writes-before-it-is-allowed [feared; H190]
  A checkpoint is written when its files are read, whatever its retention says.
  @ actors.coordination.engine.barrier_tracker:BarrierTrackerActor._gathered
  - self._retention.named(found.checkpoint_id, found.names)
  + self._write_allowed(found.checkpoint_id); self._retention.named(found.checkpoint_id, found.names)
shell-forgets-what-is-in-doubt [feared; H190 H64]
  The retention is not told that a restart may restore an aborted checkpoint.
  @ actors.coordination.engine.barrier_tracker:BarrierTrackerActor._checkpoint_over
  ~ in_doubt=in_doubt => in_doubt=False
shell-knows-of-no-earlier-checkpoint [feared; H190]
  An application deletes files that the checkpoints of earlier ones name.
  @ actors.coordination.engine.state_retention:StateRetention.start
  - self._run(port.kept, RestoreChosen)
  + self.tell(RestoreChosen({}))
shell-removes-records-too-early [feared; H190]
  The records of older checkpoints count as removed before the storage has removed them.
  @ actors.coordination.engine.state_retention:StateRetention.records_listed
  ~ self._kept - kept => self._kept
damaged-checkpoint-names-nothing [feared; H190]
  The files of a checkpoint that cannot be read at the moment are deleted.
  @ spark_bridge.storage.operator_states:OperatorStates.kept
  ~ if handles is not None: => if (handles := handles or []) is not None:
manifests-are-not-read [feared; H190]
  A checkpoint is written although the driver does not find what its tasks have stored.
  @ spark_bridge.storage.operator_states:OperatorStates.gather
  ~ raise _not_shared(error) from error => names = frozenset()
savepoint-is-not-copied [feared; H193]
  The files of subtasks that have finished are not brought into a savepoint.
  @ spark_bridge.storage.operator_states:OperatorStates.copy_for_savepoint
  - await self._until_stopped(partial(source.copy, handle, target))
savepoint-is-looked-for-among-checkpoints [feared; H193]
  The files of a restored savepoint are taken to be where the application stores its own.
  @ actors.coordination.engine.gateway:OpenGateways.open
  ~ self._config.files_from if effect.elsewhere else "" => ""
savepoint-leaves-its-files [feared; H162]
  A savepoint that is given up or deleted leaves the files of its states.
  @ spark_bridge.storage.state_files.folder:StateFolder.delete_all
  - self.delete(self.names())
sweeps-later-applications [feared; H190]
  The files of a later application are deleted.
  @ protocol.file_retention:FileRetention._is_old
  ~ origin.epoch < self._epoch or => True or
last-states-stay [found; H190]
  What is left of a last state that no checkpoint needs stays as long as the application runs.
  @ actors.coordination.engine.barrier_tracker:BarrierTrackerActor._attempt_over
  F if self._may_have_files:
last-state-is-swept-too-early [feared; H190]
  A last state is deleted after a checkpoint that began before the end of its attempt.
  @ protocol.file_retention:FileRetention._is_swept
  ~ began < self._swept => began <= self._swept
attempts-end-before-pending-checkpoints [feared; H190]
  Attempts that ended before anything named files are taken to have ended before all checkpoints.
  @ actors.coordination.engine.state_retention:StateRetention.turn_on
  ~ self._take(AttemptOver(task_attempt_id)) => self._machine._over[task_attempt_id] = 0
swept-last-state-is-named [feared; H190]
  A checkpoint may name a last state that is being deleted.
  @ protocol.file_retention:FileRetention._may_be_gone
  ~ self._is_swept(name, origin) => origin.checkpoint_id < self._swept
group-of-one-process [feared; H190]
  The group of a key is another one in each process.
  @ protocol.key_groups:KeyGroups.of
  ~ int.from_bytes(blake2b(encode_key(key), digest_size=8).digest(), "big") => hash(key)
group-forgets-the-type [feared; H190]
  An integer and its decimal text are one key.
  @ protocol.key_groups:encode_key
  ~ return _encode_integer(key) => return encode_key(str(key))
piece-is-not-cut [feared; H52]
  A subtask gets all groups of each state that has one of these.
  @ protocol.key_groups:cut
  ~ max(first, own.start), min(end, own.stop) => first, end
piece-forgets-its-cut [feared; H52]
  A second change of the parallelism divides what was stored, and not what the subtask has of it.
  @ protocol.barrier_tracker.rescale:_divided
  - pieces.append((state, groups._replace(first=low, end=high)))
  + pieces.append((state, groups))
pieces-stay-apart [feared; H52]
  Two neighbouring pieces of one folder are restored one by one.
  @ protocol.barrier_tracker.rescale:_add
  ~ if middle == also_middle and => if False and
pieces-meet-as-states [feared; H52]
  A piece counts as the state of its subtask, which must not meet another one.
  @ protocol.barrier_tracker.rescale:rescaled
  ~ states=tuple(whole) => states=part.states
other-parts-follow-the-files [feared; H52]
  The states of other parts are restored with each piece of the files.
  @ protocol.barrier_tracker.rescale:_divided
  ~ state._replace(state=data) => state
other-parts-are-lost [feared; H52]
  The states of parts without files are lost if the files of another one are divided.
  @ protocol.barrier_tracker.rescale:_divided
  F if others is not None:
overlap-is-cut [feared; H52]
  Two states with the same group are both restored.
  @ protocol.key_groups:cut
  F if first < covered:
other-number-of-groups-is-cut [feared; H52]
  States with different numbers of groups are cut as if they had one.
  @ protocol.key_groups:cut
  F if len(totals) > 1:
groups-leave-without-their-cut [feared; H190]
  A task is not told which groups of a state are its own.
  @ protocol.wire.format:_packed_piece
  ~ pack_piece(files, groups) => pack_piece(files, None)
cut-is-not-stored [feared; H190]
  A checkpoint forgets which groups of a state a subtask has yet to restore.
  @ protocol.wire.checkpoint_format:_packed_files
  ~ pack_piece(cast("StateHandle", files), groups) => pack_piece(cast("StateHandle", files), None)
task-acknowledges-a-piece [feared; H62]
  A task may store a piece in place of a state.
  @ protocol.wire.state_handles:unpack_handle
  F if groups is not None:
one-piece-is-taken-whole [feared; H191]
  A subtask that gets a part of one folder is not asked to drop the rest.
  @ protocol.wire.messages:SubtaskState.is_whole
  ~ self.groups is None or self.files is None or self.groups == (self.files.key_groups or ())[:2] => True
number-of-groups-is-found-late [found; H52]
  Another number of key groups than the checkpoint's is found at the first snapshot.
  @ spark_bridge.subtask.keyed_state:KeyedState.__init__
  - context._check_key_groups(groups)
number-of-groups-changes [feared; H52]
  An operator stores with other key groups than it restored.
  @ spark_bridge.subtask.state_files:TaskFiles.check_key_groups
  F if self._key_groups not in (None, groups.count):
merged-folders-stay [feared; H191]
  The folders of pieces that were merged stay on the disk as long as the task runs.
  @ spark_bridge.subtask.state_files:TaskFiles.merged
  - shutil.rmtree(folder, ignore_errors=True)
smallest-piece-first [feared; H191]
  The largest piece is copied into the smallest one.
  @ spark_bridge.subtask.state_files:TaskFiles.restore_pieces
  ~ reverse=True => reverse=False
piece-replaces-the-state-of-its-part [feared; H52]
  What a piece has in place of the state of another part replaces it.
  @ protocol.parts:states_by_part
  T if one.groups is None:
merge-keeps-other-groups [feared; H52]
  A merge leaves keys of other subtasks, which come back later although their own subtask has deleted them.
  @ spark_bridge.subtask.keyed_state:KeyedState.merge
  - store.delete_range(high, _AFTER_ALL)
merge-takes-too-much [feared; H52]
  A merge takes all groups that follow in the folder of another subtask.
  @ spark_bridge.subtask.keyed_state:_ingest
  F if place >= high:
keyed-state-takes-any-key [feared; H52]
  A keyed state takes keys of other subtasks, which the next change of the parallelism loses.
  @ spark_bridge.subtask.keyed_state:KeyedState._place
  F if group not in self._own:
""")

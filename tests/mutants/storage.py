# SPDX-License-Identifier: Apache-2.0

"""Mutants of the storage and its notifications: checkpoints in doubt, discards, records of restores, savepoints.

Mutants that need two coordinated applications, or the sink, are in the tests of the storage and of the sink.
"""

from __future__ import annotations

from tests.mutants.mutant import catalogue

STORAGE = catalogue(r"""
reset-deletes-in-doubt [E1; H64]
  The coordinator is never told which checkpoints are in doubt.
  @ actors.coordination.engine.coordinator:CoordinatorActor._handle_lifecycle
  - self.in_doubt.add(checkpoint_id)
discard-is-reported-before-it-is-durable [E1; H64]
  A discard that has failed is reported as durable.
  @ actors.coordination.engine.barrier_tracker:CheckpointWrites._discard
  - log.warning("checkpoint discard failed", error=describe(error), retry_s=delay_s)
  + self._context.self_ref.tell(CheckpointDiscarded(checkpoint_id)); return
discard-without-a-marker [E1; H64]
  A discard removes the file, and nothing forbids that it appears later.
  @ spark_bridge.storage.store:CheckpointStorage.discard
  - self._files.create_empty(f"{folder}/{void_name(checkpoint_id, self._claims.owner)}")
restore-without-record [E1; H64]
  An application restores a checkpoint and records nothing.
  @ spark_bridge.storage.store:CheckpointStorage._record
  - self._files.create_empty(f"{folder}/{record.name}")
savepoint-name-without-token [feared; H162]
  Two applications with the same id write one file.
  @ spark_bridge.storage.layout:savepoint_name
  ~ -{token}{SUFFIX} => {SUFFIX}
savepoint-replaces-a-file [feared; H162]
  A local disk does not say that a file of the name is there.
  @ spark_bridge.storage.files:Files.write_new
  ~ partial(self._move, temporary, path, replace=False) => partial(self._move, temporary, path)
failed-savepoint-deletes-that-of-another [feared; H162]
  A savepoint whose name is taken deletes what has it.
  @ spark_bridge.storage.files:Files._taken_back
  ~ except FileExistsError: => except ZeroDivisionError:
failed-savepoint-stays [feared; H162]
  What a failed savepoint has written is left, under its final name.
  @ spark_bridge.storage.files:Files._taken_back
  - self.sweep(path)
cancelled-savepoint-appears [feared; H162]
  The thread that writes a savepoint does not learn that nobody wants it.
  @ spark_bridge.storage.port:StoragePort.store_savepoint
  - savepoint.write.stop()
""")

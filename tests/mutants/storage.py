# SPDX-License-Identifier: Apache-2.0

"""Mutants of the storage and its notifications: checkpoints in doubt, discards, records of restores.

Mutants that need two coordinated applications, or the sink, are in the tests of the storage and of the sink.
"""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

STORE = "spark_bridge.storage.store:CheckpointStorage."
WRITES = "actors.coordination.checkpoint_writes:CheckpointWrites."

STORAGE = (
    Mutant(
        "reset-deletes-in-doubt",
        "The coordinator is never told which checkpoints are in doubt.",
        "E1",
        ("H64",),
        (
            Edit(
                "actors.coordination.coordinator:CoordinatorActor._handle_lifecycle",
                "self.in_doubt.add(checkpoint_id)",
                "pass",
            ),
        ),
    ),
    Mutant(
        "discard-is-reported-before-it-is-durable",
        "A discard that has failed is reported as durable.",
        "E1",
        ("H64",),
        (
            Edit(
                f"{WRITES}_discard",
                'log.warning("checkpoint discard failed", error=repr(error), retry_s=delay_s)',
                "self._context.self_ref.tell(CheckpointDiscarded(checkpoint_id)); return",
            ),
        ),
    ),
    Mutant(
        "discard-without-a-marker",
        "A discard removes the file, and nothing forbids that it appears later.",
        "E1",
        ("H64",),
        (
            Edit(
                f"{STORE}discard",
                'self._files.create_empty(f"{folder}/{void_name(checkpoint_id, self._claims.owner)}")',
                "pass",
            ),
        ),
    ),
    Mutant(
        "restore-without-record",
        "An application restores a checkpoint and records nothing.",
        "E1",
        ("H64",),
        (Edit(f"{STORE}_record", 'self._files.create_empty(f"{folder}/{record.name}")', "pass"),),
    ),
)

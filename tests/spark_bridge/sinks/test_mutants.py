# SPDX-License-Identifier: Apache-2.0

"""Bugs of the two-phase pattern, put into the product and caught by the public conformance suite."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from headgate.testing import SinkTarget, sink_cases
from tests.mutants.mutant import Mutant, catalogue
from tests.spark_bridge.sinks.memory import MemoryTarget
from tests.spark_bridge.sinks.test_conformance import DeltaTarget, IcebergTarget, PostgresTarget

OF_THE_PATTERN = catalogue(r"""
committed-when-listed [new; H140]
  What is prepared is committed when its list arrives, before any checkpoint completes.
  @ spark_bridge.sinks.two_phase.ledger:SinkLedger.listed
  ~ if again or => if True or
state-not-committed-again [new; H52]
  A restored state's parts are taken as committed, although the driver may have died before that.
  @ spark_bridge.sinks.two_phase.driver:SinkCommits.restore
  ~ self._gather.restore(checkpoint_id, due, expected) => self._gather.restore(checkpoint_id, [], expected)
destroyed-in-doubt [new; H64]
  What a reset leaves behind is destroyed while an aborted checkpoint that needs it may still be restored.
  @ spark_bridge.sinks.two_phase.driver:SinkCommits._destroy
  F if in_doubt:
half-a-checkpoint [new; H141]
  An atomic sink commits what is known of a checkpoint, and the rest when it comes.
  @ spark_bridge.sinks.two_phase.ledger:WholeCheckpoints.take
  - if group.missing and not self._run_succeeded:
  + if False:
waiting-not-in-state [new; H141]
  What waits for the rest of its checkpoint is missing from the state of the next one.
  @ spark_bridge.sinks.two_phase.driver:SinkCommits.snapshot
  ~ self._gather.held => []
last-list-not-covered [new; H141]
  What an operator lists at its end waits for the next checkpoint, although a snapshot holds it.
  @ spark_bridge.sinks.two_phase.ledger:WholeCheckpoints.covering
  - if prepared.checkpoint_id >= 0 or not missing:
  + if True:
orphans-of-dead-drivers [new; H140]
  What a dead driver's tasks have prepared after the restored checkpoint stays forever.
  @ spark_bridge.sinks.two_phase.driver:SinkCommits.start
  - await self._sweep(self._ledger.parts_of_earlier_applications)
  @ spark_bridge.sinks.two_phase.driver:SinkCommits.complete
  F if self._ledger.nothing_held:
held-parts-are-no-orphans [new; H52 H64]
  A new driver destroys all that it finds prepared, even if a list of it may still arrive.
  @ spark_bridge.sinks.two_phase.ledger:SinkLedger.parts_of_earlier_applications
  ~ if part.after >= self._completed => if True
listed-outside-the-snapshot [new; H31]
  The list of what was prepared does not travel with the snapshot if it is the first one.
  @ spark_bridge.sinks.two_phase.task:TwoPhaseSinkOperator.snapshot_state
  ~ self._names.prepared_for(checkpoint_id) => self._names.prepared_for(checkpoint_id); committables = committables[1:]
""")
OF_A_SINK = catalogue(r"""
postgres-rows-before-ledger [new; H64]
  Rows are committed, and the ledger in a transaction after that.
  @ spark_bridge.sinks.postgres.driver:StagedCommitter.commit
  - connection.execute(self._apply(connection, names))
  + connection.execute(self._apply(connection, names)); connection.commit()
postgres-no-ledger-in-prepared [new; H64]
  A prepared transaction does not change the ledger, so one that was committed before is taken for lost.
  @ spark_bridge.sinks.postgres.task:PostgresWriter.prepare
  ~ (self._context.sink, part.writer, part.number) => (self._context.sink, part.writer, -2 - part.number)
iceberg-replay-not-recognised [new; H64]
  A file is added again if its commit is repeated.
  @ spark_bridge.sinks.parquet.driver:ParquetCommitter._uncommitted
  ~ if part.number > numbers.get(part.writer, -1) => if True
delta-strangers-files [new; H83]
  The files of another sink of the same table are taken for orphans.
  @ spark_bridge.sinks.folder:SinkFolder.staged
  - paths = self._filesystem.ls(self._hidden, detail=False)
  + paths = self._filesystem.find(self._hidden.rpartition("/")[0])
iceberg-rebases-blindly [pyiceberg 0.12 retries by itself; H64]
  A commit that met a conflict is put on top of it, even if the other one was the same.
  @ spark_bridge.sinks.iceberg.driver:IcebergCommitter.load
  ~ = "0" => = "4"
""")
CAUGHT_BY = {
    "postgres-rows-before-ledger": ("postgres staged", "the driver dies before a line"),
    "postgres-no-ledger-in-prepared": ("postgres prepared", "a commit is repeated"),
    "iceberg-replay-not-recognised": ("iceberg", "a commit is repeated"),
    "delta-strangers-files": ("delta", "what another application prepared"),
    "iceberg-rebases-blindly": ("iceberg", "two drivers commit the same"),
}


def failures(target: SinkTarget, only: str = "") -> list[str]:
    """The cases that fail, up to the first one."""
    for case in sink_cases(histories=30):
        if any(part in str(case) for part in only.split("|")):
            try:
                case.run(target)
            except Exception:
                return [str(case)]
    return []


@pytest.mark.parametrize("mutant", OF_THE_PATTERN, ids=lambda mutant: mutant.name)
def test_a_bug_of_the_pattern_is_caught(mutant: Mutant) -> None:
    assert failures(MemoryTarget(), "every row") == []
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.apply(monkeypatch)
        assert failures(MemoryTarget()) != []


# A history that fails leaves connections and files open.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=mutant.name, marks=() if "delta" in mutant.name else pytest.mark.long)
        for mutant in OF_A_SINK
    ],
)
def test_a_bug_of_a_sink_is_caught(mutant: Mutant, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    which, cases = CAUGHT_BY[mutant.name]
    target: SinkTarget
    match which:
        case "delta":
            target = DeltaTarget(tmp_path)
        case "iceberg":
            target = IcebergTarget(tmp_path)
        case _:
            mode = {"mode": "prepared"} if "prepared" in which else {}
            target = PostgresTarget(request.getfixturevalue("postgres"), **mode)
            request.addfinalizer(target.close)
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.apply(monkeypatch)
        assert failures(target, cases) != []
    gc.collect()  # of a history that failed

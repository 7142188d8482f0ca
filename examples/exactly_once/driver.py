# SPDX-License-Identifier: Apache-2.0

"""The Spark driver of the pipeline, as a separate program that may be killed and started again at any moment.

``python -m examples.exactly_once.driver JSON`` with the fields of ``DriverOptions``. It writes what happens into its
journal, a JSON object per line, which survives it. It ends with status 0 when the job has succeeded and everything is
committed, and with 2 if Spark cannot start. It ends immediately when its standard input closes, because then the
process that started it has ended.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from py4j.protocol import Py4JError
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from examples.exactly_once import faults, pipeline
from examples.exactly_once.faults import STORAGE, Fault, FaultyCoordinator, FaultySubtask
from examples.exactly_once.faulty_storage import PROTOCOL
from examples.exactly_once.pipeline import OPERATOR_ID
from headgate import CheckpointConfig, FixedDelay, GatewayLimits, Sidecar, SidecarConfig

CHECKPOINT = CheckpointConfig(
    interval_s=0.1, timeout_s=3.0, tolerated_failures=1000
)  # a checkpoint that meets a fault fails; the fault itself causes the failover
CONFIRM_TIMEOUT_S = 1.0
RESTART = FixedDelay(restarts_max=20, delay_s=0.2)


class DriverOptions(NamedTuple):
    """The driver's arguments. URLs are of folders; ``faults`` are those that have not happened yet.

    ``hold_events``: whether events may wait for checkpoints.
    """

    master: str
    parallelism: int
    numbers: int
    storage_url: str
    sink_url: str
    journal: str
    faults: list[Fault]
    hold_events: bool = True

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> DriverOptions:
        fields = json.loads(text)
        return cls(**{**fields, "faults": [Fault(*fault) for fault in fields["faults"]]})


class Journal:
    """Lines that are in the file when ``write`` returns, even if the process dies then. Thread-safe."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115 - open as long as the process

    def write(self, **entry: Any) -> None:
        self._file.write(json.dumps(entry) + "\n")


def end_with_stdin() -> None:
    """Die with the process that started this one, even if it was killed."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="watch-stdin", daemon=True).start()


def run(options: DriverOptions) -> None:
    """Restore what the storage holds, continue to the end, commit. Raises whatever the sidecar or Spark raises.

    Ends the process with status 2 if Spark does not start.
    """
    journal = Journal(options.journal)
    for module in (pipeline, faults):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]  # executors have no examples
    coordinator = FaultyCoordinator(
        options.numbers,
        options.sink_url,
        options.faults,
        on_wrong=lambda text: journal.write(wrong=text),
        on_fault=lambda kind, kills=False: journal.write(fault=kind, kills=kills),
    )
    storage_url = options.storage_url
    if any(fault.kind == STORAGE for fault in options.faults):
        storage_url = f"{PROTOCOL}://{storage_url}"
    config = SidecarConfig(storage=storage_url, gateway=GatewayLimits(confirm_timeout_s=CONFIRM_TIMEOUT_S))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    logging.getLogger("headgate").setLevel(logging.INFO)
    try:
        spark = SparkSession.builder.master(options.master).config("spark.ui.enabled", "false").getOrCreate()
    except (PySparkException, Py4JError, OSError) as error:
        journal.write(no_spark=str(error))
        sys.exit(2)
    try:
        with Sidecar(spark, config) as sidecar:
            handle = sidecar.coordinate(
                OPERATOR_ID,
                coordinator,
                parallelism=options.parallelism,
                mode="streaming",
                checkpoint=replace(CHECKPOINT, hold_events=options.hold_events),
            )
            task = handle.subtask(FaultySubtask, options.numbers, options.sink_url)
            handle.run(task, restart=RESTART, input_id="numbers")
            journal.write(statistics=handle.statistics())
    finally:
        spark.stop()


def main(argument: str) -> int:
    end_with_stdin()
    run(DriverOptions.from_json(argument))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

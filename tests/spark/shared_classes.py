# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.spark.shared_classes``: archive the classes of Spark, for the JVMs of the tests to share.

Most of the processor time of a new JVM goes into loading and verifying Spark's classes. A JVM that maps an archive of
them (class data sharing, JEP 350) starts a session in a little more than half of the time. The long tests start more
than a hundred JVMs. The archive belongs to one Java and to the virtual environment in which it lies; without it the
tests only take longer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BUILD_TIMEOUT_S = 600.0
QUIET = "-Xlog:disable"  # the JVM would list on standard output what it does not archive


def archive_file() -> Path | None:
    """Return the path of the archive for the Java in ``JAVA_HOME``, whether it exists or not; None without a Java."""
    release = Path(os.environ.get("JAVA_HOME", ""), "release")
    if "JAVA_HOME" not in os.environ or not release.is_file():
        return None
    return Path(sys.prefix, f"spark-classes-{zlib.crc32(release.read_bytes()):08x}.jsa")


def jvm_options() -> str:
    """Return the options that make a JVM use the archive; empty if it does not exist."""
    file = archive_file()
    return f" -XX:SharedArchiveFile={file} {QUIET}" if file is not None and file.is_file() else ""


def build(file: Path) -> None:
    """Write the archive. It appears as a whole, because a JVM that maps a part of one crashes."""
    part = file.with_suffix(f".{os.getpid()}")
    flags = f"-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ArchiveClassesAtExit={part} {QUIET}"
    environment = {**os.environ, "SPARK_SUBMIT_OPTS": flags, "PYSPARK_PYTHON": sys.executable}
    try:
        subprocess.run(
            [sys.executable, "-m", __spec__.name, "load"], env=environment, check=True, timeout=BUILD_TIMEOUT_S
        )
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _read(rows: DataFrame, batch_id: int) -> None:
    rows.collect()


def load_classes() -> None:
    """Use what most tests use of Spark, and wait for the end of the JVM, which then writes its archive."""
    from pyspark import SparkContext

    from tests.spark.conftest import start_spark

    session = start_spark("local[2,2]")
    numbers = session.sparkContext.parallelize(range(4), 2)
    numbers.map(lambda number: (number % 2, number)).reduceByKey(max).collect()
    session.range(4).groupBy("id").count().collect()
    stream = session.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    query = stream.writeStream.foreachBatch(_read).trigger(availableNow=True).start()
    query.awaitTermination()
    session.stop()
    gateway = SparkContext._gateway
    assert gateway is not None
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(BUILD_TIMEOUT_S)


if __name__ == "__main__":
    if sys.argv[1:] == ["load"]:
        load_classes()
    elif (wanted := archive_file()) is not None and not wanted.is_file():
        print(f"headgate: archiving the classes of Spark in {wanted.name} (once; half a minute)", file=sys.stderr)
        build(wanted)

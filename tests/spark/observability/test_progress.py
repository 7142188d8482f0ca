# SPDX-License-Identifier: Apache-2.0

"""The progress bar of a real job in a terminal, next to Spark's own bar."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios

import pytest

from tests.spark.cluster import ROOT
from tests.spark_bridge.observability.screen import screen_of

pytestmark = [pytest.mark.spark, pytest.mark.long]

PROGRAM = """
import logging, time
from pyspark.sql import SparkSession
from headgate import Sidecar, SourceCoordinator, SplitReader, StaticSplitEnumerator

class Slow(SplitReader):
    def read_split(self, number):
        time.sleep(0.1)
        yield number

builder = SparkSession.builder.master("local[2,4]").config("spark.ui.showConsoleProgress", {own_bar!r})
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
logging.getLogger("headgate").setLevel(logging.ERROR)  # a slow machine is worth a warning
print("--- the job ---", flush=True)
with Sidecar(spark) as sidecar:
    source = SourceCoordinator(lambda state: StaticSplitEnumerator(range(30), state))
    job = sidecar.coordinate("slow", source, parallelism=2)
    slots = spark.sparkContext.parallelize(range(2), 2)
    with job.progress():
        rows = slots.mapPartitions(job.subtask(Slow)).collect()
print("rows:", len(rows), flush=True)
spark.stop()
"""


def in_a_terminal(program: str) -> tuple[str, int]:
    """Everything that the program writes to a terminal of 100 columns, and its exit status."""
    child, terminal = pty.fork()
    if not child:  # pragma: no cover
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", program])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    written = b""
    while True:
        try:
            data = os.read(terminal, 65_536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        written += data
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    return written.decode(), os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize("own_bar", ["true", "false"])
def test_the_bar_reaches_its_end_and_leaves_the_terminal_in_order(own_bar: str) -> None:
    written, status = in_a_terminal(PROGRAM.replace("{own_bar!r}", repr(own_bar)))
    assert status == 0, written
    shown = written.partition("--- the job ---\r\n")[2]
    assert ("[Stage " in shown) == (own_bar == "true")
    assert len(set(re.findall(r"(\d+)/30", shown))) > 5, "it was seen to grow"
    lines = screen_of(shown)
    assert len(lines) == 2, lines
    bar, last = lines
    assert last == "rows: 30"
    assert bar.startswith("slow: 100%")
    assert " 30/30 " in bar

# SPDX-License-Identifier: Apache-2.0

"""A driver with a durable cache: ``python -m tests.spark.primitives.cache_program STORAGE CALLS``.

Its tasks ask for 40 keys, and note each call for a value in the file CALLS. It prints the sum of the values.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from headgate import Sidecar, SidecarConfig
from tests.spark.conftest import LOCAL, start_spark


def main(storage: str, calls: str) -> None:
    spark = start_spark(LOCAL)
    with Sidecar(spark, SidecarConfig(storage=storage)) as sidecar:
        cache = sidecar.cache("squares", durable=True)
        job = sidecar.coordinate("ask", parallelism=2, uses=[cache])

        def ask(number: int) -> int:
            time.sleep(0.05)  # a slow service
            descriptor = os.open(calls, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, b"%d\n" % number)
            os.close(descriptor)
            return number * number

        def work(records: Iterator[Any]) -> Iterator[int]:
            for number in range(40):
                yield cache.get(number, partial(ask, number))

        print("sum", sum(job.run(work)), flush=True)
        print("computed", cache.figures()["computed_total"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

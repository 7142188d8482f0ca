# SPDX-License-Identifier: Apache-2.0

"""A Spark Connect client that coordinates a job which waits forever: ``client_program.py URL LEASE_S``.

With ``ADDRESS SECRET_FILE`` of a sidecar in another process, it only attaches to that, with TLS.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import SparkSession

from headgate import Addresses, AttachedSidecar, Sidecar, SidecarConfig, SidecarLimits
from spark_bridge.connect.driver import AttachedSession
from tests.spark.connect import jobs


def main(url: str, lease_s: str, *sidecar_elsewhere: str) -> None:
    cloudpickle.register_pickle_by_value(jobs)  # type: ignore[no-untyped-call]
    spark = SparkSession.builder.remote(url).create()
    if sidecar_elsewhere:
        wait_attached(spark, float(lease_s), *sidecar_elsewhere)
    with Sidecar(
        spark,
        SidecarConfig(addresses=Addresses(relay_lease_s=float(lease_s)), limits=SidecarLimits(connect_timeout_s=2.0)),
    ) as sidecar:
        numbers = jobs.Held(range(4))
        handle = sidecar.coordinate("numbers", lambda: numbers, parallelism=1)
        threading.Thread(target=jobs.read, args=(spark, handle), daemon=True).start()
        numbers.waiting.wait()
        print("waiting", flush=True)
        threading.Event().wait()


def wait_attached(spark: Any, lease_s: float, address: str, secret_file: str) -> None:
    AttachedSession.lease_s = lease_s
    with AttachedSidecar(spark, address, secret_file=secret_file, tls=True):
        print("waiting", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0

"""A coordinated job of a Spark Connect client: the tasks on the server's executors square numbers.

The coordinator hands out the numbers from this process. It needs ``headgate[pyspark-client]`` and a server: its
argument is a URL such as ``sc://127.0.0.1:15002``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from pyspark import cloudpickle
from pyspark.sql import SparkSession

from headgate import (
    Addresses,
    AttachedSidecar,
    Sidecar,
    SidecarConfig,
    SidecarRuntime,
    SourceCoordinator,
    SplitReader,
    StaticSplitEnumerator,
    run_across_sessions,
)

__all__ = ["Square", "sum_although_the_server_ends", "sum_of_squares", "sum_with_a_sidecar_elsewhere"]

COUNT = 10


class Square(SplitReader):
    """Yields the square of each split."""

    def read_split(self, split: int) -> Iterator[int]:
        yield split * split


def numbers() -> SourceCoordinator:
    return SourceCoordinator(lambda state: StaticSplitEnumerator(range(COUNT)))


def sum_of_squares(spark: SparkSession, config: SidecarConfig | None = None) -> int:
    """The sum of the first squares. ``spark`` is a session of Spark Connect."""
    with Sidecar(spark, config) as sidecar:
        squares = sidecar.coordinate("squares", numbers, parallelism=2)
        return sum(squares.run(Square))


def sum_although_the_server_ends(url: str, config: SidecarConfig) -> int:
    """The same, in a new session whenever the server has ended and is back."""

    def job(spark: SparkSession, sidecar: Sidecar) -> int:
        squares = sidecar.coordinate("squares", numbers, parallelism=2)
        return sum(squares.run(Square))

    return run_across_sessions(SparkSession.builder.remote(url).create, job, config)


def sum_with_a_sidecar_elsewhere(spark: SparkSession, address: str, secret_file: str) -> int:
    """The same, if only this client connects to others. ``coordinate`` is the sidecar's factory."""
    with AttachedSidecar(spark, address, secret_file=secret_file) as sidecar:
        return sum(sidecar.operator("squares").run(Square))


async def coordinate(sidecar: SidecarRuntime) -> None:
    await sidecar.coordinate("squares", numbers, parallelism=2)


def reachable_from_outside(host: str) -> SidecarConfig:
    """Settings for a client behind a router that passes both ports on."""
    return SidecarConfig(host="0.0.0.0", port=7650, addresses=Addresses(advertised_host=host, relay_port=7651))


def installed(secret_file: str) -> SidecarConfig:
    """Settings for a server whose operator has installed the relay."""
    return SidecarConfig(addresses=Addresses(relay_secret_file=secret_file))


# The server does not have this module, so it travels with the functions.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

if __name__ == "__main__":
    session = SparkSession.builder.remote(sys.argv[1]).create()
    print(sum_of_squares(session))

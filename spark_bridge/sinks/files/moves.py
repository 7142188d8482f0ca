# SPDX-License-Identifier: Apache-2.0

"""Moves a finished part to its readers, so that they see all of it or nothing.

* In a local directory, a move is a rename. If the two places are on different devices, the file is copied under a
  hidden name next to the target, and then renamed. No symbolic link is followed: a part is a file that a task wrote.
* On S3, a move is a copy inside the store, which becomes visible as a whole with its last request. That request has
  the condition ``If-None-Match: *``: an object that is there already is never replaced, not even by a driver that was
  fenced and continues. Then the source is deleted.
* On Azure, a move is a copy inside the store, too, with the same condition. The store may finish it after its answer,
  so the source is deleted only when the store reports that the copy is complete. An interrupted copy is repeated.
* Other object stores show a copy as a whole too. Filesystems that have their own ``mv`` rename (HDFS, SFTP, SMB).
* On any other filesystem, a move is a copy into the visible file, and a crash leaves half of it. It is refused.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from protocol.describing import a_type
from spark_bridge.common.bootstrap import ensure_importable
from spark_bridge.sinks.two_phase.errors import SinkMisused

ensure_importable("fsspec")

from fsspec.asyn import AsyncFileSystem, sync  # noqa: E402 - fsspec must be importable first
from fsspec.implementations.local import LocalFileSystem  # noqa: E402
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402
from fsspec.spec import AbstractFileSystem  # noqa: E402

Move = Callable[[str, str], None]
"""Moves the file of the first name to the second. Raises ``OSError``; may be repeated after that."""

_COPY_TIMEOUT_S = 600.0
_PART_BYTES = 2**30
"""How much of an object one request copies; S3 allows 5 GiB."""


def move_on(filesystem: Any) -> Move:
    """How to move files of this filesystem. Raises ``SinkMisused`` if readers may see half of a file."""
    if isinstance(filesystem, LocalFileSystem):
        return _rename
    protocols = [filesystem.protocol] if isinstance(filesystem.protocol, str) else filesystem.protocol
    if "s3" in protocols and hasattr(filesystem, "call_s3"):
        return lambda source, target: _move_once_on_s3(filesystem, source, target)
    if "abfs" in protocols and hasattr(filesystem, "service_client"):
        return lambda source, target: _move_once_on_azure(filesystem, source, target)
    innermost = filesystem
    while isinstance(getattr(innermost, "fs", None), AbstractFileSystem):  # a cache, or a folder as a filesystem
        innermost = innermost.fs
    moves_by_itself = type(innermost).mv is not AbstractFileSystem.mv
    if moves_by_itself or isinstance(innermost, AsyncFileSystem | MemoryFileSystem):
        move: Move = filesystem.mv
        return move
    raise SinkMisused(
        f"files of {a_type(innermost)} are moved by copying them, so readers could see half a file: use a "
        "local directory, HDFS or an object store"
    )


def _rename(source: str, target: str) -> None:
    if os.path.islink(source):  # a reader would see a file elsewhere
        raise OSError(
            errno.ELOOP,
            f"it is a symbolic link, and not the file that a task wrote: {source}. Put that file back in its place",
        )
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        folder, name = os.path.split(target)
        hidden = f"{folder}/.{name}.tmp"
        with suppress(FileNotFoundError):  # of an earlier try
            os.unlink(hidden)
        with open(source, "rb", opener=_without_links) as whole, open(hidden, "xb", opener=_without_links) as copy:
            shutil.copyfileobj(whole, copy)
            copy.flush()
            os.fsync(copy.fileno())
        os.replace(hidden, target)
        os.unlink(source)


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _move_once_on_azure(filesystem: Any, source: str, target: str) -> None:
    size = int(filesystem.info(source)["size"])
    sync(filesystem.loop, _copy_on_azure, filesystem, source, target)
    filesystem.invalidate_cache()
    if not _is_there(filesystem, target, size):
        raise FileNotFoundError(
            errno.ENOENT,
            f"the store has lost what it copied: {target}. Something else deletes files there: exclude this "
            "directory from it",
        )
    filesystem.rm_file(source)
    filesystem.invalidate_cache()


async def _copy_on_azure(filesystem: Any, source: str, target: str) -> None:
    """Copy unless that was done before, and return when the copy is complete."""
    clients = [filesystem.service_client.get_blob_client(*filesystem.split_path(one)[:2]) for one in (source, target)]
    status = await _copy_status(clients[1], target)
    if status in ("aborted", "failed"):  # what is there has no content
        await clients[1].delete_blob()
        status = "absent"
    if status == "absent":
        await _begin_copy(clients[0], clients[1], target)
    deadline = time.monotonic() + _COPY_TIMEOUT_S
    while (status := await _copy_status(clients[1], target)) == "pending":
        if time.monotonic() > deadline:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"the store has not completed a copy in {_COPY_TIMEOUT_S:g} s: {target}. The next try waits for it "
                "again; if it never ends, look at the store",
            )
        await asyncio.sleep(0.2)
    if status != "success":
        raise OSError(
            errno.EIO,
            f"the store has not copied {source}: its copy {target} is {status}. The next try begins again; if this "
            "does not help, look at the store",
        )


async def _begin_copy(source: Any, client: Any, target: str) -> None:
    try:
        await client.start_copy_from_url(source.url, headers={"If-None-Match": "*"})
    except Exception as error:
        if getattr(error, "status_code", None) not in (409, 412):  # it is there: another driver was faster
            raise OSError(
                errno.EIO, f"the store has refused to copy to {target}: {error}. Check the rights of these credentials"
            ) from error


async def _copy_status(client: Any, target: str) -> str:
    """What Azure says of the copy that a file comes from; success for a file that was written."""
    try:
        properties = await client.get_blob_properties()
    except Exception as error:
        if getattr(error, "status_code", None) == 404:
            return "absent"
        raise OSError(
            errno.EIO, f"the store does not say what is at {target}: {error}. Check the rights of these credentials"
        ) from error
    return str(properties.copy.status or "success")


def _move_once_on_s3(filesystem: Any, source: str, target: str) -> None:
    size = int(filesystem.info(source)["size"])
    if not _is_there(filesystem, target, size):
        try:
            _copy_if_absent(filesystem, source, target, size)
        except OSError:
            filesystem.invalidate_cache()
            if not _is_there(filesystem, target, size):  # the answer was lost, or another driver was faster
                raise
    filesystem.rm_file(source)
    filesystem.invalidate_cache()


def _is_there(filesystem: Any, target: str, size: int) -> bool:
    """Whether the file was copied before. Raises ``FileExistsError`` if it is another file."""
    try:
        found = int(filesystem.info(target)["size"])
    except FileNotFoundError:
        return False
    if found != size:
        raise FileExistsError(
            errno.EEXIST,
            f"there is another file of this name, with {found} bytes instead of {size}: {target}. Move it away; the "
            "next try or restart continues",
        )
    return True


def _copy_if_absent(filesystem: Any, source: str, target: str, size: int) -> None:
    """Copy inside the store, in parts, because only the end of such a copy takes a condition everywhere."""
    bucket, key, _ = filesystem.split_path(target)
    from_bucket, from_key, _ = filesystem.split_path(source)
    if size == 0:  # nothing to copy a part of
        filesystem.call_s3("put_object", Bucket=bucket, Key=key, Body=b"", IfNoneMatch="*")
        return
    upload = filesystem.call_s3("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]
    try:
        parts = []
        for number, content in enumerate(_ranges(size), start=1):
            copied = filesystem.call_s3(
                "upload_part_copy",
                content,
                Bucket=bucket,
                Key=key,
                PartNumber=number,
                UploadId=upload,
                CopySource={"Bucket": from_bucket, "Key": from_key},
            )
            parts.append({"PartNumber": number, "ETag": copied["CopyPartResult"]["ETag"]})
        filesystem.call_s3(
            "complete_multipart_upload",
            Bucket=bucket,
            Key=key,
            UploadId=upload,
            MultipartUpload={"Parts": parts},
            IfNoneMatch="*",
        )
    except BaseException:
        with suppress(OSError):  # the store would keep, and charge for, the parts
            filesystem.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)
        raise


def _ranges(size: int) -> Iterator[dict[str, str]]:
    """The arguments that select each part; none for a single one."""
    if size <= _PART_BYTES:
        yield {}
        return
    for first in range(0, size, _PART_BYTES):
        yield {"CopySourceRange": f"bytes={first}-{min(first + _PART_BYTES, size) - 1}"}

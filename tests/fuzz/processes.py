# SPDX-License-Identifier: Apache-2.0

"""Processes that a fuzzer starts beside its own."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
"""Lets glibc return each large block as soon as it is freed: so what a process has grown by is what it still uses."""
ROOT = Path(__file__).parent.parent.parent


@asynccontextmanager
async def running_process(*command: str, **options: Any) -> AsyncIterator[Process]:
    """Start a process with pipes to its input and output; it is killed if it still runs when the block is left."""
    env = os.environ | RETURNED
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, cwd=ROOT, env=env, **options)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process._transport.close()  # type: ignore[attr-defined]

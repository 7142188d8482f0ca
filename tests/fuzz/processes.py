# SPDX-License-Identifier: Apache-2.0

"""Processes that a fuzzer starts beside its own."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


@asynccontextmanager
async def running_process(*command: str, **options: Any) -> AsyncIterator[Process]:
    """Start a process with pipes to its input and output; it is killed if it still runs when the block is left."""
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, cwd=ROOT, **options)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process._transport.close()  # type: ignore[attr-defined]

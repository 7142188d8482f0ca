# SPDX-License-Identifier: Apache-2.0

"""Defines the fuzzer's targets, and runs their cases.

A case is one call with its own ``Random``, made of the target's name and the case's number. So a replay needs only
that number. Any exception fails a case; errors that the code under test may raise are caught inside.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import TypeVar

CASE_CPU_S_MAX = 10.0
"""An input has at most some 100 KiB, so this is a thousand times the time needed on a slow machine."""
_SPARE_BYTES = 128 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    """``case`` is one trial; ``about`` describes it in a few words.

    ``replay`` takes the bytes of the corpus for targets that decode bytes. ``slow`` targets take seconds for a case.
    """

    name: str
    about: str
    case: Callable[[Random], None]
    replay: Callable[[bytes], object] | None = None
    slow: bool = False


class CaseFailed(Exception):
    """A case has broken a property; the message says how to run it again, and the cause says which property."""

    def __init__(self, target: Target, seed: int) -> None:
        super().__init__(target.name, seed)
        self.seed = seed

    def __str__(self) -> str:
        name, seed = self.args
        return f"{name} failed; replay: python -m tests.fuzz --target {name} --seed {seed} --cases 1"


def run_case(target: Target, seed: int) -> None:
    """Run one case. Raises ``CaseFailed`` for any exception, or for too much processor time."""
    began_s = time.process_time()
    try:
        target.case(Random(f"{target.name}/{seed}"))
        taken_s = time.process_time() - began_s
        assert target.slow or taken_s < CASE_CPU_S_MAX, f"the case took {taken_s:.1f} s of the processor"
    except Exception as error:
        raise CaseFailed(target, seed) from error


def run_cases(target: Target, first: int, count: int) -> None:
    """Run ``count`` cases from ``first`` on, until one fails. The seed is printed so that a failing test shows it."""
    print(f"python -m tests.fuzz --target {target.name} --seed {first} --cases {count}")
    for seed in range(first, first + count):
        run_case(target, seed)


def within_memory(decode: Callable[[bytes], T], data: bytes, times: int) -> T:
    """Decode ``data``, which may take ``times`` its size, plus some KiB, at any moment (H62).

    If the first measurement exceeds this, there is a second: a table of the interpreter may have grown meanwhile.
    """
    bound = times * len(data) + _SPARE_BYTES
    if _peak_bytes(decode, data) > bound:
        peak = _peak_bytes(decode, data)
        assert peak <= bound, f"{len(data)} bytes took {peak}"
    return decode(data)


def _peak_bytes(decode: Callable[[bytes], object], data: bytes) -> int:
    tracemalloc.start()
    try:
        with suppress(Exception):  # the error comes again when the result is needed
            decode(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@contextmanager
def about_input(data: bytes) -> Iterator[None]:
    """Add the input bytes to an error in the block, ready for the corpus."""
    try:
        yield
    except Exception as error:
        shown = data.hex() if len(data) <= 4096 else f"{data[:4096].hex()}... ({len(data)} bytes)"
        error.add_note(f"input: {shown}")
        raise

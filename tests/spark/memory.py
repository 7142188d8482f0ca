# SPDX-License-Identifier: Apache-2.0

"""Which keys are in the memory of other processes: ``python -m tests.spark.memory`` looks, and has them itself.

Another process than the test's: one of those that are searched may be the test's own.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from protocol.wire.keys import MAY_HOLD, Holder, KeyRing, Purpose
from tests.spark.cluster import ROOT

SECRET = "secret"
CHUNK_BYTES = 1 << 24

Name = tuple[str, bytes]
"""A purpose's name, and an identity."""


def keys_in(pids: list[int], keys: KeyRing, names: dict[str, Name]) -> list[set[str]]:
    """Which of the named keys, and of ``SECRET``, are in the memory of each of the processes."""
    asked = {
        "extracted": keys._extracted.hex(),
        "names": {name: (purpose, identity.hex()) for name, (purpose, identity) in names.items()},
        "pids": pids,
    }
    command = [sys.executable, "-m", "tests.spark.memory"]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(asked), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [set(found) for found in json.loads(done.stdout)]


DERIVES = {Holder.DRIVER, Holder.CLIENT, Holder.SIDECAR, Holder.ATTACHED}
"""What has the secret in order to derive keys from it, each of them when it is needed."""


def check(found: set[str], holder: Holder, must: set[str], without: frozenset[str] = frozenset()) -> None:
    """``found`` has all of ``must``, and nothing but keys of the purposes that the table allows to the process.

    A process that derives none has all that the table allows to it, except for ``without``.
    """
    allowed = {purpose.name if purpose else SECRET for purpose, holders in MAY_HOLD.items() if holder in holders}
    purposes = {name.partition(" ")[0] for name in found}
    assert must <= found, f"the search must find what is there: {holder.value} has {sorted(found)}"
    assert purposes <= allowed, f"{holder.value} has {sorted(found)}"
    if holder not in DERIVES:
        assert purposes == allowed - without, f"the table allows more than {holder.value} has, {sorted(found)}"


def can_look() -> bool:
    """Whether this system lets a process of this user read the memory of another one."""
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    look = f"open('/proc/{other.pid}/mem', 'rb')"
    try:
        return subprocess.run([sys.executable, "-c", look], capture_output=True, check=False).returncode == 0
    finally:
        other.kill()
        other.communicate()


def children(pid: int) -> list[int]:
    """The processes below this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        below = int(process.name)
        if parent_of(below) == pid:
            found += [below, *children(below)]
    return found


def parent_of(pid: int) -> int | None:
    """The process that has started this one; None if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def command_of(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def notations(key: bytes) -> set[bytes]:
    """The key as it is, in hexadecimal digits, and in base64 wherever it begins in what is encoded."""
    found = {key, key.hex().encode(), key.hex().upper().encode()}
    for before in range(3):  # the first and the last digits depend on the bytes around the key
        whole = base64.b64encode(bytes(before) + key)
        found.add(whole[(before * 8 + 5) // 6 : (before + len(key)) * 8 // 6])
    return found


def _readable(pid: int) -> Iterator[tuple[int, int]]:
    """Where the process has memory that is in use."""
    start = end = 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) (r?)", line)
        if head is not None:
            start, end = (int(head[1], 16), int(head[2], 16)) if head[3] else (0, 0)
        elif line.startswith("Rss:") and line.split()[1] != "0" and end:
            yield start, end


class Sought:
    """All that is looked for, in one pass: to search for each of some sixty notations takes twice as long."""

    def __init__(self, wanted: dict[str, set[bytes]]) -> None:
        self.longest = max(len(one) for notations in wanted.values() for one in notations)
        self._names: dict[bytes, list[tuple[bytes, str]]] = {}  # by the first four bytes
        self._first, self._second = np.zeros(1 << 16, bool), np.zeros(1 << 16, bool)
        for name, notations in wanted.items():
            for one in notations:
                self._names.setdefault(one[:4], []).append((one, name))
                self._first[int.from_bytes(one[:2], "little")] = True
                self._second[int.from_bytes(one[2:4], "little")] = True

    def names_in(self, memory: bytes) -> set[str]:
        found: set[str] = set()
        if len(memory) < self.longest:
            return found
        for odd in (0, 1):
            pairs = np.frombuffer(memory, "<u2", (len(memory) - odd) // 2, odd)
            places = np.flatnonzero(self._first[pairs[:-1]])
            for place in places[self._second[pairs[places + 1]]]:
                at = odd + 2 * int(place)
                for one, name in self._names.get(memory[at : at + 4], ()):
                    if memory.startswith(one, at):
                        found.add(name)
        return found


def _search(pid: int, sought: Sought) -> set[str]:
    found: set[str] = set()
    try:
        descriptor = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except FileNotFoundError:  # it has ended since it was named, as an idle worker of Spark does
        return found
    try:
        for start, end in _readable(pid):
            for at in range(start, end, CHUNK_BYTES):
                try:
                    memory = os.pread(descriptor, min(CHUNK_BYTES + sought.longest, end - at), at)
                except OSError:  # a device, or no longer there
                    break
                found |= sought.names_in(memory)
    finally:
        os.close(descriptor)
    return found


def main() -> None:
    asked = json.load(sys.stdin)
    keys = KeyRing(bytes(16))
    keys._extracted = bytes.fromhex(asked["extracted"])
    wanted = {SECRET: notations(keys._extracted)}
    for name, (purpose, identity) in asked["names"].items():
        wanted[name] = notations(keys.key(Purpose[purpose], bytes.fromhex(identity)).secret)
    sought = Sought(wanted)
    print(json.dumps([sorted(_search(pid, sought)) for pid in asked["pids"]]))


if __name__ == "__main__":
    main()

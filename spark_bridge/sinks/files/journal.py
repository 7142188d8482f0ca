# SPDX-License-Identifier: Apache-2.0

"""Which files were published: distinguishes a file that a reader took from one that was lost.

A restored checkpoint may list a file that is neither in the staging directory nor in the readers' directory. Either it
was published before and a reader has taken it since, or it is lost, and its rows with it. Absence proves neither. So
before files are moved, a small file next to them, the *journal*, records that they will be.

It need not name each of them. The files of one writer are numbered and published in this order, so the highest number
is enough: any file with a lower number that is still listed anywhere was published before. (Files that were removed
from the ledger are never listed again.) So the journal has one number for each of the last ``WRITERS_MAX`` writers.

Each change writes a new journal and then deletes the old ones that it read or wrote itself. A crash in between leaves
several journals, which are read together. A broken one was being written when its driver died, and no file that only
this journal names was moved.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

from spark_bridge.sinks.files.directory import UNFINISHED, SinkDirectory
from spark_bridge.sinks.two_phase.parts import PartName

WRITERS_MAX = 10_000
_PREFIX, _SUFFIX = "published-", ".json"
_NUMBER = re.compile("[0-9]{1,20}")


def is_journal(name: str) -> bool:
    """Whether a file in the staging directory is a journal."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


class PublicationJournal:
    """The journal of one sink. All methods except ``covers`` block. For any thread, but one call at a time."""

    def __init__(self, directory: SinkDirectory) -> None:
        self._directory = directory
        self._highest: dict[str, int] = {}  # by writer, the last one that published last
        self._obsolete: list[str] = []  # names of journals whose content is in _highest
        self._number = 0

    def load(self, names: Iterable[str]) -> list[str]:
        """Read the journals among ``names``; returns the broken ones. Raises ``OSError``."""
        broken = []
        names = sorted(names)
        self._obsolete = [name for name in names if name.startswith(_PREFIX) and name.endswith(UNFINISHED)]
        for name in filter(is_journal, names):
            content = _parse(self._directory.read(name))
            if content is None:
                broken.append(name)
            else:
                for token, highest in content.items():
                    self._highest[token] = max(highest, self._highest.pop(token, -1))
                self._obsolete.append(name)
            number = name.removeprefix(_PREFIX).partition("-")[0]
            if _NUMBER.fullmatch(number):  # a longer one would make our own names too long for a file system
                self._number = max(self._number, int(number))
        return broken

    def covers(self, part: PartName) -> bool:
        """Whether the file was published, according to this journal."""
        return part.number <= self._highest.get(part.token, -1)

    def record(self, parts: Iterable[PartName]) -> None:
        """Record, durably, that these are about to be published. Raises ``OSError``; may be called again."""
        new: dict[str, int] = {}
        for part in parts:
            if not self.covers(part):
                new[part.token] = max(part.number, new.get(part.token, -1))
        if not new:
            return
        highest = {**{token: number for token, number in self._highest.items() if token not in new}, **new}
        highest = dict(list(highest.items())[-WRITERS_MAX:])
        name = f"{_PREFIX}{self._number + 1:020d}-{secrets.token_hex(4)}{_SUFFIX}"
        self._directory.write(name, json.dumps({"writers": highest}).encode())
        self._number += 1
        self._highest = highest
        obsolete, self._obsolete = self._obsolete, [name]
        for old in obsolete:
            try:
                self._directory.delete(old)
            except OSError:
                self._obsolete.append(old)  # harmless, because the new one contains it; the next record tries again


def _parse(data: bytes) -> dict[str, int] | None:
    try:
        content: Any = json.loads(data)
    except ValueError:
        return None
    match content:
        case {"writers": dict(writers)} if all(isinstance(number, int) for number in writers.values()):
            return writers
        case _:
            return None

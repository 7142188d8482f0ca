"""Which files were published: what tells a file that a reader took from one that was lost.

A restored checkpoint may list a file that lies neither in the staging directory nor where readers look. Either it was
published before, and a reader has taken it since; or it is lost, and its rows with it. Absence proves neither, so
before files are moved a small file beside them, the *journal*, says that they will be.

It need not name each of them. The files of one writer have numbers, and they are published in this order, so the
highest number is enough: whatever has a lower one and is still listed anywhere was published before. (Files that were
struck off are never listed again.) So the journal holds one number for each writer, the last ``WRITERS_MAX`` of them.

Each change writes a whole new journal and then deletes the old ones that it read or wrote itself. A crash in between
leaves several, which are read together. One that is not whole was being written when its driver died, and nothing that
only it names was moved.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from typing import Any

from spark_bridge.sink.directory import UNFINISHED, SinkDirectory
from spark_bridge.sink.files import PartName

__all__ = ["PublicationJournal", "is_journal"]

WRITERS_MAX = 10_000
_PREFIX, _SUFFIX = "published-", ".json"


def is_journal(name: str) -> bool:
    """Whether a file in the staging directory is a journal."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


class PublicationJournal:
    """Of one sink. Every method but ``covers`` blocks; one call at a time, from any thread."""

    def __init__(self, directory: SinkDirectory) -> None:
        self._directory = directory
        self._highest: dict[str, int] = {}  # by writer, the last one that published last
        self._obsolete: list[str] = []  # names of journals whose content is in _highest
        self._number = 0

    def load(self, names: Iterable[str]) -> list[str]:
        """Read the journals among ``names``; returns those that are not whole. Raises ``OSError``."""
        broken = []
        names = sorted(names)
        self._obsolete = [name for name in names if name.startswith(_PREFIX) and name.endswith(UNFINISHED)]
        for name in filter(is_journal, names):
            content = _parse(self._directory.read(name))
            if content is None:
                broken.append(name)
            else:
                self._merge(content)
                self._obsolete.append(name)
            number = name.removeprefix(_PREFIX).partition("-")[0]
            self._number = max(self._number, int(number) if number.isdecimal() else 0)
        return broken

    def covers(self, part: PartName) -> bool:
        """Whether the file was published by what this journal knows."""
        return part.number <= self._highest.get(part.token, -1)

    def record(self, parts: Iterable[PartName]) -> None:
        """These are about to be published. Durable when it returns; raises ``OSError``, and may be called again."""
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
                self._obsolete.append(old)  # it says nothing that the new one does not say; the next one tries again

    def _merge(self, content: dict[str, int]) -> None:
        for token, number in content.items():
            self._highest[token] = max(number, self._highest.pop(token, -1))


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

# SPDX-License-Identifier: Apache-2.0

"""Uses the symmetry of subtasks: states that differ only in subtask names have the same consequences, renamed.

So of two such states only the lesser one is explored. An exchange renames everything that identifies a subtask: numbers
by their type (``Subtask``, ``Task``, ``Slot``), payloads and names in texts by their form. Only two subtasks are
exchanged; a scope of one subtask has nothing to exchange.
"""

from __future__ import annotations

import re
from collections import deque
from enum import Enum
from typing import Any

from tests.exploration.freezing import IGNORED, fields_of
from tests.exploration.interning import Boxes, Links, Memo, Messages, Population
from tests.exploration.vocabulary import Slot, Subtask, Task

BY_SUBTASK = frozenset({"parts", "at_rest", "subtask_states"})
"""The machines' dicts that are keyed by subtasks as plain numbers."""

_UP = re.compile(rb"(\d+)>")
_DOWN = re.compile(rb"(\d+)\|")
_STATE = re.compile(rb"(\d+):(\d+:\d+:\d+:\d+(?::[\d.*,]*)?)$")
_COUNTS = re.compile(rb"(\d+)=(\d+:\d+:\d+)")
_NAME = re.compile(r"\[(\d+)\]#(\d+) \(task (\d+)\)")


class Exchange:
    """The exchange of two subtasks with ``attempts`` starts each."""

    def __init__(self, attempts: int) -> None:
        self.attempts = attempts

    def slot(self, slot: int) -> int:
        return slot + self.attempts if slot < self.attempts else slot - self.attempts

    def task(self, task: int) -> int:
        return self.slot(task - 1) + 1

    def value(self, value: Any) -> Any:
        """Return the value with the names exchanged; a new object if anything changes."""
        return self._value(value, {}, "")

    def _value(self, value: Any, met: dict[int, Any], name: str) -> Any:
        if isinstance(value, Subtask):
            return Subtask(1 - value)
        if isinstance(value, Task):
            return Task(self.task(value))
        if isinstance(value, Slot):
            return Slot(self.slot(value))
        if isinstance(value, bytes):
            return self._bytes(value)
        if isinstance(value, str):
            return _NAME.sub(self._name, value)
        if value is None or callable(value) or isinstance(value, int | float | Enum):
            return value
        if id(value) not in met:
            met[id(value)] = self._compound(value, met, name)
        return met[id(value)]

    def _compound(self, value: Any, met: dict[int, Any], name: str) -> Any:
        kind = type(value)
        if isinstance(value, dict):
            by_subtask = name in BY_SUBTASK
            keys = {key: 1 - key if by_subtask else self._value(key, met, "") for key in value}
            return {keys[key]: self._value(item, met, "") for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return kind(*[self._value(item, met, "") for item in value])
        if isinstance(value, tuple | list | deque | set | frozenset):
            return kind(self._value(item, met, "") for item in value)
        changed = met[id(value)] = object.__new__(kind)
        fields = {field: getattr(value, field) for field in fields_of(kind) if hasattr(value, field)}
        for field, item in (fields | getattr(value, "__dict__", {})).items():
            object.__setattr__(changed, field, item if field in IGNORED else self._value(item, met, field))
        return changed

    def _bytes(self, value: bytes) -> bytes:
        if _COUNTS.match(value):
            words = [b"%d=%s" % (1 - int(word[1]), word[2]) for word in _COUNTS.finditer(value)]
            return b" ".join(sorted(words))
        if found := _STATE.match(value):
            return b"%d:%s" % (self.task(int(found[1])), found[2])
        value = _UP.sub(lambda found: b"%d>" % (1 - int(found[1])), value)
        return _DOWN.sub(lambda found: b"%d|" % self.task(int(found[1])), value)

    def _name(self, found: re.Match[str]) -> str:
        return f"[{1 - int(found[1])}]#{found[2]} (task {self.task(int(found[3]))})"


class Exchanged:
    """The numbers of a world's things with the names exchanged, remembered."""

    def __init__(self, exchange: Exchange, messages: Messages, boxes: Boxes, links: Links) -> None:
        self.exchange = exchange
        self._links = links
        self.message: Memo[int, int] = Memo(lambda number: messages.number(exchange.value(messages.values[number])))
        self.box: Memo[int, int] = Memo(
            lambda number: boxes.number(tuple([self.message[message] for message in boxes.contents[number]]))
        )
        self.link: Memo[int, int] = Memo(self._exchange_link)
        self._parts: Memo[tuple[Population[Any], int], int] = Memo(
            lambda part: part[0].number(exchange.value(part[0].part(part[1])))
        )

    def part(self, population: Population[Any], number: int) -> int:
        return self._parts[population, number]

    def _exchange_link(self, number: int) -> int:
        link = self._links.values[number]
        apart = tuple(sorted(self.message[message] for message in link.apart))
        up, down, old = self.box[link.up], self.box[link.down], self.box[link.old]
        return self._links.number(link._replace(up=up, down=down, old=old, apart=apart))

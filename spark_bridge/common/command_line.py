# SPDX-License-Identifier: Apache-2.0

"""What the commands of ``headgate`` read and print.

Their options are checked as the arguments of functions are (H165): each is a ``type`` for argparse, which then prints
the option, what was given and what is expected. No text that they print makes a terminal do anything, and none is an
error.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, TextIO

from protocol.arguments import LABEL, PORT, SECONDS, TEXT, Rule, between, given
from protocol.describing import line
from spark_bridge.common.addresses import HOST

__all__ = ["cell", "host", "label", "open_port", "path", "port", "seconds", "server", "setting", "tell", "text"]

CELL_CHARS_MAX = 100


def _option(convert: Callable[[str], Any], rule: Rule) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not rule.accepts(value):
            shown = given("", text, str if convert is str else None)
            raise argparse.ArgumentTypeError(f"must be {rule.expected}, not {shown}")
        return value

    parse.__doc__ = f"Parse {rule.expected}."
    return parse


port = _option(int, PORT)
open_port = _option(int, between(1, 65_535, "a port from 1 to 65535"))
seconds = _option(float, SECONDS)
host = _option(str, HOST)
label = _option(str, LABEL)
text = _option(str, Rule("a text that is not empty", lambda value: bool(value) and TEXT.accepts(value)))
setting = _option(str, Rule("NAME=VALUE", lambda value: re.fullmatch(r"[^=\s\0]+=[^\0]*", value) is not None))
path = _option(str, Rule("a path that is not empty", lambda value: bool(value) and "\0" not in value))

_SERVER = re.compile(r"sc://[^/;\s\0]+/?(/;[^\s\0]*)?|local(\[[^\s\0]*\])?")
server = _option(str, Rule("a URL such as sc://HOST:15002, or local", lambda value: bool(_SERVER.fullmatch(value))))


def cell(text: str) -> str:
    """A text for a cell of a table: one long name must not widen all rows."""
    return line(text, CELL_CHARS_MAX)


def tell(stream: TextIO, text: str) -> None:
    """Write one line. What the terminal would obey, or the stream cannot encode, is escaped."""
    encoding = stream.encoding or "utf-8"
    stream.write(line(text, len(text)).encode(encoding, "backslashreplace").decode(encoding) + "\n")

# SPDX-License-Identifier: Apache-2.0

"""Check the options of ``python -m headgate`` as the arguments of functions are checked (H165).

Each of these is a ``type`` for argparse, which then prints the option, what was given and what is expected.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from protocol.arguments import LABEL, PORT, SECONDS, TEXT, Rule, between, given
from spark_bridge.common.addresses import HOST

__all__ = ["host", "label", "open_port", "path", "port", "seconds", "text"]


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
path = _option(str, Rule("a path that is not empty", lambda value: bool(value) and "\0" not in value))

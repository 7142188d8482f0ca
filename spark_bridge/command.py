# SPDX-License-Identifier: Apache-2.0

"""``headgate COMMAND``. Each command imports what it needs: ``checkpoints`` works without Spark and Java.

In no folder of this package, because its commands come from five of them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, NoReturn

from spark_bridge.connect import server_files
from spark_bridge.driver import check, examples, installation
from spark_bridge.observability import history
from spark_bridge.standalone import command, top
from spark_bridge.storage import inspection


class _Parser(argparse.ArgumentParser):
    """Shows no value of an unknown argument, because it may be a secret, and the text of an error gets into logs."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(map(_shown, unknown))}; --help lists those that there are")
        return parsed

    def error(self, message: str) -> NoReturn:
        near: list[str] = []
        if self._subparsers is not None and (found := _GIVEN.search(message)):
            commands = [name for one in self._subparsers._group_actions for name in one.choices or ()]
            near = get_close_matches(found[2].strip("'\""), commands, n=1)
        did_you_mean = f". Did you mean {self.prog} {near[0]}?" if near else ""
        super().error(_GIVEN.sub(r"\1 (not shown)", message) + did_you_mean)


_GIVEN = re.compile(
    r"(argument COMMAND: invalid choice:|ignored explicit argument) ('.*'|\".*\")(?=$| \(choose)", re.DOTALL
)
"""A value after an option that takes none, and one before the command, in the texts of argparse."""


def _shown(argument: str) -> str:
    name, equals, _ = argument.partition("=")
    return f"{name}{equals and '=...'}" if name.startswith("--") else "..."


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    # An option is written in full: --status-token X is not --status-token-file X.
    make: Any = partial(_Parser, allow_abbrev=False)
    made: argparse.ArgumentParser = make(prog="headgate", description="Headgate for Apache Spark.")
    commands = made.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=make)
    inspection.add_command(commands)
    history.add_command(commands)
    command.add_command(commands)
    top.add_command(commands)
    server_files.add_command(commands)
    installation.add_command(commands)
    check.add_command(commands)
    examples.add_command(commands)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; argparse ends the process for wrong usage and for ``--help``."""
    try:
        try:
            parsed = parser().parse_args(arguments)
            status: int = parsed.run(parsed)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # its reader has seen enough
        sys.stdout = None  # nothing is left to flush at exit
        return 0
    return status

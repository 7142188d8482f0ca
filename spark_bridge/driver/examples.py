# SPDX-License-Identifier: Apache-2.0

"""``headgate example``: the programs that come with Headgate are listed, printed and run."""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from protocol.describing import show
from spark_bridge.common import command_line

__all__ = ["add_command"]

_EXTRAS = re.compile(r"``headgate(?:\[([a-z,-]+)\])?``")
"""Where a docstring says what to install."""


def add_command(commands: Any) -> None:
    """Add ``example`` to argparse's subcommands."""
    parser = commands.add_parser(
        "example",
        help="list the examples, print one, or run it",
        description="Each example is one file, which also runs from wherever it is copied.",
        epilog="Exit status: that of the example with --run; otherwise 0, and 2 if there is no such example.",
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        type=command_line.text,
        help="the example to print; without it, all are listed",
    )
    parser.add_argument(
        "--run",
        dest="given",
        metavar="ARGUMENT",
        nargs=argparse.REMAINDER,
        help="run it with this Python instead, and with the arguments that follow",
    )
    parser.set_defaults(run=partial(_run, parser))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Print what was asked for, or become the example: it gets the signals, and its exit status is the caller's."""
    examples = _examples()
    name, given = arguments.name, arguments.given
    if not examples:
        parser.error("this installation has no examples: those of the wheel are there after pip install headgate")
    if name is None:
        if given is not None:
            parser.error("which example? Name it before --run, whose arguments are those of the example")
        sys.stdout.write(_listed(examples))
    elif name not in examples:
        near = get_close_matches(name, examples, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "headgate example lists those that there are"
        parser.error(f"there is no example {show(name)}: {hint}")
    elif given is None:
        sys.stdout.write(examples[name].read_text(encoding="utf-8"))
    else:
        sys.stdout.flush()
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # so that Spark's workers find the same packages
        os.execv(sys.executable, [sys.executable, str(examples[name]), *given])
    return 0


def _examples() -> dict[str, Path]:
    """Find the files of the wheel, or those of a clone, by their names."""
    root = Path(__file__).resolve().parent.parent.parent
    folder = next((one for one in (root / "headgate" / "examples", root / "examples") if one.is_dir()), root / "none")
    return {file.stem: file for file in sorted(folder.glob("[!_]*.py"))}


def _listed(examples: dict[str, Path]) -> str:
    """A table: the name of each, the extras that it needs, and the first line of its docstring."""
    rows = [("EXAMPLE", "NEEDS", "WHAT IT SHOWS")]
    for name, file in examples.items():
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        extras = _EXTRAS.search(text)
        needs = (extras[1] or "").replace(",", ", ") if extras else ""
        rows.append((name, needs, text.partition("\n")[0].replace("``", "")))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    table = "".join(f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}\n" for row in rows)
    return (
        f"{table}\nheadgate example NAME prints one, and headgate example NAME --run runs it.\n"
        "NEEDS names the extras to install: pip install 'headgate[pyspark]'\n"
    )

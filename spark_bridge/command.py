# SPDX-License-Identifier: Apache-2.0

"""``python -m headgate COMMAND``. Each command imports what it needs: ``checkpoints`` works without Spark and Java."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from spark_bridge import installation
from spark_bridge.connect import server_files
from spark_bridge.observability import history
from spark_bridge.standalone import command, top
from spark_bridge.storage import inspection


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    made = argparse.ArgumentParser(prog="python -m headgate", description="Headgate for Apache Spark.")
    commands = made.add_subparsers(title="commands", required=True, metavar="COMMAND")
    inspection.add_command(commands)
    history.add_command(commands)
    command.add_command(commands)
    top.add_command(commands)
    server_files.add_command(commands)
    installation.add_commands(commands)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; argparse ends the process for wrong usage and for ``--help``."""
    parsed = parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:  # its reader has seen enough
        sys.stdout = None  # nothing is left to flush at exit
        return 0
    return status

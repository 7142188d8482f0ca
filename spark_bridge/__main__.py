"""``python -m spark_bridge COMMAND``. None needs Java; the commands that look at checkpoints do without Spark, too."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from spark_bridge.standalone import command
from spark_bridge.storage import inspection


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; argparse ends the process for wrong usage and for ``--help``."""
    parser = argparse.ArgumentParser(prog="python -m spark_bridge", description="Headgate for Apache Spark.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    inspection.add_command(commands)
    command.add_command(commands)
    parsed = parser.parse_args(arguments)
    status: int = parsed.run(parsed)
    return status


if __name__ == "__main__":
    sys.exit(main())

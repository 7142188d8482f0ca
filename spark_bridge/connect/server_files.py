# SPDX-License-Identifier: Apache-2.0

"""Write what the operator of a Spark Connect server installs there: headgate connect-server FOLDER."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from protocol.wire.keys import KEY_BYTES
from spark_bridge.bridge.relay_jar import LISTENER_CLASS, jar_bytes
from spark_bridge.common import command_line

__all__ = ["add_command", "start_options"]

JAR = "headgate-relay.jar"
SECRETS = "secrets"


def add_command(commands: Any) -> None:
    """Add ``connect-server`` to argparse's subcommands."""
    parser = commands.add_parser(
        "connect-server",
        help="write the files that a Spark Connect server needs to serve Headgate's clients",
        description=__doc__,
    )
    parser.add_argument(
        "folder",
        type=command_line.path,
        metavar="FOLDER",
        help="for the relay's jar and the file of secrets; made if missing",
    )
    parser.add_argument(
        "--new-client",
        type=command_line.path,
        metavar="FILE",
        help="add a new secret to the file of secrets, and write it to FILE, which is for one client "
        "(Addresses.relay_secret_file); the server reads its file when it starts",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Exit status 0; 1, with one line, if a file cannot be written."""
    folder = Path(options.folder).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _put_jar(folder / JAR)
        if options.new_client is not None:
            add_client(folder / SECRETS, Path(options.new_client))
    except OSError as error:
        sys.stderr.write(f"connect-server: {error}\n")
        return 1
    sys.stdout.write("sbin/start-connect-server.sh \\\n  " + " \\\n  ".join(start_options(folder)) + "\n")
    return 0


def _put_jar(jar: Path) -> None:
    """Write the relay's jar whole, and give it its name then: a server that runs may be reading the one before."""
    written = jar.with_name(f".{jar.name}.{secrets.token_hex(8)}")
    try:
        with written.open("xb") as file:
            file.write(jar_bytes())
        written.replace(jar)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


def add_client(of_server: Path, of_client: Path) -> None:
    """Add a secret to the server's file, and write the client's. Both are for their owner only. Raises ``OSError``."""
    line = f"{secrets.token_hex(KEY_BYTES)}\n"
    _write(of_client, line, os.O_EXCL)
    try:
        _write(of_server, line, os.O_APPEND)
    except BaseException:  # the server does not know it
        of_client.unlink()
        raise


def _write(file: Path, text: str, how: int) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | how, 0o600)
    with os.fdopen(descriptor, "a", encoding="ascii") as opened:
        opened.write(text)


def start_options(folder: Path) -> list[str]:
    """The options with which the server is started."""
    return [
        f"--driver-class-path {folder / JAR}",
        f"--conf spark.extraListeners={LISTENER_CLASS}",
        f"--conf spark.headgate.relay.secretFile={folder / SECRETS}",
    ]

# SPDX-License-Identifier: Apache-2.0

"""Run the sidecar in a separate process: headgate sidecar MODULE:FACTORY."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.describing import show
from spark_bridge.common import command_line

if TYPE_CHECKING:
    from spark_bridge.driver.config import SidecarConfig
    from spark_bridge.server.server import ServerStartError
    from spark_bridge.standalone.process import SidecarProcess

__all__ = ["add_command"]

DEFAULT_PORT = 7650
PORT_MAX = 65_535
STATUS_TOKEN = "HEADGATE_STATUS_TOKEN"
EPILOG = """\
MODULE:FACTORY names an async function that coordinates the operators: async def factory(sidecar): await
sidecar.coordinate("words", WordCoordinator, parallelism=4, mode="streaming"). Drivers attach with
AttachedSidecar(spark, "HOST:PORT", secret_file=FILE). If it is killed and started again with the same arguments, it
continues from its storage, even while a job is running."""


def add_command(commands: Any) -> None:
    """Add ``sidecar`` to argparse's subcommands."""
    parser = commands.add_parser(
        "sidecar", help="run the sidecar in this process; drivers attach to it", description=__doc__, epilog=EPILOG
    )
    add, path, port = parser.add_argument, command_line.path, command_line.port
    add("factory", type=command_line.text, metavar="MODULE:FACTORY", help="what coordinates the operators, see below")
    add(
        "--secret-file",
        type=path,
        required=True,
        metavar="FILE",
        help="shared with the drivers; created if it does not exist",
    )
    add(
        "--host",
        type=command_line.host,
        default="127.0.0.1",
        help="to listen on, and for tasks to connect to (default: loopback)",
    )
    add("--port", type=port, default=DEFAULT_PORT, help=f"for drivers' requests (default: {DEFAULT_PORT})")
    add("--relay-port", type=port, metavar="PORT", help="for the driver's JVM (default: --port + 1)")
    add("--task-port", type=port, metavar="PORT", help="for the tasks (default: --port + 2)")
    add("--storage", type=path, metavar="URL", help="for checkpoints (default: in memory, lost with the process)")
    add(
        "--savepoint-root",
        type=path,
        action="append",
        metavar="URL",
        help="savepoints may be written here and below (default: --storage); may be given several times",
    )
    add(
        "--status-port", type=port, metavar="PORT", help="show the status over HTTP (default: off; 0 takes a free port)"
    )
    add(
        "--status-host",
        type=command_line.host,
        metavar="HOST",
        help="where the status is shown (default: loopback); any other address needs a token",
    )
    add(
        "--status-token-file",
        type=path,
        metavar="FILE",
        help=f"holds the token that those who look must show (default: the environment variable {STATUS_TOKEN}; none)",
    )
    add("--config", type=command_line.text, metavar="MODULE:OBJECT", help="a SidecarConfig, for all other settings")
    add(
        "--tls",
        action="store_true",
        help="encrypt every connection, with a certificate made from the secret; drivers pass tls=True to "
        "AttachedSidecar (needs pip install 'headgate[tls]' at both ends, nothing on executors)",
    )
    add(
        "--takeover",
        choices=("resume", "fail"),
        default="resume",
        help="for the running jobs of a sidecar that died: resume continues from the last checkpoint if Spark can run "
        "everything after it again, and fails the job otherwise; fail always fails it (default: resume)",
    )
    add(
        "--lost-after",
        type=command_line.seconds,
        default=60.0,
        metavar="SECONDS",
        help="give up a driver after this time (default: 60)",
    )
    add("--once", action="store_true", help="exit after the first application")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Exit status 0 after SIGINT, SIGTERM and the end of ``--once``; 1, with one line, if it cannot start."""
    from spark_bridge.common.errors import SidecarError

    sys.path.insert(0, "")  # the factory may be in the current folder, as for `python -m`
    try:
        process = make_process(options)
    except (SidecarError, ValueError) as error:
        complain(str(error))
        return 1
    return serve(process, once=options.once)


def make_process(options: argparse.Namespace) -> SidecarProcess:
    """Make the process from the arguments. Raises ``SidecarError`` or ``ValueError`` for invalid ones."""
    from protocol.wire.keys import KeyRing
    from spark_bridge.standalone.process import Ports, SidecarProcess
    from spark_bridge.standalone.secret_file import read_or_make_secret

    control = options.port
    relay = control + 1 if options.relay_port is None else options.relay_port
    tasks = control + 2 if options.task_port is None else options.task_port
    if max(relay, tasks) > PORT_MAX:
        raise ValueError(f"--port must be at most {PORT_MAX - 2} without --relay-port and --task-port, not {control}")
    factory = find(options.factory)
    if not callable(factory):
        raise ValueError(f"{options.factory} is not a function: {show(factory)}; name one as MODULE:FUNCTION")
    return SidecarProcess(
        factory,
        config_of(options, tasks),
        KeyRing(read_or_make_secret(options.secret_file)),
        options.host,
        Ports(control, relay, tasks),
        resume=options.takeover == "resume",
        lost_after_s=options.lost_after,
    )


def config_of(options: argparse.Namespace, task_port: int) -> SidecarConfig:
    """The given configuration, updated by the other arguments."""
    from spark_bridge.driver.config import SidecarConfig

    config = SidecarConfig() if options.config is None else find(options.config)
    if not isinstance(config, SidecarConfig):
        raise ValueError(f"{options.config} is not a SidecarConfig: {show(config)}; name one as MODULE:NAME")
    storage = config.storage if options.storage is None else options.storage
    details, watching = config.storage_details, config.watching
    return replace(
        config,
        host=config.host or options.host,
        port=task_port,
        storage=storage,
        tls=config.tls or options.tls,
        storage_details=replace(details, savepoint_roots=options.savepoint_root or details.savepoint_roots),
        watching=replace(
            watching,
            status_port=watching.status_port if options.status_port is None else options.status_port,
            status_host=options.status_host or watching.status_host,
            status_token=status_token(options.status_token_file) or watching.status_token,
        ),
    )


def status_token(file: str | None) -> str | None:
    """The token in ``file``, or in the environment. It is never an argument, which other users could see."""
    if file is None:
        return os.environ.get(STATUS_TOKEN)
    try:
        return Path(file).read_text("ascii").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the token from --status-token-file {file}: {error}") from error


def find(name: str) -> Any:
    """Import the object that ``module:object`` names. Raises ``ValueError`` if that fails."""
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise ValueError(f"invalid name {name!r}: expected MODULE:NAME, for example my_job.sidecar:factory")
    try:
        found = importlib.import_module(module)
        for step in path.split("."):
            found = getattr(found, step)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name!r} was not found: {error}. Correct MODULE:NAME, or start the command where the module can be "
            "imported"
        ) from error
    return found


def serve(process: SidecarProcess, *, once: bool) -> int:
    """Run the process on this thread until it ends, or a signal ends it; returns the exit status."""
    import anyio

    from actors.logs import ROOT, get_logger
    from spark_bridge.driver.loop import bounded_loop
    from spark_bridge.server.server import ServerStartError

    headgate = logging.getLogger(ROOT)
    if headgate.level == logging.NOTSET:  # the factory's module may have configured the log
        headgate.setLevel(logging.INFO)
    log = get_logger("headgate.process")

    async def main() -> int:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end_at_signals, tasks.cancel_scope)
            try:
                await process.run(once=once, started=tell_port)
            except ExceptionGroup as group:
                if (refused := group.subgroup(ServerStartError)) is None:
                    raise
                complain(f"{first_of(refused)} (--host, --port, --relay-port, --task-port, --status-port)")
                return 1
            finally:
                tasks.cancel_scope.cancel()
        return 0

    async def end_at_signals(scope: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                log.info("termination requested", signal=number.name)
                scope.cancel()

    return anyio.run(main, backend_options={"loop_factory": bounded_loop})


def tell_port(port: int) -> None:
    """Tell the program that has started this process that it is ready for requests."""
    sys.stdout.write(f"sidecar: listening on port {port}\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    command_line.tell(sys.stderr, f"sidecar: {text}")


def first_of(group: ExceptionGroup[ServerStartError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

# SPDX-License-Identifier: Apache-2.0

"""One job over several Spark Connect sessions, because servers end: each next sidecar goes on from the checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from actors.logs import get_logger
from protocol.arguments import WAIT, checked
from protocol.restart import DEFAULT_RESTART, RestartBackoff, RestartStrategy
from spark_bridge.common.errors import RestartsExhausted, ServerLost
from spark_bridge.connect.remote_session import RemoteSession
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.sidecar import Sidecar

__all__ = ["run_across_sessions"]

T = TypeVar("T")
log = get_logger("headgate.connect")

LOOK_PAUSE_S = 0.5


@checked(back_within_s=WAIT)
def run_across_sessions(
    new_session: Callable[[], Any],
    job: Callable[[Any, Sidecar], T],
    config: SidecarConfig | None = None,
    *,
    restart: RestartStrategy = DEFAULT_RESTART,
    back_within_s: float = 600.0,
) -> T:
    """Call ``job(session, sidecar)``, and again with a new session and sidecar after each loss of the server.

    Returns what ``job`` returns. ``new_session`` makes a Spark Connect session, such as
    ``SparkSession.builder.remote(url).create``; this stops it again. ``job`` coordinates the operators and runs its
    actions with ``sidecar.run``. Nothing of a lost session can be used again, so it makes its handles and DataFrames
    anew. Streaming operators then continue from their last completed checkpoint in ``config.storage``; without a
    storage, they start from the beginning, as batch operators do.

    ``restart`` says how many losses are allowed, and the delay after each. A server that cannot be reached is waited
    for ``back_within_s`` seconds, which counts as one loss. Blocks the calling thread, on which ``job`` is called.

    Raises ``RestartsExhausted``, with the last ``ServerLost`` chained, and whatever ``job``, ``new_session`` and
    entering a ``Sidecar`` raise for another reason than a lost server.
    """
    backoff = RestartBackoff(restart)
    while True:
        backoff.begun(time.monotonic())
        try:
            return _run_in_one_session(new_session(), job, config or SidecarConfig(), back_within_s)
        except ServerLost as error:
            delay_s = backoff.failed(time.monotonic())
            restarts = backoff.restarts
            if delay_s is None:
                raise RestartsExhausted(
                    f"the Spark Connect server was lost again after {restarts} new sessions, and {restart} allows no "
                    f"more: {error}. Look into the server's log for why it ended, or allow more"
                ) from error
            log.warning("server lost, new session scheduled", delay_s=delay_s, restart=restarts, error=str(error))
        time.sleep(delay_s)


def _run_in_one_session(
    session: Any, job: Callable[[Any, Sidecar], T], config: SidecarConfig, back_within_s: float
) -> T:
    """Raises ``ServerLost`` for each error whose reason is that the server, or the session there, is gone."""
    remote = None  # from here on, whatever fails, the session is stopped
    try:
        remote = RemoteSession(session)
        sidecar = Sidecar(session, config)
        _wait_for_server(remote, back_within_s)
        with sidecar:
            try:
                return job(session, sidecar)
            except Exception as error:
                if (lost := sidecar.lost) is not None and error is not lost:
                    raise lost from error
                raise
    except ServerLost:
        raise
    except Exception as error:
        if remote is not None and (why := remote.why_unreachable()) is not None:
            raise ServerLost(
                f"the Spark Connect server is gone: {why}. Make a new session; run_across_sessions() does that by "
                "itself"
            ) from error
        raise
    finally:
        _stop(session, remote)


def _wait_for_server(remote: RemoteSession, within_s: float) -> None:
    """PySpark's own retries would wait longer and longer, up to a minute, for a server that is back."""
    end = time.monotonic() + within_s
    while (why := remote.why_unreachable()) is not None:
        if time.monotonic() > end:
            raise ServerLost(
                f"the Spark Connect server has not come back within {within_s:g} s (back_within_s): {why}. Start "
                "it again, or wait longer with a higher back_within_s"
            )
        time.sleep(LOOK_PAUSE_S)


def _stop(session: Any, remote: RemoteSession | None) -> None:
    """A server that is gone is not told."""
    if remote is not None and remote.why_unreachable() is not None:
        remote.watch_retries()
        remote.stop_retries()
    with suppress(Exception):
        session.stop()

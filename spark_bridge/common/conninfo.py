# SPDX-License-Identifier: Apache-2.0

"""How sinks and sources connect to PostgreSQL, with errors in which nothing of a password is."""

from __future__ import annotations

import os
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from spark_bridge.common.secret_texts import Secrets, check_login
from spark_bridge.common.systems import POSTGRES_LEAST

__all__ = ["connect", "parameters"]

CONNECT_TIMEOUT_S = 10
"""For each address of the server, until the login is complete; psycopg waits 130 s by default."""


def parameters(conninfo: str, error: type[ValueError] = ValueError) -> dict[str, Any]:
    """The parameters in a connection string or URL. Raises ``error`` if it is not one, without any part of it."""
    if conninfo.startswith(("postgresql://", "postgres://")):
        check_login(conninfo, "conninfo", error)
    try:
        return conninfo_to_dict(conninfo)
    except psycopg.ProgrammingError:
        pass  # its text has what could not be understood, which may be the end of a password
    raise error(
        "cannot understand conninfo: write 'host=db dbname=shop user=me', with quotes around a value that has spaces "
        "('it\\'s'), or a URL that begins with postgresql://, with %40 for @ and so on"
    )


def connect(conninfo: str, *, autocommit: bool = False, **options: Any) -> psycopg.Connection:
    """Open a connection.

    Nothing may be left in the session, neither a prepared statement nor a setting, because a pooler such as PgBouncer
    may give it to others after each transaction.

    Without a ``connect_timeout`` in ``conninfo`` or in the variable ``PGCONNECT_TIMEOUT``, a server that does not
    answer within ``CONNECT_TIMEOUT_S`` is an error.

    Raises ``OperationalError``, or ``ValueError`` if ``conninfo`` cannot be understood, or the server is too old.
    """
    given = parameters(conninfo)
    if not (given.get("connect_timeout") or os.environ.get("PGCONNECT_TIMEOUT")):
        options["connect_timeout"] = CONNECT_TIMEOUT_S
    secrets = Secrets("conninfo", given)
    try:
        with secrets.kept():
            connection = psycopg.connect(
                conninfo,
                autocommit=autocommit,
                application_name="headgate",
                client_encoding="utf8",
                prepare_threshold=None,
                **options,
            )
    except psycopg.OperationalError as error:
        if remedy := _remedy(error, secrets.shown(_place(given))):
            text = str(error).strip()
            error.args = (f"{text}{'' if text.endswith('?') else '.'} {remedy}",)
        raise
    if connection.info.server_version < POSTGRES_LEAST * 10_000:
        version = connection.info.parameter_status("server_version")
        connection.close()
        raise ValueError(f"the server is PostgreSQL {version}: use one of version {POSTGRES_LEAST} or later")
    return connection


def _place(given: dict[str, Any]) -> str:
    """The host and port that psycopg connects to, as far as they are known here."""
    host = given.get("hostaddr") or given.get("host") or os.environ.get("PGHOST") or "the local socket"
    return f"{host}, port {given.get('port') or os.environ.get('PGPORT') or 5432}"


def _remedy(error: psycopg.OperationalError, place: str) -> str:
    """What to do if no server has answered, as the end of the error's text; empty for an error of the server."""
    if isinstance(error, psycopg.errors.ConnectionTimeout):
        return (
            f"PostgreSQL at {place} did not answer in time: check that a PostgreSQL server runs there and answers, "
            "and that host and port are right, or set a longer connect_timeout"
        )
    if "refused" in str(error):
        return f"PostgreSQL at {place} is not running: start it, or correct host and port"
    return ""

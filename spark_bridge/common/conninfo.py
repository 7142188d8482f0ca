# SPDX-License-Identifier: Apache-2.0

"""How sinks and sources connect to PostgreSQL, with errors in which nothing of a password is."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from spark_bridge.common.secret_texts import Secrets, check_login
from spark_bridge.common.systems import POSTGRES_LEAST

__all__ = ["connect", "parameters"]


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

    Raises ``OperationalError``, or ``ValueError`` if ``conninfo`` cannot be understood, or the server is too old.
    """
    with Secrets("conninfo", parameters(conninfo)).kept():
        connection = psycopg.connect(
            conninfo,
            autocommit=autocommit,
            application_name="headgate",
            client_encoding="utf8",
            prepare_threshold=None,
            **options,
        )
    if connection.info.server_version < POSTGRES_LEAST * 10_000:
        version = connection.info.parameter_status("server_version")
        connection.close()
        raise ValueError(f"the server is PostgreSQL {version}: use one of version {POSTGRES_LEAST} or later")
    return connection

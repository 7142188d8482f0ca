# SPDX-License-Identifier: Apache-2.0

"""Keeps passwords out of the errors of other packages' clients.

A client's parser puts into its error what it cannot read, so a password with a space, a quote or an ``@`` in it appears
there in part. Nobody can list all the ways. So the text of such an error is shown only if nothing of a secret is in it,
not even four characters in a row, in any of the notations below; otherwise only its type is, with the SQLSTATE. The
error that was left out is not chained either, because a traceback would show it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from protocol.describing import show, text_of, type_name
from protocol.errors import HeadgateError
from protocol.secret_names import SECRET_NAMES, unquoted

__all__ = ["Secrets", "check_login", "check_no_password"]

PART_CHARS = 4
"""Fewer characters of a secret in a row appear by accident, or tell little."""

_HARMLESS = re.compile(
    r"(^|[._-])(anon|application_name|client|connect_timeout|database|db|dbname|encoding|endpoint|endpoint_override|"
    r"endpoint_url|group|host|hostaddr|hostname|level|mechanisms?|mode|name|options|passfile|path|port|project|protocol|"
    r"region|region_name|scheme|servers|service|sslcert|sslkey|sslmode|sslrootcert|target_session_attrs|timeout|type|"
    r"uri|url|user|username|warehouse)$"
)
"""How the names of settings end whose values are not secret, although a text in them may have a password in it."""
_WORDS = frozenset({"", "true", "false", "none", "null", "yes", "no"})
_LOGIN = re.compile(r"(?:://|^[A-Za-z][\w+.-]*:(?!//))([^:@/?#]*):?(.*)@", re.DOTALL)
"""Also without the slashes; to the last @, because a password may have one in it."""
_PASSWORD = re.compile(
    rf"(?i){SECRET_NAMES}\s*=\s*(.*)", re.DOTALL
)  # to the end, because where it ends is what parsers disagree about
_SECRET_PARAMETER = re.compile(rf"(?is)^[a-z][\w+.:-]*:/.*?[?&;#]((?:[\w.-]*[._-])?{SECRET_NAMES})=[^&#;]")
"""In the query or the fragment of a URL. In a path without a scheme, ``?`` may stand for any character."""


def _secrets_in(setting: object, name: str = "password") -> Iterator[str]:
    if isinstance(setting, Mapping):
        for key, value in setting.items():
            yield from _secrets_in(value, str(key))
    elif isinstance(setting, int) and setting > 999 and not _HARMLESS.search(name.lower()):
        yield str(setting)
    elif isinstance(setting, bytes):
        yield from _secrets_in(setting.decode("latin-1"), name)
    elif isinstance(setting, str):
        if setting.lower() not in _WORDS and not _HARMLESS.search(name.lower()):
            yield setting
        else:
            yield from _secrets_in_text(setting)
    elif isinstance(setting, Iterable):
        for value in setting:
            yield from _secrets_in(value, name)


def _secrets_in_text(text: str) -> Iterator[str]:
    """What may be a password in a URL or a connection string."""
    login = _LOGIN.search(text)
    if login is not None:
        yield login[2] or login[1]
    password = _PASSWORD.search(text if login is None else text[login.end() :])
    if password is not None:
        yield password[1]


def _notations(secret: str) -> Iterator[str]:
    for one in (secret, unquote(secret), unquote_plus(secret)):
        escaped = one.encode("unicode_escape").decode("ascii")
        yield from (
            one,
            one.replace("\\", ""),
            quote(one, "", errors="surrogatepass"),
            quote_plus(one, errors="surrogatepass"),
            repr(one)[1:-1],
            escaped,
        )


class Secrets:
    """What must not appear of ``setting``, which messages call ``name``. Immutable, for any thread.

    In a mapping of options, each value is a secret unless its name says otherwise, such as ``endpoint_url``. In a URL
    or a connection string, the password is.
    """

    def __init__(self, name: str, setting: object) -> None:
        self._name = name
        self._left_out = f"(text left out, because a part of {name} may be in it)"
        found = _secrets_in_text(setting) if isinstance(setting, str) else _secrets_in(setting)
        parts: set[str] = set()
        for secret in found:
            for one in _notations(secret):
                size = min(PART_CHARS, len(one))
                parts.update(one[at : at + size] for at in range(len(one) - size + 1))
        self._parts = frozenset(parts - {""})

    def __repr__(self) -> str:
        return f"Secrets({self._name!r})"

    def are_in(self, text: str) -> bool:
        """Whether any part of a secret is in the text."""
        readings = (text, unquote(text), text.replace("\\", ""))
        return any(part in reading for reading in readings for part in self._parts)

    def guarding(self, used: Any) -> Any:
        """Return what behaves as ``used``, a filesystem, a file or a function, but with ``kept`` around each call."""
        return _Guarded(used, self) if self._parts else used

    def shown(self, text: str) -> str:
        """The text if it may be shown, otherwise that it is left out."""
        return self._left_out if self.are_in(text) else text

    def describe(self, error: BaseException) -> str:
        """The text of an error if it may be shown, otherwise what kind of error it is."""
        if not self._is_in_chain(error):
            return text_of(error).strip()
        state = getattr(error, "sqlstate", None)
        kind = type_name(error) + (f", SQLSTATE {state}" if state else "")
        return f"{kind} {self._left_out}"

    @contextmanager
    def kept(
        self,
        errors: type[Exception] | tuple[type[Exception], ...] = Exception,
        make: Callable[[str], Exception] | None = None,
        passing: tuple[type[Exception], ...] = (),
        typed: bool = False,
    ) -> Iterator[None]:
        """Within the block, raise ``make(text)`` for each of ``errors``; the cause is chained if it may be shown.

        Without ``make``, an error that may be shown is raised as it is, and of another one its type. Headgate's errors
        pass, and so do those of ``passing``. ``typed``: the text begins with the type.
        """
        try:
            yield
        except errors as error:
            if isinstance(error, (HeadgateError, *passing)):
                raise
            hides = self._is_in_chain(error)
            if make is None and not hides:
                raise
            text = self.describe(error)
            if typed and not hides:
                text = f"{type_name(error)}: {text}"
            made = _same_kind(error, text) if make is None else make(text)
            if not hides:
                raise made from error
            try:
                raise made from None
            finally:
                made.__context__ = None  # some print that, too

    def _is_in_chain(self, error: BaseException | None) -> bool:
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            texts = [text_of(error), repr(error.args), *getattr(error, "__notes__", ())]
            if any(map(self.are_in, texts)):
                return True
            error = error.__cause__ or error.__context__
        return False


class _Guarded:
    """A filesystem, an open file or a function. What it opens is guarded, too."""

    def __init__(self, used: Any, secrets: Secrets) -> None:
        self._used = used
        self._secrets = secrets

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself asks for, such as how to copy it
            raise AttributeError(name)
        with self._secrets.kept():
            found = getattr(self._used, name)
        return _Guarded(found, self._secrets) if callable(found) else found

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self._secrets.kept():
            result = self._used(*args, **options)
        return _Guarded(result, self._secrets) if hasattr(result, "readable") else result


def _same_kind(error: Exception, text: str) -> Exception:
    """An error of the same type, so that those who expect it still get it; of its nearest base if that needs more."""
    for kind in type(error).__mro__:
        if kind is Exception or not issubclass(kind, Exception):
            break
        try:
            return kind(text)
        except Exception:
            continue
    return RuntimeError(text)


def check_no_password(url: str, name: str, instead: str, error: type[Exception] = ValueError) -> None:
    """Raise ``error`` for a URL with a password or token in it: URLs of files are in errors, logs and the status."""
    scheme, slashes, rest = url.partition("://")
    if _has_password(url) or _has_password(f"{scheme}{slashes}{unquoted(rest[: _end_of_place(rest)])}"):
        raise error(f"{name} must not have a password in it, because it is shown in errors and logs: {instead}")
    parameter = _SECRET_PARAMETER.search(unquoted(url))
    if parameter is not None:
        raise error(
            f"{name} must not have the parameter {show(parameter[1], 80)} in it, because it is shown in errors and "
            f"logs: {instead}"
        )


def _has_password(url: str) -> bool:
    login = _LOGIN.search(url)
    return login is not None and ":" in unquoted(url[login.start(1) : login.end()])


def check_login(url: str, name: str, error: type[Exception] = ValueError) -> None:
    """Raise ``error`` for a URL of which a parser would take a part of the password for the host."""
    rest = url.partition("://")[2]
    if rest.count("@") > rest[: _end_of_place(rest)].count("@") or rest.count("@") > 1:
        raise error(
            f"{name} must have no @ but the one before the host: in a user, a password or a parameter, write @ as %40, "
            "/ as %2F, ? as %3F and # as %23"
        )


def _end_of_place(rest: str) -> int:
    found = re.search(r"[/?#]", rest)
    return len(rest) if found is None else found.start()

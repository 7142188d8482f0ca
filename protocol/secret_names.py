# SPDX-License-Identifier: Apache-2.0

"""What the names of secrets look like, and which texts may contain a secret (H76)."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

SECRET_WORDS: Final = ("credential", "dsn", "pass", "pwd", "secret", "token")
"""What is in the name of an argument or a setting that is a secret, misspelt ones among them."""
_OTHERS = r"signature|authorization|(?:(?<![a-z])|(?<=\\[nrt]))(?:auth|bearer|cookie|jwt|pw|sas|sig)"
SECRET_NAMES: Final = rf"(?:(?:{'|'.join(SECRET_WORDS)})\w*|\w*token|\w*key(?:_?id)?|{_OTHERS})"
"""A pattern for the ends of such names in texts and URLs, where ``key`` is one, too. Use it with ``(?i)``."""
PEM: Final = "-----BEGIN"
"""How the content of a key or certificate in PEM form begins."""
_NAME_AND_VALUE = re.compile(
    rf"(?i)(?:(?:{'|'.join(SECRET_WORDS)})\w*+|key(?:_?id)?|{_OTHERS})[\"')\]]*+(?:[\s=:,]|\\+[ntr])|{PEM}"
)
"""One of ``SECRET_NAMES`` and a value behind it, in whichever notation; or a PEM text.

Where a name begins does not matter here. With the ``\\w*`` before it, and without possessive quantifiers, a word of
4,096 characters takes half a second, and the event loop stands still for as long.
"""
_QUOTED_TIMES_MAX = 5


def unquoted(text: str) -> str:
    """The text without percent-encoding, also if it was encoded several times."""
    for _ in range(_QUOTED_TIMES_MAX):
        text, before = unquote(text), text
        if text == before:
            break
    return text


def may_have_secret(text: str) -> bool:
    """Whether a text names a secret and has something behind it, or has a login or a PEM text in it."""
    plain = unquoted(text)
    return _names_one(text) or (plain != text and _names_one(plain))


def _names_one(text: str) -> bool:
    has_login = -1 < text.find(":") < text.rfind("@")
    return has_login or _NAME_AND_VALUE.search(text) is not None

# SPDX-License-Identifier: Apache-2.0

"""What the names of secrets look like, and which texts may contain a secret (H76)."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

SECRET_WORDS: Final = ("credential", "dsn", "pass", "pwd", "secret", "token")
"""What is in the name of an argument or a setting that is a secret, misspelt ones among them."""
SECRET_NAMES: Final = (
    rf"(?:(?:{'|'.join(SECRET_WORDS)})\w*|\w*token|\w*key(?:_?id)?|signature|authorization|"
    r"(?:(?<![a-z])|(?<=\\[nrt]))(?:auth|bearer|cookie|jwt|pw|sas|sig))"
)
"""A pattern for the ends of such names in texts and URLs, where ``key`` is one, too. Use it with ``(?i)``."""
PEM: Final = "-----BEGIN"
"""How the content of a key or certificate in PEM form begins."""
_MAY_HAVE_SECRET = re.compile(rf"(?is){SECRET_NAMES}[\"')\]]*(?:[\s=:,]|\\+[ntr])|{PEM}|:.*@")
"""A name and a value behind it, in whichever notation; a PEM text; a login."""
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
    return _MAY_HAVE_SECRET.search(text) is not None or _MAY_HAVE_SECRET.search(unquoted(text)) is not None

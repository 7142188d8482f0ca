# SPDX-License-Identifier: Apache-2.0

"""Mutants: a value in the wrong place, or a file or a text that is not what it should be."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

MISPLACED = catalogue(
    r"""
a-secret-in-the-wrong-place-is-shown [found; H76]
  Settings with a password in them, given for another argument, are in the error.
  @ protocol.arguments:given
  - may_have_secret(shown)
  + False
a-token-in-place-of-a-number-is-shown [found; H76]
  A long text where none is expected is in the error.
  @ protocol.arguments:given
  - len(value) > _MISPLACED_CHARS_MAX
  + False
a-quoted-login-is-accepted [found; H76]
  The URL of files may have a login whose colon is percent-encoded.
  @ spark_bridge.subtask.secret_texts:_has_password
  - unquoted(url[login.start(1) : login.end()])
  + url[login.start(1) : login.end()]
a-key-is-taken-for-its-file [found; H76]
  The text of a private key is accepted in place of the path of its file, and shown.
  @ protocol.arguments:_is_path
  - "-----BEGIN" not in value
  + True
"""
)

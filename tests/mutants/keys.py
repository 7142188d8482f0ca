# SPDX-License-Identifier: Apache-2.0

"""Mutants: a key or a password is where it must not be."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

KEYS = catalogue(
    """
a-part-of-a-password-is-shown [found; H76]
  An error of a client is shown although a part of a password is in it.
  @ spark_bridge.subtask.secret_texts:Secrets.are_in
  - any(part in reading for reading in readings for part in self._parts)
  + False
a-traceback-shows-the-password [new; H76]
  An error whose text is left out is chained, so a traceback shows it.
  @ spark_bridge.subtask.secret_texts:Secrets.kept
  - made.__context__ = None
  + made.__context__ = error
"""
)

# SPDX-License-Identifier: Apache-2.0

"""Mutants: a value in the wrong place, or a file or a text that is not what it should be."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

MISPLACED = catalogue(
    r"""
a-secret-in-the-wrong-place-is-shown [found; H76]
  Settings with a password in them, given for another argument, are in the error.
  @ protocol.arguments:given
  ~ may_have_secret(shown) => False
a-token-in-place-of-a-number-is-shown [found; H76]
  A long text where none is expected is in the error.
  @ protocol.arguments:given
  ~ kind.__len__(value) > _MISPLACED_CHARS_MAX => False
a-quoted-login-is-accepted [found; H76]
  The URL of files may have a login whose colon is percent-encoded.
  @ spark_bridge.common.secret_texts:_has_password
  ~ unquoted(url[login.start(1) : login.end()]) => url[login.start(1) : login.end()]
  By: tests/spark_bridge/test_secret_texts.py::test_a_login_in_a_url_is_refused_in_every_notation
a-key-is-taken-for-its-file [found; H76]
  The text of a private key is accepted in place of the path of its file, and shown.
  @ protocol.arguments:_is_path
  ~ PEM not in value => True
a-pipe-is-waited-for [found; H157]
  A pipe or a device in place of a file is opened and read.
  @ spark_bridge.common.regular_files:open_regular
  ~ not stat.S_ISREG(os.fstat(descriptor).st_mode) => False
  By: tests/spark_bridge/test_standalone.py::test_what_is_not_a_regular_file_is_neither_waited_for_nor_read_without_end
a-long-name-widens-all-rows [found; H157]
  A table is as wide as its longest name.
  @ spark_bridge.common.command_line:cell
  - line(text, CELL_CHARS_MAX)
  + line(text)
a-log-is-kept-whole [found; H157]
  Notes with long texts fill the memory of the command that shows them.
  @ spark_bridge.observability.history:read_timeline
  ~ len(entries) > ENTRIES_MAX or kept_bytes > KEPT_BYTES_MAX => len(entries) > ENTRIES_MAX
an-answer-commands-the-terminal [found; H156]
  The text of a failed request has what a terminal obeys in it.
  @ protocol.errors:RequestFailed.__init__
  ~ super().__init__(lines(text)) => super().__init__(text)
a-value-commands-the-terminal [found; H156]
  What the repr of a user's class returns is shown as it is.
  @ protocol.describing:show
  - line(_plain(value, partial(_repr, chars_max=chars_max), "__repr__"))
  + _plain(value, partial(_repr, chars_max=chars_max), "__repr__")
an-event-is-described-as-a-whole [found; H157]
  What a peer has sent is asked for its text to the end, however much it is.
  @ protocol.describing:_repr
  - chars > chars_max
  + False
the-place-of-a-scalar-is-not-named [found; H21]
  An integer that an event cannot have is not found.
  @ protocol.wire.events:_odd_scalar
  ~ kind is int and not -(2**63) <= value < 2**64 => False
"""
)

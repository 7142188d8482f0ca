# SPDX-License-Identifier: Apache-2.0

"""Mutants: a peer makes the process keep what it should not, moves a deadline, or takes the place of another."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

PEERS = catalogue(
    """
encryption-has-no-end [found; H157]
  What comes after a peer has ended its encryption is kept, and never freed.
  @ spark_bridge.common.tls:TlsStream._receive
  - self.ended = True  # nothing, instead of an error, is the peer's close_notify
an-ended-peer-stays-connected [found; H157]
  A peer that has ended its encryption remains connected.
  @ spark_bridge.server.connection:Connection._end_if_said
  ~ ended = self._tls is not None and self._tls.ended => ended = False
an-ended-peer-is-not-heard-to-its-end [new; H157]
  What a peer has said before it ended its encryption is lost if it waits for its share.
  @ spark_bridge.server.connection:Connection._end_if_said
  ~ if ended and not self._backlog and not => if ended and not
records-hold-what-they-like [found; H157]
  A peer floods with new keys, each of which the other end answers and pays for.
  @ spark_bridge.common.tls:TlsStream._receive
  ~ if self._hidden > HIDDEN_BYTES_MAX => if self._hidden > 2**40
a-flood-of-records-is-taken-whole [found; H157]
  What the records of one read hold is checked only when all of them are decrypted.
  @ spark_bridge.common.tls:TlsStream.receive
  T if len(data) <= PORTION_BYTES:
a-large-record-counts-as-hidden [new; H157]
  A record that has come in part is taken for a flood.
  @ spark_bridge.common.tls:TlsStream._receive
  ~ (self._last if self._incomplete else 0): => 0:
a-handshake-has-no-end [found; H157]
  A handshake may be as long as a peer claims.
  @ spark_bridge.common.tls:TlsStream._receive
  F if self._left < 0:
a-client-reads-on-after-the-end [found; H157]
  A task waits for a sidecar that has ended its encryption.
  @ spark_bridge.subtask.connection:Connection._decrypt
  F if tls.ended and not data:
a-full-server-refuses-the-newest [found; H157]
  An operator that opens as many connections as there may be keeps out all others.
  @ spark_bridge.server.server:AuthenticatedServer._drop_one_too_many
  ~ most = max(self._authenticated, key=lambda one: (self._authenticated[one], one == newcomer)) => most = newcomer
peers-without-a-purpose-push-out-others [found; H157]
  An operator's connections that have yet to identify themselves push out another one's.
  @ spark_bridge.server.server:AuthenticatedServer._keep_within_bound
  ~ if one.authenticated_as == most => if True
connections-that-have-ended-count [new; H157]
  A connection counts for the limit after its end.
  @ spark_bridge.server.server:AuthenticatedServer._state_changed
  F if connection.authenticated_as:
cookies-are-parsed [found; H157]
  The cookie of a browser is not found behind another one.
  @ spark_bridge.observability.status_server:StatusServer.accepts
  ~ f"; {cookie}".partition(f"; {self.cookie_name}=") => cookie.partition(f"{self.cookie_name}=")
strangers-fill-the-status-port [found; H158]
  Idle connections keep out a reader of the status.
  @ spark_bridge.observability.status_server:StatusServer._take_in
  T if oldest is None:
an-answer-is-pushed-out [new; H158]
  A reader loses its place at the status port while its request is answered.
  @ spark_bridge.observability.status_server:StatusServer.keep
  - self._connections[connection] = keeps or self._token is not None
a-token-keeps-no-place [new; H158]
  A reader that has shown the token loses its place while it reads.
  @ spark_bridge.observability.status_server:StatusServer.keep
  ~ keeps or self._token is not None => keeps
a-byte-keeps-a-place [found; H158]
  A peer that has its answer keeps its place by a byte now and then.
  @ spark_bridge.observability.status_server:_Conversation.finish
  ~ self.connection.settimeout(left_s) => deadline = time.monotonic() + LINGER_S
a-frame-may-grow-for-ever [found; H158]
  A frame has as many minutes as mebibytes.
  @ spark_bridge.server.connection:IncompleteFrames._why_too_slow
  - if frame.checks >= TIMEOUTS_MAX:
  + if False:
a-drivers-deadline-moves-with-each-byte [found; H158]
  A driver waits for as long as its peer sends a byte now and then.
  @ spark_bridge.common.control:_allow_until
  ~ connection.settimeout(left_s) => connection.settimeout(5.0)
  @ spark_bridge.common.control:_allow_until
  F if left_s <= 0:
a-task-has-no-deadline-while-it-reads [found; H158]
  A task that always has something to read never looks at its deadline.
  @ spark_bridge.subtask.connection:_wait
  F if time.monotonic() >= deadline:
"""
)

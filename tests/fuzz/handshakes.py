# SPDX-License-Identifier: Apache-2.0

"""Target: both ends of the handshake, with an attacker between them who controls every byte (H61).

Whatever the attacker does, an end that says ``done`` has read exactly the bytes that only a holder of the secret can
make for this very connection, and the server has not sent a proof before.
"""

from __future__ import annotations

import hashlib
import hmac
from random import Random

from protocol.errors import HandshakeFailed, RemoteProtocolError, VersionMismatch
from protocol.wire.handshake import (
    NONCE_BYTES,
    PROOF_BYTES,
    PROTOCOL_VERSION,
    ClientHandshake,
    HandshakeState,
    ServerHandshake,
)
from protocol.wire.keys import Key
from tests.fuzz import mutations
from tests.fuzz.target import Target, about_input

HELLO_BYTES = 54
CHALLENGE_BYTES = 38
IDENTITY = b"the identity...."
_VERSION = PROTOCOL_VERSION.to_bytes(2, "big")


class _Between:
    """One connection's two ends, and the bytes that went through."""

    def __init__(self, random: Random, secret: bytes, client_secret: bytes, client_version: int) -> None:
        self.random = random
        self.secret = secret
        self.client = ClientHandshake(Key(IDENTITY, client_secret), random.randbytes(NONCE_BYTES), client_version)
        self.server = _a_server(random, secret)
        self.read_by_server = b""
        self.read_by_client = b""
        self.sent_by_server = b""
        self.sent_by_client = self.client.initial_bytes()

    def to_server(self, data: bytes) -> None:
        self.read_by_server += data
        if not self.server.done:
            self.sent_by_server += self._feed(self.server, data)

    def to_client(self, data: bytes) -> None:
        self.read_by_client += data
        if not self.client.done:
            self.sent_by_client += self._feed(self.client, data)

    def _feed(self, end: ClientHandshake | ServerHandshake, data: bytes) -> bytes:
        """Feed in portions, as a socket might; data after the handshake stays with the end."""
        answer = b""
        if end.state is HandshakeState.FAILED:  # its shell has closed the connection
            return answer
        while data and not end.done:
            size = self.random.choice((1, 2, 5, 37, 38, 39, 54, 55, 70, 1000))
            try:
                answer += end.receive(data[:size])
            except VersionMismatch:
                return answer + end.last_words
            except HandshakeFailed:
                assert end.last_words == b""
                return answer
            data = data[size:]
        return answer

    def check(self) -> None:
        with about_input(self.read_by_server + b"|" + self.read_by_client):
            client_words = self.read_by_server[6:HELLO_BYTES]
            server_nonce = self.read_by_client[6:CHALLENGE_BYTES]
            own_server_nonce = self.sent_by_server[6:CHALLENGE_BYTES]
            if self.server.done:
                due = _proof(self.secret, b"headgate-client", client_words, own_server_nonce)
                assert self.read_by_server[:6] == b"HDGT" + _VERSION
                assert self.read_by_server[HELLO_BYTES : HELLO_BYTES + PROOF_BYTES] == due
                assert self.server.identity == IDENTITY
                assert len(self.sent_by_server) == CHALLENGE_BYTES + PROOF_BYTES
            else:
                assert len(self.sent_by_server) <= CHALLENGE_BYTES, "a peer without proof was told more than a hello"
            if self.client.done:
                due = _proof(self.secret, b"headgate-server", self.sent_by_client[6:HELLO_BYTES], server_nonce)
                assert self.read_by_client[CHALLENGE_BYTES : CHALLENGE_BYTES + PROOF_BYTES] == due


def _proof(secret: bytes, label: bytes, client_words: bytes, server_nonce: bytes) -> bytes:
    """``client_words`` are the identity and the nonce in the client's hello."""
    return hmac.new(secret, label + _VERSION + client_words + server_nonce, hashlib.sha256).digest()


def _a_server(random: Random, secret: bytes) -> ServerHandshake:
    """A server that knows one identity."""
    key = Key(IDENTITY, secret)
    return ServerHandshake(lambda identity: key if identity == IDENTITY else None, random.randbytes(NONCE_BYTES))


# --- attacks ------------------------------------------------------------------------------------------------------


def _pass_on(between: _Between) -> None:
    between.to_server(between.sent_by_client)
    between.to_client(between.sent_by_server)
    between.to_server(between.sent_by_client[HELLO_BYTES:])
    between.to_client(between.sent_by_server[CHALLENGE_BYTES:])


def _mutate(between: _Between) -> None:
    random = between.random

    def spoil(data: bytes) -> bytes:
        return mutations.mutated(random, data) if random.random() < 0.5 else data

    between.to_server(spoil(between.sent_by_client))
    between.to_client(spoil(between.sent_by_server))
    between.to_server(spoil(between.sent_by_client[HELLO_BYTES:]))
    between.to_client(spoil(between.sent_by_server[CHALLENGE_BYTES:]))


def _reflect(between: _Between) -> None:
    """Send each end its own bytes."""
    between.to_client(between.sent_by_client)
    between.to_server(between.sent_by_client[:HELLO_BYTES])
    between.to_server(between.sent_by_server)


def _ask_the_server_for_a_proof(between: _Between) -> None:
    """Answer the server's challenge with the server's own bytes, on this connection and on another one."""
    other = _a_server(between.random, between.secret)
    between.to_server(between.sent_by_client)
    try:
        other.receive(between.sent_by_server)
        between.to_server(other.receive(between.random.randbytes(PROOF_BYTES)))
    except RemoteProtocolError:
        pass
    between.to_server(between.sent_by_server)


def _replay(between: _Between) -> None:
    """Replay the bytes of an earlier valid connection, all of them or the proof alone."""
    random = between.random
    client = ClientHandshake(Key(IDENTITY, between.secret), random.randbytes(NONCE_BYTES))
    server = _a_server(random, between.secret)
    proof = client.receive(server.receive(client.initial_bytes()))
    answer = server.receive(proof)
    hello = client.initial_bytes() if random.random() < 0.5 else between.sent_by_client
    between.to_server(hello + proof)
    between.to_client(server.initial_bytes() + between.sent_by_server + answer)


def _cut_off(between: _Between) -> None:
    random = between.random
    between.to_server(between.sent_by_client[: random.randrange(HELLO_BYTES)])
    between.to_client(between.sent_by_server[: random.randrange(CHALLENGE_BYTES)])


def _babble(between: _Between) -> None:
    random = between.random
    head = random.choice((b"", b"H", b"HDGT", b"HDGT" + _VERSION, b"GET / HTTP/1.1\r\n"))
    between.to_server(head + random.randbytes(random.choice((1, 40, 100, 3000))))
    between.to_client(head + random.randbytes(random.choice((1, 40, 100, 3000))))


_TRICKS = (_mutate, _reflect, _ask_the_server_for_a_proof, _replay, _cut_off, _babble)


def _handshake_case(random: Random) -> None:
    secret = random.randbytes(32)
    honest = _Between(random, secret, secret, PROTOCOL_VERSION)
    _pass_on(honest)
    honest.check()
    assert honest.server.done
    assert honest.client.done
    stranger = _Between(random, secret, random.randbytes(32), PROTOCOL_VERSION)
    _pass_on(stranger)
    stranger.check()
    assert not stranger.server.done
    assert not stranger.client.done
    other_version = _Between(random, secret, secret, random.choice((0, 1, PROTOCOL_VERSION + 1, 65_535)))
    _pass_on(other_version)
    assert not other_version.server.done
    assert other_version.sent_by_server == other_version.server.last_words
    assert len(other_version.sent_by_server) == CHALLENGE_BYTES
    for trick in _TRICKS:
        between = _Between(random, secret, secret if random.random() < 0.7 else random.randbytes(32), PROTOCOL_VERSION)
        trick(between)
        between.check()


TARGETS = (Target("handshake", "both ends, with somebody between them", _handshake_case),)

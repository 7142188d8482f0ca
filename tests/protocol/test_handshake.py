# SPDX-License-Identifier: Apache-2.0

"""Both ends of the handshake, byte by byte, without a socket (H60, H61)."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import HandshakeFailed, RemoteProtocolError, VersionMismatch
from protocol.wire.handshake import PROTOCOL_VERSION, ClientHandshake, HandshakeState, ServerHandshake
from protocol.wire.keys import Key

KEY = Key(b"the identity....", b"s" * 32)
CLIENT_NONCE = bytes(range(32))
SERVER_NONCE = bytes(range(100, 132))


def a_client(key: Key = KEY, version: int = PROTOCOL_VERSION) -> ClientHandshake:
    return ClientHandshake(key, CLIENT_NONCE, version)


def a_server(key: Key = KEY, version: int = PROTOCOL_VERSION) -> ServerHandshake:
    return ServerHandshake(lambda identity: key if identity == key.identity else None, SERVER_NONCE, version)


def run(client: ClientHandshake, server: ServerHandshake) -> None:
    challenge = server.receive(client.initial_bytes())
    assert client.receive(server.receive(client.receive(challenge))) == b""


def test_two_ends_with_one_secret_know_each_other() -> None:  # H61
    client, server = a_client(), a_server()
    run(client, server)
    assert client.done
    assert server.done


def test_the_bytes_on_the_wire_are_those_of_the_specification() -> None:  # H61
    client, server = a_client(), a_server()
    hello = client.initial_bytes()
    assert hello == b"HDGT\x00\x0b" + KEY.identity + CLIENT_NONCE
    challenge = server.receive(hello)
    assert challenge == b"HDGT\x00\x0b" + SERVER_NONCE
    transcript = b"\x00\x0b" + KEY.identity + CLIENT_NONCE + SERVER_NONCE
    proof = client.receive(challenge)
    assert proof == hmac.new(KEY.secret, b"headgate-client" + transcript, hashlib.sha256).digest()
    answer = server.receive(proof)
    assert answer == hmac.new(KEY.secret, b"headgate-server" + transcript, hashlib.sha256).digest()


@given(st.lists(st.integers(1, 40), max_size=40))
def test_the_portions_in_which_bytes_come_do_not_matter(sizes: list[int]) -> None:
    client, server = a_client(), a_server()
    frames = b"the first frame"
    to_server, to_client, cuts = client.initial_bytes(), b"", iter(sizes)
    while not server.done or not client.done:
        cut = next(cuts, 200)
        portion, to_server = to_server[:cut], to_server[cut:]
        if portion and not server.done:
            to_client += server.receive(portion)
            to_client += frames if server.state is HandshakeState.DONE else b""
        portion, to_client = to_client[:cut], to_client[cut:]
        if portion and not client.done:
            to_server += client.receive(portion)
    assert client.trailing_data + to_client == frames
    assert server.trailing_data == b""


def test_bytes_after_the_proof_belong_to_frames() -> None:
    client, server = a_client(), a_server()
    proof = client.receive(server.receive(client.initial_bytes()))
    answer = server.receive(proof + b"up")
    assert server.trailing_data == b"up"
    client.receive(answer + b"down")
    assert client.trailing_data == b"down"


def test_a_peer_with_another_secret_is_refused_and_gets_no_proof() -> None:  # H61
    client, server = a_client(Key(KEY.identity, b"x" * 32)), a_server()
    proof = client.receive(server.receive(client.initial_bytes()))
    with pytest.raises(HandshakeFailed, match="secret"):
        server.receive(proof)
    assert not server.done
    assert server.last_words == b""
    assert server.state is HandshakeState.FAILED


def test_a_server_that_does_not_know_the_secret_is_refused_too() -> None:  # H61: mutual
    client, server = a_client(), a_server()
    client.receive(server.receive(client.initial_bytes()))
    with pytest.raises(HandshakeFailed, match="server does not know"):
        client.receive(bytes(32))
    assert not client.done


def test_a_failed_handshake_stays_failed() -> None:
    server = a_server()
    with pytest.raises(HandshakeFailed):
        server.receive(b"GET / HTTP/1.1\r\n")
    for more in (a_client().initial_bytes(), b""):
        with pytest.raises(HandshakeFailed):
            server.receive(more)


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1), (1, 65535)])
def test_both_ends_name_both_versions_when_they_differ(ours: int, theirs: int) -> None:  # H60
    client, server = a_client(version=theirs), a_server(version=ours)
    with pytest.raises(VersionMismatch) as at_server:
        server.receive(client.initial_bytes())
    with pytest.raises(VersionMismatch) as at_client:
        client.receive(server.last_words)
    assert (at_server.value.ours, at_server.value.theirs) == (ours, theirs)
    assert (at_client.value.ours, at_client.value.theirs) == (theirs, ours)
    assert str(ours) in str(at_client.value)
    assert str(theirs) in str(at_client.value)


def test_another_version_is_told_before_the_rest_of_its_hello_is_here() -> None:
    # H60: the hello of a later version may be longer or shorter than ours.
    with pytest.raises(VersionMismatch):
        a_server().receive(b"HDGT\x00\x0c")


@pytest.mark.parametrize("wrong_at", range(4))
def test_a_stranger_is_refused_at_its_first_wrong_byte(wrong_at: int) -> None:  # H62
    server = a_server()
    assert server.receive(b"HDGT"[:wrong_at]) == b""
    with pytest.raises(HandshakeFailed, match="does not speak this protocol"):
        server.receive(b"\x00")
    assert server.last_words == b""


def test_a_server_refuses_its_own_nonce() -> None:  # H61: no reflection
    with pytest.raises(HandshakeFailed, match="own nonce"):
        a_server().receive(b"HDGT\x00\x0b" + KEY.identity + SERVER_NONCE)


def test_a_client_refuses_its_own_words_back() -> None:  # H61: no reflection
    client = a_client()
    with pytest.raises(HandshakeFailed, match="own nonce"):
        client.receive(b"HDGT\x00\x0b" + CLIENT_NONCE)


def test_the_clients_own_proof_is_not_a_proof_of_a_server() -> None:  # H61: the labels differ
    client, server = a_client(), a_server()
    proof = client.receive(server.receive(client.initial_bytes()))
    with pytest.raises(HandshakeFailed):
        client.receive(proof)


def test_a_proof_is_good_for_one_connection_only() -> None:  # H61: replay
    client, server = a_client(), a_server()
    proof = client.receive(server.receive(client.initial_bytes()))
    later = ServerHandshake(lambda identity: KEY, b"n" * 32)
    later.receive(client.initial_bytes())
    with pytest.raises(HandshakeFailed):
        later.receive(proof)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_authenticate_and_never_break_the_machine(data: bytes) -> None:  # H62
    server = a_server()
    try:
        server.receive(data)
    except RemoteProtocolError:
        assert server.state is HandshakeState.FAILED
    assert not server.done


@given(st.integers(0, 31), st.integers(1, 255))
def test_one_changed_byte_of_a_proof_is_enough_to_refuse_it(position: int, change: int) -> None:
    client, server = a_client(), a_server()
    proof = bytearray(client.receive(server.receive(client.initial_bytes())))
    proof[position] ^= change
    with pytest.raises(HandshakeFailed):
        server.receive(bytes(proof))


def test_more_bytes_for_a_finished_handshake_are_our_own_fault() -> None:
    client, server = a_client(), a_server()
    run(client, server)
    with pytest.raises(ValueError, match="belong to frames"):
        server.receive(b"more")


def test_a_short_nonce_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        ClientHandshake(KEY, b"n")


def test_the_server_learns_which_identity_the_client_has_proved() -> None:  # H76
    client, server = a_client(), a_server()
    proof = client.receive(server.receive(client.initial_bytes()))
    assert server.identity == b""
    server.receive(proof)
    assert server.identity == KEY.identity


def test_an_identity_without_a_key_is_refused_like_a_wrong_key() -> None:  # H76
    unknown = Key(b"another identity", KEY.secret)
    for key in (unknown, Key(unknown.identity, bytes(32))):  # whatever the server takes for a missing key
        client, server = a_client(key), a_server()
        challenge = server.receive(client.initial_bytes())
        assert challenge == a_server().receive(a_client().initial_bytes()), "it learns nothing from the challenge"
        with pytest.raises(HandshakeFailed, match="secret"):
            server.receive(client.receive(challenge))
        assert server.identity == b""


def test_a_proof_for_one_identity_is_none_for_another() -> None:  # H76: the transcript holds the identity
    client, server = a_client(), ServerHandshake(lambda identity: KEY, SERVER_NONCE)
    hello = client.initial_bytes()
    proof = client.receive(server.receive(hello[:6] + b"another identity" + hello[22:]))
    with pytest.raises(HandshakeFailed, match="secret"):
        server.receive(proof)


def test_a_version_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bits"):
        a_server(version=2**16)


def test_the_secret_is_in_no_text_of_a_handshake() -> None:  # H61: never in a log
    server = a_server()
    assert KEY.secret.decode() not in repr(server) + str(server) + repr(KEY)

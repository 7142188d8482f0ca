# SPDX-License-Identifier: Apache-2.0

"""The keys that are derived from one master secret (H76), and the tokens of attempts (H74)."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from protocol.wire.keys import IDENTITY_BYTES, NO_IDENTITY, Key, KeyRing, Purpose, identity_of

MASTER = bytes(range(32))
RING = KeyRing(MASTER)


def test_the_derivation_is_hkdf_with_one_block() -> None:  # H76: RFC 5869
    extracted = hmac.new(b"headgate keys 1", MASTER, hashlib.sha256).digest()
    info = b"tasks\0" + hashlib.sha256(b"words").digest()[:16]
    expanded = hmac.new(extracted, info + b"\1", hashlib.sha256).digest()
    assert RING.task_key("words") == Key(hashlib.sha256(b"words").digest()[:16], expanded)


def test_each_purpose_and_each_identity_has_a_separate_key() -> None:  # H76
    identities = (NO_IDENTITY, identity_of("words"), identity_of("numbers"))
    keys = [RING.key(purpose, identity).secret for purpose in Purpose for identity in identities]
    assert len(set(keys)) == len(Purpose) * len(identities)
    assert MASTER not in keys


def test_the_same_secret_gives_the_same_keys_after_a_restart() -> None:  # H76
    assert KeyRing(MASTER).task_key("words") == RING.task_key("words")
    assert KeyRing(bytes(32)).task_key("words") != RING.task_key("words")


def test_a_token_belongs_to_one_attempt_of_one_operator_of_one_application() -> None:  # H74
    tokens = {
        RING.attempt_token(application, operator_id, task)
        for application in (bytes(16), b"a" * 16)
        for operator_id in ("words", "word", "words1", "numbers")
        for task in (0, 1, 256, 2**62)
    }
    assert len(tokens) == 32
    assert RING.attempt_token(bytes(16), "words", 7) == KeyRing(MASTER).attempt_token(bytes(16), "words", 7)


def test_no_text_shows_a_key() -> None:  # H61
    key = RING.task_key("words")
    assert repr(key.secret) not in repr(key) + repr(RING)


@pytest.mark.parametrize(("identity", "secret"), [(b"short", bytes(32)), (bytes(IDENTITY_BYTES), b"short")])
def test_a_key_of_another_length_is_refused(identity: bytes, secret: bytes) -> None:
    with pytest.raises(ValueError, match="must have"):
        Key(identity, secret)


def test_a_short_secret_is_refused() -> None:  # H61
    with pytest.raises(ValueError, match="at least 16 bytes"):
        KeyRing(b"short")

# SPDX-License-Identifier: Apache-2.0

"""Bugs that would let a peer speak for another, which no simulated world covers, each caught by its own test."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from spark_bridge.certificates import encryption
from tests.mutants.mutant import Mutant, catalogue
from tests.protocol.test_handshake import (
    test_a_peer_with_another_secret_is_refused_and_gets_no_proof as prove,
)
from tests.protocol.test_handshake import (
    test_a_proof_for_one_identity_is_none_for_another as prove_ones_own_identity,
)
from tests.protocol.test_handshake import (
    test_an_identity_without_a_key_is_refused_like_a_wrong_key as have_a_key,
)
from tests.spark_bridge.test_router import (
    test_a_task_cannot_register_for_another_operator as register_for_oneself,
)
from tests.spark_bridge.test_router import (
    test_an_attempt_is_resumed_only_with_its_token as show_the_token,
)
from tests.spark_bridge.test_tls import KEYS
from tests.spark_bridge.test_tls import (
    test_a_task_refuses_another_certificate as know_the_certificate,
)

CATALOGUE = catalogue(r"""
no-token-check [X6; H74]
  Any task of an operator may resume any attempt of it.
  @ spark_bridge.bridge.router:ConnectionRouter._why_not_believed
  - if not hmac.compare_digest(token, message.token):
  + if False:
key-of-another-operator [X4; H76]
  A task of one operator may register and resume for another one.
  @ spark_bridge.bridge.router:ConnectionRouter._why_not_believed
  - connection.authenticated_as != identity_of(message.operator_id)
  + False
no-proof-check [X5; H61]
  Whatever a peer sends as its proof is believed.
  @ protocol.wire.handshake:_Handshake._take_proof
  - if not right or self._key is _NO_KEY:
  + if False:
no-key-is-a-key [X4; H76]
  An identity for which there is no key is served with a key of zeros, which anybody knows.
  @ protocol.wire.handshake:_Handshake._take_proof
  - if not right or self._key is _NO_KEY:
  + if not right:
identity-outside-the-transcript [X4; H76]
  The identity in the hello can be replaced on the way.
  @ protocol.wire.handshake:_Handshake._take_hello
  - + self._identify(identity) + self._in_order(peer_nonce)
  + + (self._identify(identity) and b"") + self._in_order(peer_nonce)
certificate-not-pinned [X7; H77]
  A task accepts any certificate, and so anybody between it and the sidecar.
  @ spark_bridge.subtask.tls:TlsStream._shake_hands
  - if self._pin is not None:
  + if False:
""")
TOKEN, OPERATOR, PROOF, NO_KEY, TRANSCRIPT, PIN = CATALOGUE


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (TOKEN, show_the_token),
        (OPERATOR, register_for_oneself),
        (PROOF, prove),
        (NO_KEY, have_a_key),
        (TRANSCRIPT, prove_ones_own_identity),
    ],
    ids=lambda value: value.name if isinstance(value, Mutant) else "",
)
def test_a_missing_check_of_who_speaks_is_caught(mutant: Mutant, check: Callable[[], None]) -> None:  # H61, H74, H76
    check()
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.apply(monkeypatch)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check()


async def test_a_certificate_that_is_not_pinned_is_caught() -> None:  # H77
    check: Callable[..., Awaitable[None]] = know_the_certificate
    made = encryption(True, KEYS)
    await check(made)
    with pytest.MonkeyPatch.context() as monkeypatch:
        PIN.apply(monkeypatch)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            await check(made)

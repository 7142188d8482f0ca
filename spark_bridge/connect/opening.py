# SPDX-License-Identifier: Apache-2.0

"""The two ways to have a Spark Connect server open a relay. Both block, and say nothing that is secret."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass

from protocol.wire.keys import KEY_BYTES, Key, KeyRing
from spark_bridge.bridge.relay_jar import LISTENER_CLASS
from spark_bridge.common.errors import ConnectRefused
from spark_bridge.connect.remote_session import Listener, RemoteSession, Unreachable
from spark_bridge.standalone.secret_file import read_secret

__all__ = ["PRIME", "Artifact", "Installed", "KeyAgreement", "Opening", "Wanted", "opening_of"]

OPEN_TAG = "headgate.open."
_PROOF = b"headgate-open"
PRIME = int(
    "ffffffffffffffffc90fdaa22168c234c4c6628b80dc1cd129024e088a67cc74"
    "020bbea63b139b22514a08798e3404ddef9519b3cd3a431b302b0a6df25f1437"
    "4fe1356d6d51c245e485b576625e7ec6f44c42e9a637ed6b0bff5cb6f406b7ed"
    "ee386bfb5a899fa5ae9f24117c4b1fe649286651ece45b3dc2007cb8a163bf05"
    "98da48361c55d39a69163fa8fd24cf5f83655d23dca3ad961c62f356208552bb"
    "9ed529077096966d670c354e4abc9804f1746c08ca18217c32905e462e36ce3b"
    "e39e772c180e86039b2783a2ec07a28fb5c55df06f4c52c9de2bcbf695581718"
    "3995497cea956ae515d2261898fa051015728e5a8aacaa68ffffffffffffffff",
    16,
)
_BASE = 2
_VALUE_BYTES = 256


@dataclass(frozen=True, slots=True)
class Wanted:
    """The relay that is wanted: it dials ``address`` and proves ``key``.

    ``tasks_at`` is the address for tasks, if it is known already; the server tries it as well. The relay ends after
    ``lease_s`` seconds without a word. With ``certificate_sha256``, it uses TLS.
    """

    key: Key
    address: tuple[str, int]
    tasks_at: tuple[str, int] | None
    lease_s: float
    certificate_sha256: bytes

    @property
    def lease_ms(self) -> int:
        return int(self.lease_s * 1000)

    @property
    def certificate(self) -> str:
        return self.certificate_sha256.hex() or "-"


class Opening(ABC):
    """One way."""

    def keys(self, own: KeyRing) -> KeyRing:
        """What the relay's key is derived from; ``own`` are the keys of the application."""
        return own

    @abstractmethod
    def open(self, session: RemoteSession, wanted: Wanted) -> None:
        """Have the server open the relay. Raises ``ConnectRefused``."""

    @abstractmethod
    def why_silent(self, address: tuple[str, int], listener: Listener) -> str:
        """Why, most probably, no relay has proved its key to the listener, and what to do."""


def opening_of(secret_file: str | os.PathLike[str] | None) -> Opening:
    """The way for a client with this ``Addresses.relay_secret_file``. Raises ``SidecarError``."""
    return Artifact() if secret_file is None else Installed(read_secret(secret_file))


class Artifact(Opening):
    """Nothing is installed on the server: the relay travels as an artifact, and a Java function opens it.

    The key is new, and reaches the server under a pad.
    """

    def open(self, session: RemoteSession, wanted: Wanted) -> None:
        agreement, identity = KeyAgreement(), wanted.key.identity.hex()
        session.ship_relay()
        with session.relay_function() as function:
            offered = function.call("offer", identity, agreement.value)
            if offered[0] != "offered":
                raise _unexpected(offered)
            key = agreement.seal(wanted.key.secret, offered[1])
            places = (*wanted.address, *(wanted.tasks_at or ()))
            answer = function.call("open", identity, key, wanted.lease_ms, wanted.certificate, *places)
        if answer[0] == "unreachable":
            raise Unreachable(
                f"the Spark Connect server cannot reach {session.listener.name} at {answer[1]}:{answer[2]} "
                f"({' '.join(answer[3:])}): {session.listener.reachable}"
            )
        if answer != ["opened"]:
            raise _unexpected(answer)

    def why_silent(self, address: tuple[str, int], listener: Listener) -> str:
        return (
            f"the server's JVM reached {address[0]}:{address[1]}, but did not authenticate: check that no other "
            "program answers there"
        )


class Installed(Opening):
    """The server's operator has installed the relay, and given ``secret`` to this client: a job's tag asks for it.

    ``InstalledRelays.java`` is the other end.
    """

    def __init__(self, secret: bytes) -> None:
        self._keys = KeyRing(secret)

    def keys(self, own: KeyRing) -> KeyRing:
        """See ``Opening``: the server derives the same keys from the same secret."""
        return self._keys

    def open(self, session: RemoteSession, wanted: Wanted) -> None:
        """See ``Opening``. The server does not say whether it can reach the address."""
        listeners = session.setting("spark.extraListeners") or ""
        if LISTENER_CLASS not in listeners.replace(" ", "").split(","):
            raise ConnectRefused(
                f"no relay is installed on the Spark Connect server: start it with --conf "
                f"spark.extraListeners={LISTENER_CLASS} and the relay's jar, or {session.listener.without_relay}, so "
                "that the relay travels with the session, which it cannot do in the definitions of a declarative "
                "pipeline"
            )
        host, port = wanted.address
        words = (wanted.key.identity.hex(), wanted.lease_ms, wanted.certificate, host, port, session.session_id)
        text = " ".join(map(str, words)).encode()
        proof = hmac.digest(wanted.key.secret, _PROOF + text, hashlib.sha256)
        session.run_tagged(f"{OPEN_TAG}{text.hex()}.{proof.hex()}")

    def why_silent(self, address: tuple[str, int], listener: Listener) -> str:
        return (
            f"the relay on the Spark Connect server did not connect to {address[0]}:{address[1]}: the server's log has "
            "a line of InstalledRelays if it refused, mostly for a secret that is not in its file. Otherwise it cannot "
            f"reach {listener.name}: {listener.reachable}"
        )


def _unexpected(answer: list[str]) -> ConnectRefused:
    return ConnectRefused(
        f"unexpected answer of the relay on the server: {' '.join(answer)[:200]!r}. Restart the session: another "
        "release of Headgate may have left its jar there"
    )


class KeyAgreement:
    """Hands one key to the server's JVM, in texts that everybody may read.

    What a client says to a Spark Connect server is in the texts of plans, and so in the server's UI and event log. The
    two ends therefore exchange Diffie-Hellman values (RFC 3526, group 14) with new random exponents each time. The key
    is sent combined, bit by bit, with a digest of what they have in common, which is used for nothing else.
    ``SessionFunction.java`` is the other end.

    Somebody who can change what client and server say to each other can take the place of either end. But then he can
    also run code on the server; encrypt Spark Connect itself against that.
    """

    def __init__(self) -> None:
        self._exponent = secrets.randbelow(PRIME - 2) + 1

    @property
    def value(self) -> str:
        """What the other end is told, in hexadecimal digits."""
        return f"{pow(_BASE, self._exponent, PRIME):x}"

    def seal(self, key: bytes, theirs: str) -> str:
        """The key, for the end that has said ``theirs`` and nobody else. Raises ``ValueError`` for an invalid value."""
        value = int(theirs, 16)
        if not 2 <= value <= PRIME - 2:
            raise ValueError("not a value of the group")
        shared = pow(value, self._exponent, PRIME).to_bytes(_VALUE_BYTES, "big")
        pad = hashlib.sha256(shared).digest()
        assert len(key) == len(pad) == KEY_BYTES
        return bytes(a ^ b for a, b in zip(key, pad, strict=True)).hex()

# SPDX-License-Identifier: Apache-2.0

"""Keys for each purpose, derived from one master secret (H76).

The master secret stays in the sidecar's process, and in the driver that the sidecar belongs to. A task is given the key
of its operator, and the driver's JVM the key of its connection. Neither key leads back to the master secret or to
another key, so a task can speak for no other operator, cannot use the control port, and cannot speak as the JVM.

A key belongs to a *purpose* and an *identity* of 16 bytes. In the handshake (``handshake``) a client names its
identity, and the server derives the same key from it. So a server needs no list of keys, and answers an identity that
does not exist as it answers a wrong key.

The derivation is HKDF with SHA-256 (RFC 5869): one extraction for the master secret, one expansion for each key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

__all__ = [
    "IDENTITY_BYTES",
    "KEY_BYTES",
    "MAY_HOLD",
    "NO_IDENTITY",
    "SECRET_BYTES_MIN",
    "Holder",
    "Key",
    "KeyRing",
    "Purpose",
    "identity_of",
]

IDENTITY_BYTES = 16
KEY_BYTES = 32
SECRET_BYTES_MIN = 16
NO_IDENTITY = bytes(IDENTITY_BYTES)
"""The identity of a client whose purpose needs none."""

_SALT = b"headgate keys 1"


class Purpose(Enum):
    """What a key is for."""

    TASKS = b"tasks"
    """The tasks of one operator. The identity is ``identity_of(operator_id)``."""
    RELAY = b"relay"
    """The JVM of one driver. The identity is the driver's own random one."""
    CONTROL = b"control"
    """The requests of one driver. The identity is the driver's random one; there is none for a look from outside."""
    STREAMS = b"streams"
    """The process in which Spark plans a stream of one source. The identity is ``identity_of(name)``."""
    ATTEMPTS = b"attempts"
    """Tokens of attempts (H74). No connection uses this key."""
    CERTIFICATE = b"certificate"
    """The private key of the sidecar's certificate (H77)."""


class Holder(Enum):
    """A kind of process, as the documentation names it."""

    DRIVER = "a driver that has its sidecar in the same process"
    CLIENT = "a Spark Connect client that has its sidecar in the same process"
    SIDECAR = "a sidecar process"
    ATTACHED = "a driver or client that is attached to a sidecar process"
    JVM = "the JVM of a driver"
    CONNECT_SERVER = "a Spark Connect server"
    INSTALLED = "a Spark Connect server on which the relay is installed"
    PLANNER = "the process in which Spark plans a stream"
    TASK = "a task"


_WITH_SIDECAR = frozenset({Holder.DRIVER, Holder.CLIENT, Holder.SIDECAR})
_WITH_SECRET = _WITH_SIDECAR | {Holder.ATTACHED}
_SPARK = frozenset({Holder.JVM, Holder.CONNECT_SERVER, Holder.INSTALLED})  # it passes on what it starts processes with

MAY_HOLD: Mapping[Purpose | None, frozenset[Holder]] = MappingProxyType(
    {
        None: _WITH_SECRET | {Holder.INSTALLED},  # of the sidecar processes beside it, in its file
        Purpose.TASKS: _WITH_SECRET | _SPARK | {Holder.PLANNER, Holder.TASK},
        Purpose.RELAY: _WITH_SECRET | _SPARK,
        Purpose.CONTROL: frozenset({Holder.SIDECAR, Holder.ATTACHED}),
        Purpose.STREAMS: _SPARK | {Holder.DRIVER, Holder.CLIENT, Holder.PLANNER},
        Purpose.ATTEMPTS: _WITH_SIDECAR,
        Purpose.CERTIFICATE: _WITH_SECRET,
    }
)
"""Which kinds of processes may have the keys of a purpose in their memory; None is the secret itself (H76).

A task has the key of its operator only, a planning process those of its source, and a JVM those of its driver. A Spark
Connect server on which the relay is installed has the secrets of its file: one of a client is for its relays only, one
of a sidecar process is that process's own.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of 32 bytes, and the identity under which its holder connects. ``repr`` does not show the key."""

    identity: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for an identity or a key of another length."""
        if len(self.identity) != IDENTITY_BYTES:
            raise ValueError(f"the identity must have {IDENTITY_BYTES} bytes, has {len(self.identity)}")
        if len(self.secret) != KEY_BYTES:
            raise ValueError(f"the key must have {KEY_BYTES} bytes, has {len(self.secret)}")


def identity_of(name: str) -> bytes:
    """The identity that belongs to a name, such as an operator's."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:IDENTITY_BYTES]


class KeyRing:
    """The keys of one master secret. Immutable, for any thread. ``repr`` shows no secret."""

    __slots__ = ("_extracted",)

    def __init__(self, master: bytes) -> None:
        """``master``: at least 16 random bytes. Raises ``ValueError`` for fewer."""
        if len(master) < SECRET_BYTES_MIN:
            raise ValueError(
                f"the secret must have at least {SECRET_BYTES_MIN} bytes, has {len(master)}: make it of random bytes, "
                f"such as secrets.token_bytes({KEY_BYTES})"
            )
        self._extracted = hmac.digest(_SALT, master, hashlib.sha256)

    def key(self, purpose: Purpose, identity: bytes = NO_IDENTITY) -> Key:
        """The key of this purpose and identity; the same for equal arguments."""
        return Key(identity, hmac.digest(self._extracted, purpose.value + b"\0" + identity + b"\1", hashlib.sha256))

    def task_key(self, operator_id: str) -> Key:
        """The key that the tasks of one operator are given."""
        return self.key(Purpose.TASKS, identity_of(operator_id))

    def certificate_seed(self) -> bytes:
        """The 32 bytes of the private key of the sidecar's certificate."""
        return self.key(Purpose.CERTIFICATE).secret

    def attempt_token(self, application: bytes, operator_id: str, task_attempt_id: int) -> bytes:
        """What an accepted attempt shows to resume (H74): nobody without the master secret can compute it.

        ``application`` is the driver's identity: task attempt ids begin again with the next driver. A sidecar that was
        restarted computes the same token, and so recognizes the attempts of the one before.
        """
        attempts = self.key(Purpose.ATTEMPTS, application).secret
        return hmac.digest(attempts, task_attempt_id.to_bytes(8, "big") + operator_id.encode(), hashlib.sha256)

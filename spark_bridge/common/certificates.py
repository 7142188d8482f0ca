# SPDX-License-Identifier: Apache-2.0

"""The sidecar's certificate (H77): made from the application's secret, or given.

Needs the package ``cryptography`` (``pip install 'headgate[tls]'``), in the driver and in the sidecar's process only.
"""

from __future__ import annotations

import datetime
import os
import secrets
import ssl
import tempfile
from dataclasses import dataclass, field
from typing import Any

from protocol.arguments import TEXT, check_fields
from protocol.wire.keys import KeyRing
from spark_bridge.common.errors import SidecarError
from spark_bridge.common.regular_files import open_regular, read_small
from spark_bridge.common.tls import digest_of

__all__ = ["Encryption", "TlsCertificate", "certificate_digest", "encryption"]

_PEM_BYTES_MAX = 2**20
_NOT_BEFORE = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)  # X.509's way to say that there is no end (RFC 5280)


@dataclass(frozen=True, slots=True)
class TlsCertificate:
    """Your own certificate, in place of the one that the sidecar makes: two files in PEM form.

    ``certificate`` holds the server's certificate, and then the others of its chain, if any. ``private_key`` is only
    read by the process that listens; ``password`` decrypts it. The peers accept exactly this certificate, by its
    SHA-256 digest: names, dates and issuers are not checked. A driver that attaches to a sidecar in another process
    needs only ``certificate``.
    """

    certificate: str | os.PathLike[str]
    private_key: str | os.PathLike[str] | None = None
    password: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, password=TEXT)


@dataclass(frozen=True, slots=True)
class Encryption:
    """What the sidecar's servers encrypt with, and the digest of their certificate. Both are empty without TLS."""

    context: ssl.SSLContext | None = None
    certificate_sha256: bytes = b""


def encryption(tls: bool | TlsCertificate, keys: KeyRing) -> Encryption:
    """What ``SidecarConfig.tls`` asks for. Reads files, so it may block.

    Raises ``SidecarError`` if ``cryptography`` is missing or the files cannot be used.
    """
    digest = certificate_digest(tls, keys)
    return Encryption(_server_context(tls, keys), digest)


def certificate_digest(tls: bool | TlsCertificate, keys: KeyRing) -> bytes:
    """The digest of the certificate that the peers accept; empty without TLS. Raises as ``encryption`` does."""
    if tls is False:
        return b""
    if tls is True:
        return digest_of(_made_from(keys)[0])
    try:
        pem, _ = read_small(tls.certificate, _PEM_BYTES_MAX)
        return digest_of(ssl.PEM_cert_to_DER_cert(_first_certificate(pem.decode("ascii"))))
    except (OSError, ValueError) as error:
        raise SidecarError(
            f"cannot read the certificate from {os.fspath(tls.certificate)}: {error}; it must be a file in PEM form"
        ) from error


def _server_context(tls: bool | TlsCertificate, keys: KeyRing) -> ssl.SSLContext | None:
    if tls is False:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # a connection is never resumed, and a client would have to read them
    if tls is True:
        _load(context, *_made_from(keys))
        return context
    if tls.private_key is None:
        raise SidecarError("the sidecar needs the private key of its certificate: TlsCertificate(..., private_key=...)")
    try:
        for file in (tls.certificate, tls.private_key):
            open_regular(file).close()  # OpenSSL would wait for a pipe
        context.load_cert_chain(tls.certificate, tls.private_key, tls.password or _no_password)
    except (OSError, ValueError) as error:
        raise SidecarError(
            f"cannot use the certificate {os.fspath(tls.certificate)} with the private key "
            f"{os.fspath(tls.private_key)}: {error}; pass two files in PEM form that belong together, and "
            "password= for "
            "an encrypted key"
        ) from error
    return context


def _made_from(keys: KeyRing) -> tuple[bytes, Any]:
    """The certificate in DER form and its private key: the same for the same secret, at both ends and after a restart.

    An Ed25519 key is any 32 bytes, and its signatures are not random, so nothing has to be stored or sent.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise SidecarError(
            "tls=True needs the package cryptography in the driver's Python: pip install 'headgate[tls]', or pass "
            "tls=TlsCertificate(...) with your own certificate"
        ) from error
    private_key = Ed25519PrivateKey.from_private_bytes(keys.certificate_seed())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "headgate sidecar")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private_key.public_key())
        .serial_number(1)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(private_key, algorithm=None)
    )
    return certificate.public_bytes(Encoding.DER), private_key


def _load(context: ssl.SSLContext, certificate: bytes, private_key: Any) -> None:
    """Python's ``ssl`` reads keys from files only: the key is in one for a moment, encrypted with a random password."""
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

    password = secrets.token_bytes(32).hex().encode()
    encrypted = private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password))
    descriptor, path = tempfile.mkstemp(prefix="headgate-tls-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(ssl.DER_cert_to_PEM_cert(certificate).encode("ascii") + encrypted)
        context.load_cert_chain(path, password=password)
    finally:
        os.unlink(path)


def _first_certificate(pem: str) -> str:
    begin, end = pem.find(ssl.PEM_HEADER), pem.find(ssl.PEM_FOOTER)
    if begin < 0 or end < begin:
        raise ValueError("there is no certificate in it")
    return pem[begin : end + len(ssl.PEM_FOOTER)]


def _no_password() -> str:
    """OpenSSL would ask on the terminal."""
    raise ValueError("the private key is encrypted: pass its password")

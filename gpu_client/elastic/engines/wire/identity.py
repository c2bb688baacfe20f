"""Authenticate nodes: each node pins the self-signed certificates of the others."""

from __future__ import annotations

import base64
import hashlib
import os
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

CertificateSource = Callable[[str], str | None]
"""Return the certificate with a label, or None for a certificate that the node does not trust."""

MAX_PINNED = 256
"""TLS settings that a node keeps: two for each peer, in a world of 64 nodes and of peers that were replaced."""


def label_of(certificate: str) -> str:
    """Return the name under which the owner of a certificate calls: part of the certificate's digest."""
    return hashlib.sha256(base64.b64decode(certificate)).hexdigest()[:32]


class NodeIdentity:
    """Private key and certificate of one node. The key stays in this process.

    certificate: DER in base64, for the node's peers.
    """

    def __init__(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "baton node")])
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            # Peers compare the whole certificate; the dates only have to hold on machines with wrong clocks.
            .not_valid_before(now - timedelta(days=365))
            .not_valid_after(now + timedelta(days=3650))
            .sign(key, hashes.SHA256())
        )
        self.certificate = base64.b64encode(certificate.public_bytes(Encoding.DER)).decode()
        self._pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        self._pem += certificate.public_bytes(Encoding.PEM)
        # The settings take as long as a handshake, and each epoch opens several connections to every peer.
        self._contexts: dict[tuple[int, str], ssl.SSLContext] = {}

    def client_context(self, certificate: str) -> ssl.SSLContext:
        """Return the TLS settings of calls to the owner of a certificate."""
        return self._pin(ssl.PROTOCOL_TLS_CLIENT, certificate)

    def server_context(self, certificates: CertificateSource) -> ssl.SSLContext:
        """Return the TLS settings of a listener. A caller names its certificate's label as server name."""
        context = self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        # A ticket would be the only message on the unused direction of a lane.
        context.num_tickets = 0

        def pin(connection: ssl.SSLObject | ssl.SSLSocket, label: str | None, _: ssl.SSLContext) -> int | None:
            certificate = certificates(label) if label else None
            if certificate is None:
                return int(ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME)
            connection.context = self._pin(ssl.PROTOCOL_TLS_SERVER, certificate)
            return None

        context.sni_callback = pin
        return context

    def _pin(self, protocol: int, certificate: str) -> ssl.SSLContext:
        context = self._contexts.get((protocol, certificate))
        if context is None:
            context = ssl.SSLContext(protocol)
            context.check_hostname = False
            context.load_verify_locations(cadata=base64.b64decode(certificate))
            if len(self._contexts) >= MAX_PINNED:
                self._contexts.clear()
            self._contexts[protocol, certificate] = self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        with _open_key(self._pem) as path:
            context.load_cert_chain(path)
        return context


@contextmanager
def _open_key(pem: bytes) -> Iterator[str]:
    """Yield the path of a file with the key, because `ssl` reads keys from files only.

    On Linux the file is in memory: a disk may be full, and would keep the key of a process that is killed meanwhile.
    """
    if sys.platform == "linux":
        with os.fdopen(os.memfd_create("baton-key"), "wb") as file:
            file.write(pem)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile() as file:
            file.write(pem)
            file.flush()
            yield file.name

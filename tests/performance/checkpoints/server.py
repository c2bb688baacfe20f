"""The sink as a process, and a throwaway certificate for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

NAME = "tests/performance/sink.py (S3 on loopback, bytes moved by splice and sendfile, files in memory)"


@contextmanager
def running_sink(directory: Path, *, tls: Path | None = None) -> Iterator[str]:
    """A sink that keeps its objects in a new folder `directory`; gives its address."""
    directory.mkdir()
    command = [sys.executable, "-m", "tests.performance.sink", str(directory)]
    command += ["--tls", str(tls)] if tls is not None else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            scheme = "http" if tls is None else "https"
            yield f"{scheme}://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.communicate()


def throwaway_certificate(path: Path) -> Path:
    """Key and certificate of 127.0.0.1 for a day, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sink")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(private + certificate.public_bytes(Encoding.PEM))
    return path

"""One TLS context for everything: making one costs tens of milliseconds."""

from __future__ import annotations

import functools
import ssl

import certifi


@functools.cache
def shared_tls() -> ssl.SSLContext:
    """Trusts the machine's roots (SSL_CERT_FILE and SSL_CERT_DIR included) and those that ship with certifi.

    Slim container images have no roots of their own; machines behind a company's proxy have roots certifi lacks.
    """
    context = ssl.create_default_context()
    context.load_verify_locations(cafile=certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    return context

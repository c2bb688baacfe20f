"""Sign identity tokens as SaladCloud does, with a key pair of this process. Needs the package `cryptography`."""

from __future__ import annotations

import base64
import secrets

from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256


class WorkloadKey:
    """Key pair on P-256. `sign`: r and s of an ES256 signature, 32 bytes each."""

    def __init__(self, key_id: str = "") -> None:
        """key_id: id under which the provider publishes the public key; default: a new one."""
        # A later fake may use the port of an earlier one, whose keys the control plane remembers by their ids.
        self.key_id = key_id or f"salad-workload-2026-11-18T16:59:51.{secrets.randbelow(10**7):07d}Z"
        self._private = generate_private_key(SECP256R1())
        public = self._private.public_key().public_numbers()
        self.point = (public.x, public.y)

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message."""
        r, s = decode_dss_signature(self._private.sign(message, ECDSA(SHA256())))
        return r.to_bytes(32, "big") + s.to_bytes(32, "big")

    @property
    def jwk(self) -> dict[str, str]:
        """Public key as the provider publishes it."""
        x, y = (base64.urlsafe_b64encode(one.to_bytes(32, "big")).rstrip(b"=").decode() for one in self.point)
        return {"crv": "P-256", "x": x, "y": y, "kid": self.key_id, "kty": "EC", "use": "sig"}

"""Verify the proof of identity that a provider signs for the container of a machine.

Salad moves a container to another node without asking, with the environment that it had. There the enrolment token is
used up, and a copy of the token would look the same. Therefore a machine of Salad enrols, the first time and after each
move, with the identity token of its node's metadata service: it names the container group, which is named by the
machine's id, and the organization.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from pydantic import BaseModel, ValidationError

from baton.contract.errors import ErrorCode
from baton.contract.fleets.providers import SaladAccount
from functions.api.http.context import Context
from functions.api.machines import es256
from functions.domain.errors import Refusal
from functions.fleet.drivers.protocol import ProviderRefused, ProviderUnavailable
from functions.fleet.drivers.provider_http import ProviderHttp
from functions.fleet.records import Machine

SKEW_S = 300
"""Difference between the clocks of the provider and of this deployment; a proof lives for 300 s by itself."""
ASK_AGAIN_S = 60
"""Shortest time between two reads of the public keys. Salad changes its keys weekly, and names them in each proof."""
KEYS_TIMEOUT_S = 5.0


class Claims(BaseModel):
    """Claims of Salad's identity token that are compared."""

    salad_machine_id: str
    salad_workload_name: str
    salad_organization_name: str
    exp: int
    nbf: int


class PublicKeys:
    """Public keys of the services that sign identities, by address and id."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, es256.Point]] = {}
        self._read_at: dict[str, int] = {}

    def find(self, address: str, key_id: str, now: int) -> es256.Point | None:
        """Return a key; read the keys for an unknown id. Raises ProviderUnavailable, ProviderRefused."""
        known = self._found.get(address, {})
        if key_id not in known and now >= self._read_at.get(address, -ASK_AGAIN_S) + ASK_AGAIN_S:
            answer = ProviderHttp(address, {}, timeout_s=KEYS_TIMEOUT_S).read("GET", "")
            keys = answer.body.get("keys") if answer.ok and isinstance(answer.body, dict) else None
            if not isinstance(keys, list):
                raise ProviderUnavailable(f"{address} answers no list of keys")
            points = {str(one.get("kid")): point for one in keys if isinstance(one, dict) and (point := _point(one))}
            known = self._found[address] = points
            self._read_at[address] = now
        return known.get(key_id)


_KEYS = PublicKeys()
"""Keys of this process, which outlive a call in a warm function."""


def require_identity(context: Context, machine: Machine, proof: str | None, now: int) -> str:
    """Check that the provider signed who the caller is; return the provider's id of the caller's host.

    now: time by the server's clock, not by that of the fleets.

    Raises Refusal for a missing or a false proof, and while the provider's public keys cannot be read.
    """
    stored = context.accounts.known().get("salad") if context.accounts else None
    if stored is None or not isinstance(stored.account, SaladAccount):
        raise _refused(machine, "the deployment holds no account at salad")
    if proof is None:
        raise _refused(machine, "there is none")
    try:
        claims = _verified(stored.account.identity_keys, proof, now)
    except (ProviderUnavailable, ProviderRefused) as error:
        raise Refusal(ErrorCode.UNAVAILABLE, f"The keys of salad's identities cannot be read: {error}.") from error
    except ValueError as error:
        raise _refused(machine, str(error)) from None
    for name, expected, found in (
        ("container group", machine.id, claims.salad_workload_name),
        ("organization", stored.account.organization, claims.salad_organization_name),
    ):
        if found != expected:
            raise _refused(machine, f"it names the {name} {found!r} instead of {expected!r}")
    return claims.salad_machine_id


def _verified(address: str, proof: str, now: int) -> Claims:
    """Return the claims of a proof. Raises ValueError for a proof without a valid signature, or outside its time."""
    signed, _, signature = proof.rpartition(".")
    header, _, payload = signed.partition(".")
    algorithm, key_id = (_object(header).get(name) for name in ("alg", "kid"))
    # The proof does not choose its algorithm: `none`, or a public key in place of a secret, would be its own proof.
    if algorithm != "ES256" or not isinstance(key_id, str):
        raise ValueError("it is not signed by ES256 with a named key")
    key = _KEYS.find(address, key_id, now)
    if key is None:
        raise ValueError(f"it is signed with a key that {address} does not list")
    if not es256.verify(signed.encode(), _decode(signature), key):
        raise ValueError("its signature is false")
    try:
        claims = Claims.model_validate(_object(payload))
    except ValidationError as error:
        raise ValueError(f"the claim {error.errors()[0]['loc'][0]} is missing or not valid") from None
    if not claims.nbf - SKEW_S <= now <= claims.exp + SKEW_S:
        raise ValueError(f"it is valid from {claims.nbf} to {claims.exp}, and now is {now}")
    return claims


def _point(key: dict[str, Any]) -> es256.Point | None:
    """Return a published key; None for one of another kind."""
    if (key.get("kty"), key.get("crv")) != ("EC", "P-256"):
        return None
    try:
        return int.from_bytes(_decode(key["x"]), "big"), int.from_bytes(_decode(key["y"]), "big")
    except (KeyError, TypeError, ValueError):
        return None


def _object(text: str) -> dict[str, Any]:
    """Return the object of one part of a proof. Raises ValueError."""
    try:
        found = json.loads(_decode(text))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON web token")
    return found


def _decode(text: str) -> bytes:
    """Return the bytes of an unpadded base64url text. Raises ValueError."""
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error as error:
        raise ValueError("it is not a JSON web token") from error


def _refused(machine: Machine, problem: str) -> Refusal:
    detail = f"The proof of identity of {machine.id} is refused: {problem}."
    return Refusal(ErrorCode.IDENTITY_REFUSED, detail, field="identity")

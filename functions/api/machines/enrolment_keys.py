"""Issue the API keys with which rented machines enrol, and revoke the keys of ended machines."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from baton.contract.names import Scope
from functions.api.admin.keys import generate_key
from functions.domain.errors import WriteConflict
from functions.domain.ports import Clock, Randomness, TokenStore
from functions.fleet.clock import FleetClock
from functions.fleet.records import Machine


class EnrolmentKeys:
    """MachineKeys over the store of API keys. `api_url`: address of the API in the environment of the machines."""

    def __init__(
        self, tokens: TokenStore, random: Randomness, clock: Clock, fleet_clock: FleetClock, api_url: str | None
    ) -> None:
        self._tokens = tokens
        self._random = random
        self._clock = clock
        self._fleet_clock = fleet_clock
        self._api_url = api_url

    def issue(self, machine: Machine, expires_at: int) -> tuple[str, Mapping[str, str]]:
        """Store a new enrolment key; return its id and the environment of the machine.

        Raises RuntimeError in a deployment whose settings do not name the address of the API.
        """
        if self._api_url is None:
            raise RuntimeError("BATON_FLEET_API_URL is not set, therefore no rented machine could call the API")
        key, whole = generate_key(
            self._random,
            tenant=machine.tenant,
            name=f"enrolment of {machine.id}",
            scopes=[Scope.ENROLL],
            now=self._clock.now(),
            expires_at=self._fleet_clock.server_time(expires_at),
            machine=f"{machine.fleet}/{machine.id}",
        )
        self._tokens.put_key(key)
        return key.id, {"BATON_API_URL": self._api_url, "BATON_ENROLMENT_TOKEN": whole}

    def revoke(self, key_id: str) -> None:
        """Revoke a key; idempotent. An expired key that the store has deleted needs no revocation."""
        revoke_key(self._tokens, key_id, self._clock.now())


def revoke_key(tokens: TokenStore, key_id: str, now: int) -> None:
    """Revoke a key by the server's clock; idempotent."""
    key = tokens.get_key(key_id)
    if key is not None and key.revoked_at is None:
        with suppress(WriteConflict):
            tokens.replace_key(replace(key, revoked_at=now))


def keep_key(tokens: TokenStore, key_id: str, expires_at: int) -> None:
    """Let a key that has not been revoked be valid until `expires_at`, by the server's clock."""
    key = tokens.get_key(key_id)
    if key is not None and key.revoked_at is None:
        with suppress(WriteConflict):
            tokens.replace_key(replace(key, expires_at=expires_at))

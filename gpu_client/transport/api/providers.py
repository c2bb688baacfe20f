"""Call the API about accounts at providers, logins at registries, and the doctor of the fleets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import RootModel

from baton.contract.fleets.doctor import DoctorReport, FixAnswer, FixOutcome, FixRequest
from baton.contract.fleets.providers import Account, ProviderPage, ProviderView, reveal
from baton.contract.fleets.registries import RegistryLogin, RegistryPage, RegistryView
from baton.contract.names import ProviderName
from gpu_client.transport.api.calls import ApiCalls, segment


class _RevealedAccount(RootModel[dict[str, Any]]):
    """Fields of an account with its secrets, which the account itself serializes as asterisks."""


class ProviderCalls(ApiCalls):
    """Calls of administrators about accounts at providers. All are idempotent."""

    def put_provider(self, provider: ProviderName, account: Account) -> ProviderView:
        """Check an account and store the account in place of an earlier one; return the view without secrets."""
        body = _RevealedAccount(reveal(account))
        return self._read(ProviderView, "put_provider", "PUT", _provider(provider), body=body)

    def providers(self) -> list[ProviderView]:
        """Return the stored accounts as of their last check."""
        return self._read(ProviderPage, "providers", "GET", "/providers").providers

    def remove_provider(self, provider: str) -> None:
        """Remove an account. Raises NotFound, and Conflict while the account lists machines of the deployment."""
        self._send("remove_provider", "DELETE", _provider(provider))

    def put_registry(self, registry: str, login: RegistryLogin) -> RegistryView:
        """Store a login in place of an earlier one at the registry; return the view without the password."""
        body = _RevealedAccount(reveal(login))
        return self._read(RegistryView, "put_registry", "PUT", _registry(registry), body=body)

    def registries(self) -> list[RegistryView]:
        """Return the registries at which the tenant's machines log in."""
        return self._read(RegistryPage, "registries", "GET", "/registries").registries

    def remove_registry(self, registry: str) -> None:
        """Remove a login. Raises NotFound."""
        self._send("remove_registry", "DELETE", _registry(registry))

    def examine_fleets(self) -> DoctorReport:
        """Return what the doctor of the fleets finds; changes nothing."""
        return self._read(DoctorReport, "examine_fleets", "GET", "/fleet-doctor")

    def fix_findings(self, findings: Sequence[str]) -> list[FixOutcome]:
        """Fix findings by their ids; return the outcomes."""
        body = FixRequest(findings=list(findings))
        return self._read(FixAnswer, "fix_findings", "POST", "/fleet-doctor/fix", body=body).outcomes


def _registry(name: str) -> str:
    return f"/registries/{segment(name)}"


def _provider(name: str) -> str:
    return f"/providers/{segment(name)}"

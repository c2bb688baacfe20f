"""The calls of users to one machine: its output, its shell."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import MachineState
from functions.fleet.accounts import CachedAccounts
from functions.fleet.drivers.configured import ConfiguredDrivers
from functions.fleet.drivers.protocol import ProviderRefused, ProviderUnavailable, RefusalKind, SshTarget
from tests.kits.api.fleets import DOCUMENT, make_machine, put_machine
from tests.kits.api.harness import Api
from tests.twins.accounts import MemoryAccounts
from tests.twins.provider import VirtualProvider

JOB = "146683a1-cb76-4702-9fef-fcccd32594f1"
PLACE = "/fleets/nights/machines/m1"


@dataclass
class ReachedProvider(VirtualProvider):
    """Provider with one text and one address for all machines."""

    text: str | None = None
    target: SshTarget | None = None
    failure: ProviderRefused | ProviderUnavailable | None = None
    asked: str = ""

    def logs(self, handle: str) -> str | None:
        self.asked = handle
        if self.failure:
            raise self.failure
        return self.text

    def ssh_target(self, handle: str) -> SshTarget | None:
        self.asked = handle
        return self.target


@pytest.fixture
def provider(api: Api) -> ReachedProvider:
    made = ReachedProvider()
    api.context = replace(api.context, drivers={"loopback": made})
    api.call("PUT", "/fleets/nights", DOCUMENT).ok()
    return made


def test_the_output_of_a_machine_is_told_without_keys_and_without_end(api: Api, provider: ReachedProvider) -> None:
    put_machine(api, make_machine("m1", MachineState.BUSY, job_id=JOB))
    assert api.get(f"{PLACE}/logs").ok() == {"text": None, "job_id": JOB}
    provider.text = "x" * 70_000 + "started with baton_k1d2_s-ecre_t and baton fleet\n"
    told = api.get(f"{PLACE}/logs").ok()["text"]
    assert told.endswith("started with [removed] and baton fleet\n") and len(told) == 64 * 1024
    assert provider.asked == "h-m1"


def test_a_damaged_secret_of_accounts_is_named(api: Api, provider: ReachedProvider) -> None:
    put_machine(api, make_machine("m1", MachineState.READY))
    accounts = MemoryAccounts()
    accounts.damaged = True
    drivers = ConfiguredDrivers(CachedAccounts(accounts, api.clock.now), loopback_directory=None, now=api.clock.now)
    api.context = replace(api.context, drivers=drivers)
    for call in ("logs", "shell"):
        assert "delete it" in api.get(f"{PLACE}/{call}").refused(ErrorCode.CONFLICT)["message"]


def test_an_ended_machine_keeps_its_output_and_has_no_shell(api: Api, provider: ReachedProvider) -> None:
    put_machine(api, make_machine("m1", MachineState.GONE))
    provider.text, provider.target = "exit 1", SshTarget(host="h", port=22, user="u")
    assert api.get(f"{PLACE}/logs").ok()["text"] == "exit 1"
    api.get(f"{PLACE}/shell").refused(ErrorCode.MACHINE_HAS_NO_SHELL, "machine")


def test_the_shell_of_a_machine_is_an_address_that_is_safe_as_an_argument(api: Api, provider: ReachedProvider) -> None:
    put_machine(api, make_machine("m1", MachineState.READY))
    api.get(f"{PLACE}/shell").refused(ErrorCode.MACHINE_HAS_NO_SHELL, "machine")
    provider.target = SshTarget(host="203.0.113.7", port=40022, user="root")
    assert api.get(f"{PLACE}/shell").ok() == {"host": "203.0.113.7", "port": 40022, "user": "root"}
    for hostile in ({"host": "-oProxyCommand=x"}, {"user": "-oProxyCommand=x"}, {"host": "a b"}, {"port": 0}):
        provider.target = SshTarget(**{"host": "h", "port": 22, "user": "u", **hostile})  # type: ignore[arg-type]
        api.get(f"{PLACE}/shell").refused(ErrorCode.PROVIDER_UNAVAILABLE)


def test_a_machine_without_a_contract_has_neither(api: Api, provider: ReachedProvider) -> None:
    put_machine(api, make_machine("m1", MachineState.PLANNED, handle=None))
    assert api.get(f"{PLACE}/logs").ok() == {"text": None, "job_id": None}
    api.get(f"{PLACE}/shell").refused(ErrorCode.MACHINE_HAS_NO_SHELL, "machine")


def test_unknown_machines_missing_accounts_and_silent_providers_have_codes(api: Api, provider: ReachedProvider) -> None:
    put_machine(api, make_machine("m1", MachineState.READY))
    for call in ("logs", "shell"):
        for name in ("m2", "M1", "%C3%BC", "m" * 61):
            api.get(f"/fleets/nights/machines/{name}/{call}").refused(ErrorCode.MACHINE_NOT_FOUND, "machine")
        api.get(f"/fleets/days/machines/m1/{call}").refused(ErrorCode.FLEET_NOT_FOUND, "fleet")
        api.get(f"{PLACE}/{call}", key="rival_submit").refused(ErrorCode.FLEET_NOT_FOUND, "fleet")
    provider.failure = ProviderUnavailable("desk: cannot be reached")
    api.get(f"{PLACE}/logs").refused(ErrorCode.PROVIDER_UNAVAILABLE)
    provider.failure = ProviderRefused(RefusalKind.KEY, "the key is revoked")
    error = api.get(f"{PLACE}/logs").refused(ErrorCode.PROVIDER_KEY_REFUSED)
    assert error["message"].startswith("loopback: the key is revoked.")
    api.context = replace(api.context, drivers={})
    for call in ("logs", "shell"):
        api.get(f"{PLACE}/{call}").refused(ErrorCode.PROVIDER_NOT_FOUND, "machine")

"""The calls about logins at registries: stored without a trace, used for the machines of their own tenant alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.fleets.providers import reveal
from fakes.vast.provider import FakeVast
from functions.api.fleet import registry_calls
from functions.fleet.accounts import CachedAccounts, SecretsFull, StoredSecrets
from functions.fleet.drivers.vast import driver
from functions.handlers import fleet
from tests.conformance.drivers.driven_vast import vast_account
from tests.functional.api.test_sweeper import Invocation
from tests.kits.api.fleets import deploy_controller
from tests.kits.api.harness import NOW, Answer, Api
from tests.twins.accounts import MemoryAccounts

PASSWORD = "canary-5e1f0c2d9b7a4e3f"
LOGIN = {"username": "acme", "password": PASSWORD}
IMAGE = "ghcr.io/acme/trainer:1"
DOCUMENT = {
    "name": "nights",
    "providers": ["vast"],
    "image": IMAGE,
    "max_usd_per_hour": 0.6,
    "budget": {"total_usd": 20},
}


@pytest.fixture
def vast(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVast]:
    """Provide Vast.ai to a deployed controller, with an account."""
    with FakeVast(api.clock.now) as fake:
        fake.boot_s = fake.visible_after_s = 0
        fake.intervals_s.clear()
        monkeypatch.setattr(driver, "LIST_INTERVAL_S", 0.0)
        deploy_controller(api, monkeypatch)
        api.call("PUT", "/providers/vast", reveal(vast_account(fake))).ok()
        yield fake


def log_in(api: Api, registry: str = "ghcr.io", key: str = "admin") -> Answer:
    return api.call("PUT", f"/registries/{registry}", LOGIN, key=key)


def rent(api: Api, key: str = "submit", name: str = "nights") -> None:
    api.call("PUT", f"/fleets/{name}", {**DOCUMENT, "name": name}, key=key).ok()
    api.post("/job", {"command": ["train"]}, key=key).ok()
    api.clock.advance(60)
    fleet.handler({}, Invocation(55))


def test_a_login_is_stored_shown_without_its_password_and_removed(api: Api, vast: FakeVast) -> None:
    view = log_in(api).ok()
    assert view == {"registry": "ghcr.io", "username": "acme", "stored_at": NOW}
    log_in(api, "localhost:5000").ok()
    answer = api.get("/registries", key="admin")
    assert [one["registry"] for one in answer.ok()["registries"]] == ["ghcr.io", "localhost:5000"]
    assert PASSWORD not in answer.text
    assert api.get("/providers").ok()["providers"][0]["provider"] == "vast", "the account stays"
    assert api.call("DELETE", "/registries/ghcr.io").status == 204
    api.call("DELETE", "/registries/ghcr.io").refused(ErrorCode.REGISTRY_NOT_FOUND, "registry")
    api.call("DELETE", "/registries/Not%20A%20Host").refused(ErrorCode.REGISTRY_NOT_FOUND, "registry")
    assert [one["registry"] for one in api.get("/registries").ok()["registries"]] == ["localhost:5000"]


def test_a_login_serves_the_machines_of_its_own_tenant_alone(api: Api, vast: FakeVast) -> None:
    """Another tenant whose fleet names the image would otherwise read what is private in the image."""
    log_in(api).ok()
    assert api.get("/registries", key="rival_admin").ok() == {"registries": []}
    api.call("DELETE", "/registries/ghcr.io", key="rival_admin").refused(ErrorCode.REGISTRY_NOT_FOUND, "registry")
    rent(api)
    rent(api, "rival_submit", "foreign")
    ours, foreign = sorted(vast.instances, key=lambda one: "foreign" in one.body["label"])
    assert ours.body["image_login"] == f"-u acme -p {PASSWORD} ghcr.io"
    assert "image_login" not in foreign.body and foreign.body["image"] == IMAGE
    assert PASSWORD not in str([one.environment for one in vast.instances])
    for path in ("/fleets/nights", "/fleets/nights/events", "/fleets"):
        assert PASSWORD not in api.get(path).text


def test_the_next_machine_pulls_with_the_login_of_the_moment(api: Api, vast: FakeVast) -> None:
    rent(api)
    assert "image_login" not in vast.instances[-1].body
    log_in(api).ok()
    api.call("PUT", "/fleets/nights", {**DOCUMENT, "max": 2}).ok()
    rent(api, name="more")
    assert "image_login" in vast.instances[-1].body
    api.call("DELETE", "/registries/ghcr.io").ok(204)
    rent(api, name="last")
    assert len(vast.instances) == 3 and "image_login" not in vast.instances[-1].body


def test_a_fleet_of_ec2_says_that_its_machines_do_not_log_in(api: Api, vast: FakeVast) -> None:
    document = {**DOCUMENT, "providers": ["vast", "ec2"]}
    no_account = "ec2: no account is stored; run 'baton fleet login ec2'"
    assert api.call("PUT", "/fleets/nights", document).ok()["warnings"] == [no_account]
    log_in(api).ok()
    warnings = api.call("PUT", "/fleets/nights", document).ok()["warnings"]
    assert warnings[0] == no_account and warnings[1].startswith("ec2: machines do not log in at ghcr.io: ")
    public = {**document, "image": "acme/trainer:1"}
    assert api.call("PUT", "/fleets/nights", public).ok()["warnings"] == [no_account]


def test_logins_have_bounds(api: Api, vast: FakeVast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_calls, "MAX_LOGINS", 1)
    log_in(api).ok()
    assert "has 1 logins" in log_in(api, "docker.io").refused(ErrorCode.CONFLICT, "registry")["message"]
    log_in(api).ok()
    log_in(api, "docker.io", key="rival_admin").ok()
    for wrong, field in (({"username": "a\nb"}, "username"), ({"password": ""}, "password"), ({"token": "x"}, "token")):
        error = api.call("PUT", "/registries/ghcr.io", {**LOGIN, **wrong})
        error.refused(ErrorCode.UNKNOWN_FIELD if field == "token" else ErrorCode.INVALID_VALUE, field)
        assert PASSWORD not in error.text

    class Full(MemoryAccounts):
        def write(self, secrets: StoredSecrets) -> None:
            raise SecretsFull("all accounts and logins together have 70000 of 65536 bytes")

    assert isinstance(api.context.accounts, CachedAccounts)
    monkeypatch.setattr(api.context.accounts, "_store", Full())
    assert "remove an unused account" in log_in(api).refused(ErrorCode.CONFLICT)["message"]
    account = api.call("PUT", "/providers/vast", reveal(vast_account(vast)))
    assert "have 70000 of 65536 bytes" in account.refused(ErrorCode.CONFLICT)["message"]


def test_a_damaged_secret_is_named(api: Api, vast: FakeVast, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = MemoryAccounts()
    damaged.damaged = True
    monkeypatch.setattr(api.context.accounts, "_store", damaged)
    api.clock.advance(301)
    for method, path, body in (
        ("GET", "/registries", None),
        ("PUT", "/registries/ghcr.io", LOGIN),
        ("DELETE", "/registries/ghcr.io", None),
    ):
        assert "holds no JSON object" in api.call(method, path, body).refused(ErrorCode.CONFLICT)["message"]

"""Logins at the registries of private images: which registry an image has, and what each provider is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from baton.contract.fleets.registries import RegistryLogin, registry_of
from fakes.server import FakeAnswer, FakeCall
from functions.fleet.drivers.protocol import CreateIntent, CreateResult, NotCreated, RefusalKind
from tests.conformance.drivers.driver_kit import ENVIRONMENT, IMAGE, LOGIN, PASSWORD, PREFIX, PROVIDERS, SPEC

CREATES = {
    "vast": "/api/v0/asks/",
    "salad": "/api/public/organizations/acme/projects/training/containers",
    "runpod": "/v2/pods",
}


@pytest.mark.parametrize(
    ("image", "registry"),
    [
        ("ghcr.io/acme/trainer:1", "ghcr.io"),
        ("acme/trainer", "docker.io"),
        ("python:3.11", "docker.io"),
        ("docker.io/acme/trainer", "docker.io"),
        ("index.docker.io/acme/trainer", "docker.io"),
        ("localhost/trainer", "localhost"),
        ("registry.example:5000/trainer@sha256:0", "registry.example:5000"),
        ("1.dkr.ecr.eu-central-1.amazonaws.com/t", "1.dkr.ecr.eu-central-1.amazonaws.com"),
    ],
)
def test_an_image_names_its_registry_as_docker_reads_it(image: str, registry: str) -> None:
    assert registry_of(image) == registry


@dataclass
class Renting:
    """A provider with its fake."""

    name: str
    driven: Any

    def create(self, image: str = IMAGE, login: RegistryLogin | None = LOGIN, number: int = 1) -> CreateResult:
        offer = min(self.driven.driver.quote(SPEC), key=lambda one: one.usd_per_hour)
        intent = CreateIntent(
            token=f"{PREFIX}nights-{number}",
            offer=offer,
            image=image,
            disk_gib=10,
            environment=ENVIRONMENT,
            max_usd_per_hour=5,
            login=login,
        )
        assert PASSWORD not in repr(intent)
        result: CreateResult = self.driven.driver.create(intent)
        return result

    def bodies(self) -> list[dict[str, Any]]:
        """Return the bodies of the creates."""
        calls = [one for one in self.driven.fake.calls if one.method in ("PUT", "POST")]
        return [one.json() for one in calls if one.path.startswith(CREATES[self.name])]


@pytest.fixture
def renting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Renting]:
    driven = PROVIDERS[request.param](tmp_path)
    yield Renting(request.param, driven)
    driven.close()


def for_each(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("renting", names, indirect=True)


@for_each("vast")
def test_vast_logs_in_with_the_options_of_docker_login(renting: Renting) -> None:
    renting.create("ghcr.io/acme/trainer:1")
    renting.create("acme/trainer:1", number=2)
    renting.create("acme/trainer:1", login=None, number=3)
    assert [one.get("image_login") for one in renting.bodies()] == [
        f"-u acme -p {PASSWORD} ghcr.io",
        f"-u acme -p {PASSWORD} docker.io",
        None,
    ]


@for_each("vast")
@pytest.mark.parametrize(("user", "password"), [("acme", "two words"), ("acme", "it's"), ("a b", "x"), ("a", "$(x)")])
def test_a_login_that_a_shell_would_read_otherwise_is_not_sent(renting: Renting, user: str, password: str) -> None:
    result = renting.create(login=RegistryLogin(username=user, password=SecretStr(password)))
    assert isinstance(result, NotCreated) and result.kind is RefusalKind.IMAGE
    assert "`baton fleet login`" in result.reason and password not in result.reason.replace("x", "")
    assert renting.bodies() == []


@for_each("salad")
def test_salad_gets_the_login_in_the_form_of_its_registry_and_shows_it_to_nobody(renting: Renting) -> None:
    renting.create("ghcr.io/acme/trainer:1")
    renting.create("acme/trainer:1", number=2)
    renting.create("acme/trainer:1", login=None, number=3)
    assert [one["container"].get("registry_authentication") for one in renting.bodies()] == [
        {"basic": {"username": "acme", "password": PASSWORD}},
        {"docker_hub": {"username": "acme", "personal_access_token": PASSWORD}},
        None,
    ]
    # A create whose answer was lost is resolved by the group as Salad shows it, which has no login.
    assert renting.create("ghcr.io/acme/trainer:1") == renting.create("ghcr.io/acme/trainer:1")


@for_each("runpod")
def test_runpod_keeps_one_login_for_each_registry_and_gets_a_changed_one(renting: Renting) -> None:
    fake = renting.driven.fake
    renting.create("ghcr.io/acme/trainer:1")
    renting.create("ghcr.io/acme/other:2", number=2)
    renting.create("acme/trainer:1", number=3)
    renting.create("acme/public:1", login=None, number=4)
    first, again, hub, none = (one.get("registry") for one in renting.bodies())
    assert first == again and none is None and set(fake.registries) == {first, hub}
    assert {one["username"] for one in fake.registries.values()} == {"acme"}
    assert {one["password"] for one in fake.registries.values()} == {PASSWORD}
    assert all(one["name"].startswith(PREFIX) and PASSWORD not in one["name"] for one in fake.registries.values())

    fake.registries["foreign"] = {"name": "dep20000-ghcr.io-0", "username": "u", "password": "p"}
    changed = RegistryLogin(username="acme", password=SecretStr("another"))
    renting.create("ghcr.io/acme/trainer:1", login=changed, number=5)
    # Pods with the former login run on, therefore RunPod keeps the login.
    assert fake.registries[renting.bodies()[-1]["registry"]]["password"] == "another" and first in fake.registries
    for pod in fake.exists():
        renting.driven.driver.destroy(pod.id)
    renting.create("ghcr.io/acme/trainer:1", login=RegistryLogin(username="acme", password=SecretStr("3rd")), number=6)
    assert sorted(one["password"] for one in fake.registries.values()) == sorted(["3rd", PASSWORD, "p"])


@for_each("runpod")
@pytest.mark.parametrize(("fault", "kind"), [("lost", None), ("500", None), ("401", RefusalKind.KEY)])
def test_no_pod_is_made_while_runpod_does_not_keep_its_login(renting: Renting, fault: Any, kind: object) -> None:
    renting.driven.fake.inject(fault, "POST /v2/registries")
    result = renting.create("ghcr.io/acme/trainer:1")
    assert isinstance(result, NotCreated) and result.kind is kind
    assert renting.bodies() == [] and PASSWORD not in repr(result)
    renting.create("ghcr.io/acme/trainer:1", number=2)
    assert len(renting.driven.fake.registries) == 1 and len(renting.bodies()) == 1


@pytest.mark.parametrize(
    ("renting", "password"),
    [("vast", PASSWORD), *((name, one) for name in ("salad", "runpod") for one in (PASSWORD, 'ghp_"quoted\\'))],
    indirect=["renting"],
)
def test_a_provider_that_repeats_the_password_tells_nobody(
    renting: Renting, password: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, sent = renting.driven.fake.answer, json.dumps(password)[1:-1]

    def repeat(call: FakeCall) -> FakeAnswer:
        body = call.raw.decode()
        if sent not in body:
            return answer(call)  # type: ignore[no-any-return]
        return FakeAnswer(400, {"detail": f"bad body {body}", "msg": f"bad {password}", "error": password})

    monkeypatch.setattr(renting.driven.fake, "answer", repeat)
    result = renting.create(login=RegistryLogin(username="acme", password=SecretStr(password)))
    assert isinstance(result, NotCreated) and "[password]" in result.reason
    assert password not in result.reason and sent not in result.reason

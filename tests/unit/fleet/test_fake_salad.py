"""Test the fake of Salad where no test of the driver does: its strictness, its moves, and its metadata service."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3

from fakes.salad.api import MERGE_PATCH, RTX_4090, FakeSalad
from fakes.salad.imds import FakeImds
from fakes.salad.signing_key import WorkloadKey
from tests.kits.clock import Clock

PAGE = Path(__file__).resolve().parents[3] / "docs" / "providers" / "salad.md"
ORGANIZATION = "/organizations/acme"
GROUPS = f"{ORGANIZATION}/projects/training/containers"
BODY: dict[str, Any] = {
    "name": "mine",
    "replicas": 2,
    "restart_policy": "always",
    "autostart_policy": True,
    "container": {"image": "i", "resources": {"cpu": 4, "memory": 4096, "gpu_classes": [RTX_4090]}},
}


class Caller:
    """HTTP calls to the fake, past the driver."""

    def __init__(self, fake: FakeSalad) -> None:
        self.fake = fake
        self._pool = urllib3.PoolManager(retries=False)

    def send(self, method: str, path: str, body: Any = None, *, kind: str = "application/json") -> tuple[int, Any]:
        headers = {"Salad-Api-Key": self.fake.api_key, **({} if body is None else {"Content-Type": kind})}
        data = None if body is None else json.dumps(body)
        answer = self._pool.request(method, self.fake.address + path, body=data, headers=headers)
        return answer.status, json.loads(answer.data) if answer.data else None

    def states(self, name: str = "mine") -> list[str]:
        return sorted(one["state"] for one in self.send("GET", f"{GROUPS}/{name}/instances")[1]["instances"])


@pytest.fixture
def clock() -> Clock:
    return Clock(1_700_000_000)


@pytest.fixture
def salad(clock: Clock) -> Iterator[Caller]:
    with FakeSalad(clock) as fake:
        yield Caller(fake)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"names": "mine"}, "names is not a field"),
        ({"name": "Mine"}, "name must have 2 to 63 characters"),
        ({"replicas": 501}, "replicas must be a whole number from 0 to 500"),
        ({"replicas": True}, "replicas must be a whole number"),
        ({"country_codes": ["DE"]}, "country_codes[0] must have 2 to 2 characters"),
        ({"restart_policy": "sometimes"}, "restart_policy must be one of always, on_failure, never"),
        ({"container": {"image": "i"}}, "container.resources is required"),
        (
            {"container": {**BODY["container"], "environment_variables": {"A": "a" * 1001}}},
            "container.environment_variables.A must have 1 to 1000 characters",
        ),
        (
            {"container": {"image": "i", "resources": {"cpu": 0, "memory": 1}}},
            "container.resources.cpu must be a whole number from 1 to 1024; container.resources.memory must be",
        ),
        ({"container": {**BODY["container"], "priority": "highest"}}, "container.priority must be one of high"),
        (
            {"container": {"image": "i", "resources": {"cpu": 1, "memory": 1024, "storage_amount": 50}}},
            "container.resources.storage_amount must be a whole number from 1073741824",
        ),
        (
            {"container": {"image": "i", "resources": {"cpu": 1, "memory": 1024, "gpu_classes": ["0" * 36]}}},
            "container.resources.gpu_classes[0] must have 36 to 36 characters",
        ),
    ],
)
def test_a_field_beyond_the_document_is_refused(salad: Caller, change: dict[str, Any], problem: str) -> None:
    status, said = salad.send("POST", GROUPS, {**BODY, **change})
    assert (status, said["type"]) == (400, "validation_error") and problem in said["detail"]
    assert salad.fake.cloud.groups == {}


def test_the_group_of_the_page_is_accepted_and_scaled(salad: Caller) -> None:
    (text,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    group = json.loads(text)
    group["container"]["resources"]["gpu_classes"] = [RTX_4090]
    assert salad.send("POST", GROUPS, group)[0] == 201
    (patch,) = re.findall(r"--data '(.*?)'", PAGE.read_text())
    status, said = salad.send("PATCH", f"{GROUPS}/{group['name']}", json.loads(patch), kind=MERGE_PATCH)
    assert (status, said["replicas"]) == (200, 0)


def test_a_patch_needs_its_content_type_and_waits_for_the_one_before(salad: Caller, clock: Clock) -> None:
    salad.send("POST", GROUPS, BODY)
    clock.advance(400)
    one = f"{GROUPS}/mine"
    assert salad.send("PATCH", one, {"replicas": 3})[0] == 415
    assert salad.send("PATCH", one, {"name": "other"}, kind=MERGE_PATCH)[0] == 400
    status, said = salad.send("PATCH", one, {"container": {"image": "j"}}, kind=MERGE_PATCH)
    assert (status, said["version"], said["pending_change"]) == (200, 2, True)
    # Another image restarts all instances at once.
    assert salad.states() == ["creating", "creating"] and salad.fake.billing() == []
    status, said = salad.send("PATCH", one, {"replicas": 3}, kind=MERGE_PATCH)
    assert (status, said["type"]) == (400, "pending_change")
    clock.advance(60)
    assert salad.send("PATCH", one, {"replicas": 3}, kind=MERGE_PATCH)[0] == 200
    assert salad.states() == ["allocating", "running", "running"]


def test_a_scale_down_spares_the_instance_with_the_higher_deletion_cost(salad: Caller, clock: Clock) -> None:
    salad.send("POST", GROUPS, BODY)
    clock.advance(400)
    spared = salad.send("GET", f"{GROUPS}/mine/instances")[1]["instances"][0]["id"]
    place = f"{GROUPS}/mine/instances/{spared}"
    assert salad.send("PATCH", place, {"deletion_cost": 100_001}, kind=MERGE_PATCH)[0] == 400
    assert salad.send("PATCH", place, {"deletion_cost": 5}, kind=MERGE_PATCH)[1]["deletion_cost"] == 5
    salad.send("PATCH", f"{GROUPS}/mine", {"replicas": 1}, kind=MERGE_PATCH)
    assert salad.states() == ["running", "stopping"]
    clock.advance(30)
    assert salad.send("GET", place) == (202, salad.send("GET", f"{GROUPS}/mine/instances")[1]["instances"][0])


def test_a_group_stops_starts_and_is_deleted_once(salad: Caller, clock: Clock) -> None:
    salad.send("POST", GROUPS, BODY)
    clock.advance(400)
    assert salad.send("POST", f"{GROUPS}/mine/start")[0] == 400
    assert salad.send("POST", f"{GROUPS}/mine/stop") == (202, None)
    state = salad.send("GET", f"{GROUPS}/mine")[1]["current_state"]
    assert (state["status"], state["instance_status_counts"]["stopping_count"]) == ("stopped", 2)
    clock.advance(30)
    assert salad.states() == []
    assert salad.send("POST", f"{GROUPS}/mine/start") == (202, None)
    assert salad.states() == ["allocating", "allocating"]
    assert salad.send("DELETE", f"{GROUPS}/mine") == (202, None)
    clock.advance(30)
    assert salad.send("DELETE", f"{GROUPS}/mine")[0] == 404


def test_reallocations_have_a_quota_and_exits_a_place(salad: Caller, clock: Clock) -> None:
    salad.send("POST", GROUPS, {**BODY, "replicas": 1})
    clock.advance(400)
    group = salad.fake.group("mine")
    (instance,) = group.instances
    node = instance.machine_id
    salad.fake.cloud.exit(group, instance, 0)
    assert (instance.machine_id, instance.state) == (node, "creating")
    clock.advance(10)
    salad.fake.cloud.settle()
    salad.fake.cloud.exit(group, instance, 137)
    assert instance.machine_id != node and group.blocked == {node}
    path = f"{GROUPS}/mine/instances/{instance.id}/reallocate"
    assert salad.send("POST", path, {"reason": "slow disk"})[0] == 400, "that is a field of the metadata service"
    assert salad.send("POST", f"{GROUPS}/mine/instances/none/reallocate")[0] == 404
    for allowed in [202] * 10 + [429]:
        moved = salad.send("POST", f"{GROUPS}/mine/instances/{instance.id}/reallocate")
        assert moved[0] == allowed
    clock.advance(61)
    assert salad.send("POST", f"{GROUPS}/mine/instances/{instance.id}/recreate") == (202, None)


def test_the_metadata_service_demands_its_header_and_no_proxy(salad: Caller, clock: Clock) -> None:
    salad.send("POST", GROUPS, {**BODY, "replicas": 1})
    clock.advance(400)
    pool, key = urllib3.PoolManager(retries=False), WorkloadKey()
    with FakeImds(salad.fake, "mine", sign=key.sign, key_id=key.key_id) as imds:

        def ask(method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
            data = None if body is None else json.dumps(body)
            answer = pool.request(method, imds.url + path, body=data, headers=headers)
            return answer.status, json.loads(answer.data) if answer.data else None

        true = {"Metadata": "true"}
        for headers in ({}, {"Metadata": "false"}, {**true, "X-Forwarded-For": "10.0.0.1"}):
            assert ask("GET", "/v1/token", **headers)[0] == 403
        assert ask("GET", "/v1/status", **true) == (200, {"ready": True, "started": True})
        assert ask("PUT", "/v1/deletion-cost", {"deletion_cost": 999_999_999}, **true)[0] == 204
        assert ask("GET", "/v1/deletion-cost", **true)[1] == {"deletion_cost": 999_999_999}
        node = salad.fake.environment("mine")["SALAD_MACHINE_ID"]
        assert ask("POST", "/v1/reallocate", {}, **true)[0] == 400
        assert ask("POST", "/v1/reallocate", {"reason": "slow disk"}, **true)[0] == 204
        assert salad.fake.environment("mine")["SALAD_MACHINE_ID"] != node

"""Compare the fake and the driver with RunPod's own OpenAPI document of the API v2.

The client for Python (`runpod` 1.x) calls pods by GraphQL alone, therefore no call of that client reaches the API v2.
The document is the vendor's word on the API instead: both sides of each call must match its schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from fakes.server import FakeAnswer, FakeCall
from tests.conformance.drivers.driven_runpod import RunpodDriven
from tests.conformance.drivers.driver_kit import PREFIX, SPEC, create, inventory

DOCUMENT = json.loads((Path(__file__).parent / "runpod-v2.json").read_text())
ANSWERS = {
    "GET /v2/pods": "ListPodsResponse",
    "POST /v2/pods": "Pod",
    "GET /v2/catalog/gpus": "ListGpuTypesResponse",
    "GET /v2/billing/pods": "ListPodBillingResponse",
}


@cache
def schema(name: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    )


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunpodDriven, list[str]]]:
    """A fake of which each call and answer is compared; the list names the compared ones."""
    driven, compared = RunpodDriven(tmp_path), []
    answer = driven.fake.answer

    def compare(call: FakeCall) -> FakeAnswer:
        found, place = answer(call), f"{call.method} {call.path}"
        path = "/v2/pods/{id}/logs" if call.path.endswith("/logs") else call.path
        for name, value in call.query.items() if call.method == "GET" else ():
            parameter = DOCUMENT["parameters"][path][name]
            whole = {**parameter, "components": DOCUMENT["components"]}
            jsonschema_rs.Draft202012Validator(whole).validate(typed(value, parameter))
        if found.status >= 400:
            schema("ErrorResponse").validate(found.body)
            compared.append(str(found.status))
        elif place in ANSWERS:
            schema(ANSWERS[place]).validate(found.body)
            compared.append(place)
        if call.method == "POST" and found.status != 422:
            schema("CreatePodRequest").validate(call.json())
        return found

    monkeypatch.setattr(driven.fake, "answer", compare)
    yield driven, compared
    driven.close()


def typed(value: str, parameter: dict[str, Any]) -> object:
    """Return the value of a parameter as the type that its schema names."""
    if parameter.get("type") == "array":
        return value.split(",")
    return int(value) if parameter.get("type") == "integer" else value


def test_calls_of_the_driver_and_answers_of_the_fake_match_the_vendors_document(
    seen: tuple[RunpodDriven, list[str]],
) -> None:
    driven, compared = seen
    create(driven)
    inventory(driven)
    driven.advance(60)
    (running,) = inventory(driven).sightings
    driven.driver.logs(running.handle)
    driven.driver.charged_usd(running.handle)
    driven.end(running.token)
    driven.driver.examine(PREFIX)
    driven.inject("snatched")
    create(driven)
    driven.fake.credit_usd = 0.3
    create(driven)
    driven.driver.quote(SPEC)
    driven.driver.destroy("no-such-pod")
    assert set(compared) == {*ANSWERS, "400", "402", "404"}


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        ({}, True),
        ({"gpu": {"id": "NVIDIA A40", "minCudaVersion": "12.8"}}, True),
        ({"mounts": {"persistent": {"size": 10, "path": "/workspace"}}}, True),
        ({"gpuTypeIds": ["NVIDIA A40"]}, False),
        ({"interruptible": True}, False),
        ({"gpu": {"id": "NVIDIA A40", "gpuCount": 1}}, False),
        ({"gpu": {"id": "NVIDIA A40", "count": 0}}, False),
        ({"disk": 0}, False),
        ({"disk": "50"}, False),
        ({"env": {"PORT": 1}}, False),
        ({"ports": "22/tcp"}, False),
        ({"name": ""}, False),
        ({"cloud": "ALL"}, False),
        ({"mounts": {"persistent": {"size": 5, "path": "/workspace"}}}, False),
    ],
)
def test_the_fake_refuses_a_body_exactly_where_the_vendors_document_does(
    tmp_path: Path, body: dict[str, Any], fits: bool
) -> None:
    whole = {"name": "a", "image": "b", "gpu": {"id": "NVIDIA A40"}, **body}
    assert schema("CreatePodRequest").is_valid(whole) == fits
    driven = RunpodDriven(tmp_path)
    headers = {"authorization": f"Bearer {driven.fake.key}", "content-type": "application/json"}
    answer = driven.fake.answer(FakeCall("POST", "/v2/pods", {}, headers, json.dumps(whole).encode()))
    assert (answer.status == 201) == fits and (answer.status in (201, 422)), answer
    driven.close()

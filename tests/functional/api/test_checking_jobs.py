"""Check a job without submitting: the refusals of a submission, and what the recipe adds; nothing is stored."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from tests.kits.api.harness import Api

RENT = {"budget_usd": 5, "providers": ["loopback"]}


def test_a_sound_job_is_completed_and_not_stored(api: Api) -> None:
    rules = "rules: [{name: silent, when: heartbeat.age > 9d, do: {stop: failed}}]"
    with api.unchanged():
        found = api.post("/jobs/check", {"recipe": "digits@1", "rules": rules, "requirements": {"min_gpus": 1}}).ok()
        api.post("/jobs/check", {"command": ["train"], "rent": RENT}).ok()
    assert found["outputs"] == ["model.safetensors", "predictions.json"]
    assert found["requirements"]["min_gpus"] == 1
    assert [(one["field"], one["code"]) for one in found["warnings"]] == [("rules.0.when", "never_fires")]
    assert api.get("/jobs").ok() == []


@pytest.mark.parametrize(
    ("job", "code", "field"),
    [
        ({"command": []}, ErrorCode.INVALID_VALUE, "command"),
        ({"recipe": "absent@1"}, ErrorCode.UNKNOWN_RECIPE, "recipe"),
        ({"recipe": "digits@1", "parameters": {"steps": 0}}, ErrorCode.INVALID_VALUE, "parameters.steps"),
        ({"command": ["a"], "rules": "rules: [{}]"}, ErrorCode.INVALID_RULES, "rules"),
        ({"command": ["a"], "webhook": "abcdefgh"}, ErrorCode.WEBHOOK_NOT_FOUND, "webhook"),
        ({"command": ["a"], "queue": "rent-12345678"}, ErrorCode.INVALID_VALUE, "queue"),
        ({"command": ["a"], "queue": "a", "rent": RENT}, ErrorCode.INVALID_VALUE, "queue"),
        (
            {"command": ["a"], "rent": {**RENT, "providers": ["vast"]}},
            ErrorCode.INVALID_VALUE,
            "requirements.image",
        ),
    ],
)
def test_a_check_refuses_what_a_submission_refuses(api: Api, job: dict[str, Any], code: ErrorCode, field: str) -> None:
    with api.unchanged():
        checked, submitted = api.post("/jobs/check", job), api.post("/job", job)
    assert (checked.status, checked.error["code"], checked.error["field"]) == (code.status, code.value, field)
    same = ("code", "field", "message", "problems")
    assert [checked.error.get(name) for name in same] == [submitted.error.get(name) for name in same]

"""Reports of rules at full size fit into items and one transaction."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.worker.control import MAX_DECISIONS, MAX_OPERAND_CHARS, MAX_STATUS_CHARS, MAX_STATUSES
from tests.kits.api.harness import Api


def full(filler: str, longest: int) -> dict[str, Any]:
    """`filler`: a character of which all texts are made."""
    operands = {(f"{number} " + filler * longest)[:longest]: "-inf" for number in range(32)}
    decision = {
        **{"type": "rule.unevaluable", "rule": "r" * 64, "revision": 1, "step": 10**6, "at": 1_790_000_000},
        **{"operands": operands, "actions": ["a" * 128] * 16, "message": filler * 1024, "training_epoch": 1 / 3},
    }
    status = {"state": "s" * 32, "said": filler * MAX_STATUS_CHARS, "fires": 10**9}
    return {
        "rules_revision": 1,
        "commands_seq": 0,
        "step": 10**6,
        "reason": filler * 1024,
        "decisions": [{**decision, "number": number + 1} for number in range(MAX_DECISIONS)],
        "statuses": [{**status, "rule": f"rule-{number}".ljust(64, "x")} for number in range(MAX_STATUSES)],
    }


@pytest.mark.parametrize(("filler", "longest"), [("x", 2000), ("\u00e9", 1000), ("\U0001f600", 500), ('"', 1000)])
def test_a_report_of_full_size_is_written_down_whole(api: Api, filler: str, longest: int) -> None:
    """`longest`: as many characters of that kind as 32 operands may have."""
    api.submit(rules="rules: [{name: a, when: loss > 1, do: save}]")
    held = api.claim()
    said = full(filler, longest)
    held.heartbeat(control=said).ok()
    acknowledged = api.get(f"/job/{held.id}/rules").ok()["acknowledged"]
    assert acknowledged["statuses"] == said["statuses"]
    for _ in range(2):
        events = [one["data"] for one in _events(api, held.id) if one["type"] == "rule.unevaluable"]
        assert [event["number"] for event in events] == list(range(1, MAX_DECISIONS + 1))
        assert all(event["operands"] == said["decisions"][0]["operands"] for event in events)
        held.heartbeat(control=said).ok()


@pytest.mark.parametrize("filler", ["\u00e9", '"', "\x01"])
def test_operands_that_no_transaction_could_hold_ten_times_are_refused(api: Api, filler: str) -> None:
    api.submit(rules="rules: [{name: a, when: loss > 1, do: save}]")
    held = api.claim()
    with api.unchanged():
        answer = held.heartbeat(control=full(filler, MAX_OPERAND_CHARS))
        answer.refused(ErrorCode.INVALID_VALUE, "control.decisions.0.operands")
    held.heartbeat(control={"rules_revision": 1, "commands_seq": 0}).ok()


def _events(api: Api, job_id: str) -> list[Any]:
    return list(api.get(f"/job/{job_id}/events").ok())

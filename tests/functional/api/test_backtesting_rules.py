"""Back-test rules on the reports of a job: the firings, the end that would have come, and the bounds of the call."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.rules.backtest import history
from functions.api.worker import logs, rule_backtest
from tests.kits.api.harness import NOW, Api, Held

RULES = """rules:
  - {name: spike, when: loss > 3, do: {stop: failed}}
  - {name: tell, when: loss > 1, do: {log: high}, cooldown: 0 steps}
  - {name: dear, when: cost > 4, do: stop}
"""


def train(held: Held, losses: list[float], *, first: int = 1, chunk: int = 4) -> None:
    """Report a loss each step and second, in chunks."""
    for begin in range(0, len(losses), chunk):
        points = [
            {"step": first + at, "at": NOW + first + at, "metrics": {"loss": losses[at]}}
            for at in range(begin, min(begin + chunk, len(losses)))
        ]
        body = {"first_line": 0, "lines": [], "first_point": begin, "points": points}
        held.post(f"/job/{held.item['id']}/logs", body).ok()


def backtest(api: Api, job: str, text: str = RULES) -> dict[str, Any]:
    found: dict[str, Any] = api.post(f"/job/{job}/rules/backtest", {"text": text}).ok()
    return found


def test_rules_are_replayed_on_what_the_attempts_kept(api: Api) -> None:
    job = api.submit(policy={"backoff_s": 0})["id"]
    first = api.claim()
    train(first, [2.0, 2.0, 9.0, 0.5, 0.5])
    first.release().ok()
    train(api.claim(), [0.5, 4.0, 0.5, 0.25], first=1)
    with api.unchanged():
        found = backtest(api, job)
    assert (found["complete"], found["rows"], found["first_step"], found["last_step"]) == (True, 4, 1, 4)
    spike, tell, dear = found["rules"]
    assert (spike["fires"], spike["steps"], spike["operands"], spike["actions"]) == (1, [2], {"loss": 4}, ["stop"])
    assert (spike["use"], spike["best_later"]) == ("wrongly", {"value": 0.25, "step": 4})
    assert (tell["steps"], tell["gpu_hours"]) == ([2], None)
    assert (dear["tried"], dear["reason"]) == (False, "not in this history: cost")
    assert found["ended_by"] == "spike"
    assert api.get(f"/job/{job}/rules").ok()["newest"] is None


def test_a_job_without_reports_and_faulty_rules(api: Api) -> None:
    job = api.submit()["id"]
    assert (backtest(api, job)["rows"], backtest(api, job, "")["rules"]) == (0, [])
    wrong = api.post(f"/job/{job}/rules/backtest", {"text": "rules: [{}]"})
    assert wrong.refused(ErrorCode.INVALID_RULES, "text")["problems"]
    api.post(f"/job/{job}/rules/backtest", {"text": RULES}, key="rival_submit").refused(ErrorCode.JOB_NOT_FOUND, "id")


def test_a_run_with_too_many_metrics_is_refused_with_the_way_out(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    job = api.submit()["id"]
    train(api.claim(), [2.0] * 3)
    monkeypatch.setattr(history, "MAX_COLUMNS", 0)
    answer = api.post(f"/job/{job}/rules/backtest", {"text": RULES})
    assert (answer.status, answer.error["code"]) == (413, "payload_too_large")
    assert "more than 0 metrics" in answer.error["message"]


@pytest.mark.parametrize(
    ("name", "most", "rows"), [("MAX_POINTS", 6, 6), ("_FIRST_CHUNKS", 2, 8), ("_FIRST_BYTES", 9, 8)]
)
def test_a_long_run_is_replayed_from_its_beginning(
    api: Api, monkeypatch: pytest.MonkeyPatch, name: str, most: int, rows: int
) -> None:
    job = api.submit()["id"]
    train(api.claim(), [2.0] * 12)
    monkeypatch.setattr(logs, "_CHUNKS_PER_PAGE", 2)
    monkeypatch.setattr(rule_backtest if name == "MAX_POINTS" else logs, name, most)
    found = backtest(api, job)
    assert (found["complete"], found["rows"], found["last_step"]) == (False, rows, rows)


def test_rules_that_take_too_long_are_refused(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    job = api.submit()["id"]
    train(api.claim(), [2.0] * 3)
    monkeypatch.setattr(rule_backtest, "MAX_REPLAY_S", -1.0)
    answer = api.post(f"/job/{job}/rules/backtest", {"text": RULES})
    assert (answer.status, answer.error["code"]) == (413, "payload_too_large")
    assert "baton rules backtest" in answer.error["message"]

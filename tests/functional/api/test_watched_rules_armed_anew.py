"""Control-plane rules that change while their condition is true: the retried action runs afterwards."""

from __future__ import annotations

import pytest

from tests.kits.api.harness import Api


@pytest.mark.parametrize(
    ("before", "more"),
    [("stop: failed", ", mode: dry_run"), ("stop: failed", ", mode: dry_run, once: true"), ("alert: dear", "")],
)
def test_too_dear_is_too_dear(api: Api, before: str, more: str) -> None:
    rules = "rules: [{{name: dear, when: cost > 0.5, do: {{{}}}{}}}]"
    job_id = api.submit(rules=rules.format(before, more))["id"]
    held = api.claim(price_usd_per_hour=3.0)
    for _ in range(25):
        api.clock.advance(30)
        held.heartbeat(step=5).ok()
    assert "rule.fired" in api.events(job_id)
    assert api.job(job_id)["state"] == "running"
    after = rules.format("stop: failed", ", once: true" if "once" in more else "")
    api.call("PUT", f"/job/{job_id}/rules", {"text": after}).ok()
    api.clock.advance(30)
    assert held.heartbeat(step=6).ok()["directive"] == "cancel"
    job = api.job(job_id)
    assert (job["state"], job["ended_by"]["rule"], job["ended_by"]["revision"]) == ("failed", "dear", 2)

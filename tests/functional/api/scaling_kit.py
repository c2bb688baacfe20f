"""Submit jobs whose rules scale a group, and read the results."""

from __future__ import annotations

from typing import Any

from baton.contract.jobs.job import JobState
from tests.kits.api.harness import Api, Held

GROUP = {"group": "generators"}


def scaling(
    delta: int,
    *,
    group: str = "generators",
    when: str = "step >= 5",
    on: str = "heartbeat",
    more: str = "",
    rule: str = "",
) -> str:
    """A document of one rule."""
    do = f"{{scale: {{group: {group}, delta: {delta}{more}}}}}"
    return f"rules: [{{name: grow, when: '{when}', on: [{on}], do: {do}{rule}}}]"


def training(api: Api, rules: str, **more: Any) -> Held:
    """A job of another group and queue, whose rules they are."""
    api.submit(queue="training", rules=rules, **more)
    return api.claim(queue="training", machine_id="m-training")


def generators(api: Api, number: int = 1, **more: Any) -> list[str]:
    """Submit `number` generators, each a second newer than the one before; return their ids."""
    found = []
    for _ in range(number):
        found.append(api.submit(queue="generators", tags=GROUP, **more)["id"])
        api.clock.advance(1)
    return found


def live(api: Api, group: str = "generators") -> list[dict[str, Any]]:
    """The jobs of a group that have not ended, oldest first."""
    jobs = api.get("/jobs").ok()
    return [job for job in jobs if job["tags"].get("group") == group and not JobState(job["state"]).terminal]


def told(api: Api, job_id: str) -> list[tuple[str, str]]:
    """Return type and message of each event of a job's firings and actions."""
    events = api.get(f"/job/{job_id}/events").ok()
    here = [one for one in events if one["type"].startswith(("rule.fired", "action."))]
    return [(one["type"], one["data"]["message"]) for one in here]

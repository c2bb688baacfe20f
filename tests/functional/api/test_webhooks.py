"""Webhooks: created, listed, named by jobs, replayed, deleted, isolated by tenant."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.admin.webhooks import MAX_WEBHOOKS, DeliveryState
from baton.contract.errors import ErrorCode
from functions.api.admin import webhooks
from functions.domain.webhooks import Delivery
from functions.fleet.records import FleetEvent
from tests.kits.api.fakes import FakeLine
from tests.kits.api.fleets import DOCUMENT, write
from tests.kits.api.harness import NO_JOB, NOW, TENANT, Api, memory_api

URL = "https://hooks.example.com/baton"


@pytest.fixture
def api() -> Api:
    return memory_api()


def messages(api: Api) -> list[tuple[str, Any, str]]:
    """Webhook, event and repetition of what is in line."""
    line = api.context.delivery_queue
    assert isinstance(line, FakeLine)
    return line.waiting


def waiting(api: Api) -> list[tuple[str, int, str]]:
    """Webhook, number and repetition of what is in line."""
    return [(hook, event.seq, repetition) for hook, event, repetition in messages(api)]


def queued(number: int, **following: int) -> dict[str, int | None]:
    return {"queued": number, "next_seq": None, "next_at": None, **following}


def made(api: Api, **more: object) -> dict[str, object]:
    view: dict[str, object] = api.post("/webhooks", {"url": URL, **more}).ok()
    return view


def test_the_secret_is_shown_once(api: Api) -> None:
    created = made(api, types=["job.completed", "job.failed", "job.completed"])
    secret = str(created.pop("secret"))
    assert len(secret) >= 32
    assert created == {
        "id": created["id"],
        "url": URL,
        "types": ["job.completed", "job.failed"],
        "every_job": True,
        "created_at": NOW,
    }
    listed = api.get("/webhooks")
    assert listed.ok() == {"webhooks": [created]} and secret not in listed.text
    assert made(api)["secret"] != secret


def test_an_address_of_ours_is_refused(api: Api) -> None:
    for url in ("http://hooks.example.com/", "https://127.0.0.1/", "https://[::1]/", "https://localhost:8443/"):
        with api.unchanged():
            api.post("/webhooks", {"url": url}).refused(ErrorCode.INVALID_VALUE, "url")


def test_a_deleted_webhook_is_gone(api: Api) -> None:
    hook = made(api)["id"]
    assert api.call("DELETE", f"/webhooks/{hook}").status == 204
    assert api.get("/webhooks").ok() == {"webhooks": []}
    for method, path, body in (
        ("DELETE", "", None),
        ("GET", "/deliveries", None),
        ("POST", "/replay", {"job_id": api.submit()["id"]}),
    ):
        api.call(method, f"/webhooks/{hook}{path}", body).refused(ErrorCode.WEBHOOK_NOT_FOUND, "id")


def test_another_tenant_s_webhooks_do_not_exist(api: Api) -> None:
    hook = made(api)["id"]
    rival = {"key": "rival_admin"}
    assert api.get("/webhooks", **rival).ok() == {"webhooks": []}
    api.call("DELETE", f"/webhooks/{hook}", **rival).refused(ErrorCode.WEBHOOK_NOT_FOUND, "id")
    api.get(f"/webhooks/{hook}/deliveries", **rival).refused(ErrorCode.WEBHOOK_NOT_FOUND, "id")
    api.post("/job", {"command": ["train"], "webhook": hook}, key="rival_submit").refused(
        ErrorCode.WEBHOOK_NOT_FOUND, "webhook"
    )
    theirs = api.post("/webhooks", {"url": URL}, **rival).ok()["id"]
    job = api.submit()["id"]
    api.post(f"/webhooks/{theirs}/replay", {"job_id": job}, **rival).refused(ErrorCode.JOB_NOT_FOUND, "id")
    assert waiting(api) == []


def test_there_is_a_limit(api: Api) -> None:
    for _ in range(MAX_WEBHOOKS):
        made(api)
    with api.unchanged():
        api.post("/webhooks", {"url": URL}).refused(ErrorCode.CONFLICT)


def test_a_job_names_a_webhook_that_exists(api: Api) -> None:
    hook = str(made(api, every_job=False)["id"])
    job = api.submit(webhook=hook)["id"]
    stored = api.context.jobs.get(job)
    assert stored is not None and stored.spec.webhook == hook
    with api.unchanged():
        api.post("/job", {"command": ["train"], "webhook": "0" * 20}).refused(ErrorCode.WEBHOOK_NOT_FOUND, "webhook")
        batch = {"jobs": [{"command": ["a"], "webhook": hook}, {"command": ["b"], "webhook": "0" * 20}]}
        api.post("/jobs/batch", batch).refused(ErrorCode.WEBHOOK_NOT_FOUND, "jobs.1.webhook")


def test_events_are_told_again_from_where_it_is_asked(api: Api) -> None:
    hook = str(made(api)["id"])
    some = str(made(api, types=["job.paused"], every_job=False)["id"])
    job = api.submit()["id"]
    for command in ("pause", "resume", "stop"):
        api.post(f"/job/{job}/{command}").ok()
    assert api.post(f"/webhooks/{hook}/replay", {"job_id": job, "from_seq": 3}).ok() == {
        "queued": 2,
        "next_seq": None,
        "next_at": None,
    }
    first = waiting(api)
    assert [(who, seq) for who, seq, _ in first] == [(hook, 3), (hook, 4)]
    assert api.post(f"/webhooks/{some}/replay", {"job_id": job}).ok() == {
        "queued": 1,
        "next_seq": None,
        "next_at": None,
    }
    assert api.post(f"/webhooks/{hook}/replay", {"job_id": job, "from_seq": 5}).ok() == {
        "queued": 0,
        "next_seq": None,
        "next_at": None,
    }
    api.post(f"/webhooks/{hook}/replay", {"job_id": job}).ok()
    assert [(who, seq) for who, seq, _ in waiting(api)[2:]] == [(some, 2), *((hook, seq) for seq in (1, 2, 3, 4))]
    assert len({repetition for _, _, repetition in waiting(api)}) == 3, "a repetition is not taken for a repeat"


def test_what_one_call_does_not_tell_again_the_next_one_does(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "REPLAY_EVENTS", 3)
    hook = str(made(api, types=["job.paused", "job.canceled"])["id"])
    job = api.submit()["id"]
    for command in ("pause", "resume", "pause", "resume", "pause", "stop"):
        api.post(f"/job/{job}/{command}").ok()
    answers, from_seq = [], 1
    while from_seq:
        answers.append(api.post(f"/webhooks/{hook}/replay", {"job_id": job, "from_seq": from_seq}).ok())
        from_seq = answers[-1]["next_seq"]
    assert answers == [
        queued(1, next_seq=4),
        queued(2, next_seq=7),
        queued(1),
    ]
    assert [seq for _, seq, _ in waiting(api)] == [2, 4, 6, 7]
    last = api.post(f"/webhooks/{hook}/replay", {"job_id": job, "from_seq": 5}).ok()
    assert last == queued(2), "exactly as many as a call may"


FLEET_TYPES = ["machine.gone", "budget.warning"]


def happen(api: Api, *events: tuple[int, str]) -> None:
    """Store a fleet, then events by time and type."""
    api.call("PUT", "/fleets/nights", DOCUMENT).ok()
    write(api, events=[FleetEvent(at=at, type=type_, machine="m", usd=0.1) for at, type_ in events])


def test_events_of_a_fleet_are_told_again_from_a_time_on(api: Api) -> None:
    hook = str(made(api, types=FLEET_TYPES, every_job=False)["id"])
    happen(
        api, (NOW, "machine.gone"), (NOW + 5, "machine.ready"), (NOW + 5, "budget.warning"), (NOW + 9, "machine.gone")
    )
    answer = api.post(f"/webhooks/{hook}/replay", {"fleet": "nights", "from_at": NOW + 5}).ok()
    assert answer == queued(2)
    found = [event for _, event, _ in messages(api)]
    assert [(one.type, one.at, one.tenant, one.fleet) for one in found] == [
        ("budget.warning", NOW + 5, TENANT, "nights"),
        ("machine.gone", NOW + 9, TENANT, "nights"),
    ]
    assert [one.id for one in found] == [f"fleet/nights#{one.seq}" for one in found]
    assert api.post(f"/webhooks/{hook}/replay", {"fleet": "nights"}).ok()["queued"] == 3
    assert len({repetition for _, _, repetition in messages(api)}) == 2
    jobs_only = str(made(api)["id"])
    assert api.post(f"/webhooks/{jobs_only}/replay", {"fleet": "nights"}).ok()["queued"] == 0


def test_a_long_history_of_a_fleet_is_told_in_several_calls_and_never_in_the_midst_of_a_second(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "REPLAY_EVENTS", 2)
    hook = str(made(api, types=FLEET_TYPES)["id"])
    happen(api, *[(NOW + at, "machine.gone") for at in (0, 1, 1, 1, 1, 1, 7, 8, 9, 10)])
    answers, from_at = [], 0
    while from_at is not None:
        answers.append(api.post(f"/webhooks/{hook}/replay", {"fleet": "nights", "from_at": from_at}).ok())
        from_at = answers[-1]["next_at"]
    assert [(one["queued"], one["next_at"]) for one in answers] == [(1, NOW + 1), (8, NOW + 10), (1, None)]


def test_a_replay_names_one_job_or_one_fleet_of_the_tenant(api: Api) -> None:
    hook = str(made(api, types=FLEET_TYPES)["id"])
    happen(api, (NOW, "machine.gone"))
    rival = {"key": "rival_admin"}
    theirs = api.post("/webhooks", {"url": URL, "types": FLEET_TYPES}, **rival).ok()["id"]
    with api.unchanged():
        path = f"/webhooks/{theirs}/replay"
        api.post(path, {"fleet": "nights"}, **rival).refused(ErrorCode.FLEET_NOT_FOUND, "fleet")
        both = {"fleet": "nights", "job_id": NO_JOB}
        api.post(f"/webhooks/{hook}/replay", both).refused(ErrorCode.UNKNOWN_FIELD, "job_id")
        api.post(f"/webhooks/{hook}/replay", {}).refused(ErrorCode.MISSING_FIELD, "job_id")
        api.post(f"/webhooks/{hook}/replay", {"fleet": "Nights"}).refused(ErrorCode.INVALID_VALUE, "fleet")
    assert messages(api) == []


def test_a_job_shows_which_webhook_it_names_and_nothing_more_of_it(api: Api) -> None:
    """The address may hold a secret of its own, and only admins see those."""
    hook = made(api, every_job=False)
    job = api.submit(webhook=hook["id"])
    assert job["webhook"] == hook["id"]
    seen = api.get(f"/job/{job['id']}", key="submit")
    assert seen.ok()["webhook"] == hook["id"] and URL not in seen.text
    assert api.submit()["webhook"] is None


def test_the_log_of_deliveries_is_paged_newest_first(api: Api) -> None:
    hook = str(made(api)["id"])
    job = api.submit()["id"]
    for seq in range(1, 6):
        api.context.webhooks.record(
            Delivery(
                webhook_id=hook,
                job_id=job,
                seq=seq,
                type="job.started",
                at=NOW + seq,
                state=DeliveryState.WAITING,
                attempts=seq,
                last_at=NOW + 60,
                status=503,
                problem="answered 503",
            )
        )
    page = api.get(f"/webhooks/{hook}/deliveries", query={"limit": 3}).ok()
    rest = api.get(f"/webhooks/{hook}/deliveries", query={"limit": 3, "cursor": page["next_cursor"]}).ok()
    assert [entry["event_id"] for entry in page["deliveries"] + rest["deliveries"]] == [
        f"{job}#{seq}" for seq in (5, 4, 3, 2, 1)
    ]
    assert rest["next_cursor"] is None
    assert page["deliveries"][0] == {
        "event_id": f"{job}#5",
        "type": "job.started",
        "state": "waiting",
        "attempts": 5,
        "last_at": NOW + 60,
        "status": 503,
        "problem": "answered 503",
    }
    other = str(made(api)["id"])
    api.get(f"/webhooks/{other}/deliveries", query={"cursor": page["next_cursor"]}).refused(
        ErrorCode.INVALID_CURSOR, "cursor"
    )


@pytest.mark.parametrize("scope", ["submit", "worker"])
def test_only_an_admin_has_to_do_with_webhooks(api: Api, scope: str) -> None:
    hook, job = made(api)["id"], api.submit()["id"]
    before = api.context.webhooks.of_tenant(TENANT)
    for method, path, body in (
        ("POST", "", {"url": URL}),
        ("GET", "", None),
        ("DELETE", f"/{hook}", None),
        ("GET", f"/{hook}/deliveries", None),
        ("POST", f"/{hook}/replay", {"job_id": job}),
    ):
        api.call(method, f"/webhooks{path}", body, key=scope).refused(ErrorCode.WRONG_SCOPE, "x-api-key")
    assert api.context.webhooks.of_tenant(TENANT) == before and waiting(api) == []

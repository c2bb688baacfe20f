"""`baton webhooks`: create, list, deliveries, replay, delete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.contract.admin.webhooks import DeliveryPage, DeliveryState, ReplayAnswer, WebhookCreate
from gpu_client.cli.core.formats import moment
from gpu_client.transport.api.client import BatonClient
from tests.functional.cli.people import Baton, Labour, submit
from tests.kits.network.proxies import FaultyProxy
from tests.kits.stack.stack import Stack
from tests.kits.waiting import until

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

URL = "https://hooks.invalid/baton"


@pytest.fixture(autouse=True)
def _none_are_left(stack: Stack) -> Any:
    yield
    for webhook in stack.client.list_webhooks():
        stack.client.delete_webhook(webhook.id)


def made(baton: Baton, *more: object) -> dict[str, Any]:
    webhook: dict[str, Any] = baton("webhooks", "create", URL, *more, "--json").ok().json
    return webhook


def test_the_life_of_a_webhook(baton: Baton, stack: Stack) -> None:
    said = baton("webhooks", "create", URL, "--type", "job.failed", "--type", "job.completed", "--type", "job.failed")
    secret = said.ok().out.strip()
    assert len(secret) >= 32 and secret not in said.err and "shown only once" in said.err
    (listed,) = baton("webhooks", "list", "--json").ok().json
    assert (listed["url"], listed["types"], listed["every_job"]) == (URL, ["job.failed", "job.completed"], True)
    assert listed["id"] in said.err and secret not in str(listed)
    for part in (listed["id"], URL, "job.failed, job.completed", "all jobs"):
        assert part in baton("webhooks", "list").ok().out
    named = made(baton, "--only-named")
    assert (named["every_job"], named["types"], len(named["secret"]) >= 32) == (False, [], True)
    assert "jobs that name the webhook" in baton("webhooks", "list").ok().out

    assert baton("webhooks", "delete", listed["id"][:6]).ok().out == f"Webhook {listed['id']} is deleted.\n"
    assert baton("webhooks", "delete", named["id"], "--json").ok().json == {"id": named["id"], "deleted": True}
    assert baton("webhooks", "list", "--json").ok().json == []
    assert "No webhooks" in baton("webhooks", "list").ok().err


def test_deliveries_and_telling_again(
    baton: Baton, stack: Stack, labour: Labour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    webhook = made(baton, "--only-named")["id"]
    assert "No delivery" in baton("webhooks", "deliveries", webhook).ok().err
    job = submit(baton, labour, tmp_path, webhook=webhook)
    assert baton("show", job, "--json").ok().json["webhook"] == webhook
    assert webhook in baton("show", job).ok().out
    # No server answers at the address: the first event waits, and the command shows it.
    until(lambda: baton("webhooks", "deliveries", webhook, "--json").ok().json, 20, what="a delivery")
    (entry,) = baton("webhooks", "deliveries", webhook[:8], "--limit", "1", "--json").ok().json
    assert (entry["event_id"], entry["type"], entry["state"]) == (f"{job}#1", "job.submitted", DeliveryState.WAITING)
    shown = baton("webhooks", "deliveries", webhook).ok().out
    for part in (f"{job}#1", "job.submitted", "waiting", "cannot be resolved"):
        assert part in shown

    again = baton("webhooks", "replay", webhook, job).ok().out
    assert again == f"1 event of {job} is queued for {webhook} again.\n"
    said = baton("webhooks", "replay", webhook, job, "--from-seq", "2", "--json").ok().json
    assert said == {"id": webhook, "job_id": job, "queued": 0}

    asked: list[int] = []

    def parts(_client: BatonClient, _id: str, _job: str, from_seq: int) -> ReplayAnswer:
        asked.append(from_seq)
        return ReplayAnswer(queued=3, next_seq=from_seq + 10 if len(asked) < 3 else None)

    monkeypatch.setattr(BatonClient, "replay_webhook", parts)
    assert baton("webhooks", "replay", webhook, job, "--json").ok().json["queued"] == 9
    assert asked == [1, 11, 21], "until all are in line"


def test_the_events_of_a_fleet_are_queued_again(baton: Baton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "fleet.yaml"
    document.write_text("{name: told, providers: [loopback], max_usd_per_hour: 0.5, budget: {total_usd: 1}}")
    baton("fleet", "apply", document).ok()
    webhook = made(baton, "--type", "machine.gone")["id"]
    said = baton("webhooks", "replay", webhook, "--fleet", "told", "--json").ok()
    assert said.json == {"id": webhook, "fleet": "told", "queued": 0} and said.err == ""
    jobs_only = made(baton)["id"]
    said = baton("webhooks", "replay", jobs_only, "--fleet", "told").ok()
    assert said.out == f"0 events of told are queued for {jobs_only} again.\n" and "no events of fleets" in said.err
    baton("webhooks", "replay", webhook, "--fleet", "nosuch").failed(3, "fleet_not_found")
    baton("webhooks", "replay", webhook).failed(2, "name either a job or a fleet", "--fleet NAME")
    baton("webhooks", "replay", webhook, "x", "--fleet", "told").failed(2, "name either a job or a fleet")
    asked: list[int] = []

    def parts(_client: BatonClient, _id: str, _fleet: str, from_at: int) -> ReplayAnswer:
        asked.append(from_at)
        return ReplayAnswer(queued=2, next_at=from_at + 60 if len(asked) < 3 else None)

    monkeypatch.setattr(BatonClient, "replay_fleet", parts)
    since = moment(1_790_000_000)
    again = baton("webhooks", "replay", webhook, "--fleet", "told", "--since", since).ok().out
    assert again == f"6 events of told are queued for {webhook} again.\n"
    assert asked == [1_790_000_000, 1_790_000_060, 1_790_000_120], "until all are in line"
    baton("fleet", "stop", "told").ok()


def test_deliveries_are_as_many_as_are_asked_for(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    webhook = made(baton)["id"]
    asked: list[tuple[int, str | None]] = []

    def one_a_page(_client: BatonClient, _id: str, *, limit: int, cursor: str | None = None) -> DeliveryPage:
        asked.append((limit, cursor))
        number = len(asked)
        entry = {"event_id": f"j#{number}", "type": "job.paused", "state": "delivered", "attempts": 1, "last_at": 1}
        return DeliveryPage.model_validate({"deliveries": [entry], "next_cursor": f"after {number}"})

    monkeypatch.setattr(BatonClient, "deliveries", one_a_page)
    said = baton("webhooks", "deliveries", webhook, "--limit", "3", "--json").ok().json
    assert [entry["event_id"] for entry in said] == ["j#1", "j#2", "j#3"]
    assert asked == [(3, None), (2, "after 1"), (1, "after 2")]
    asked.clear()
    baton("webhooks", "deliveries", webhook, "--limit", "2000").ok()
    assert asked[0] == (1000, None), "what the API gives at most"


def test_an_address_that_is_a_secret_is_in_no_command_line(baton: Baton) -> None:
    address = "https://hooks.invalid/services/T0/c2VjcmV0"
    baton("webhooks", "create", "-", stdin=f"{address}\n").ok()
    (listed,) = baton("webhooks", "list", "--json").ok().json
    assert listed["url"] == address
    baton("webhooks", "create", "-", stdin="").failed(2, "is not an HTTPS URL")


def test_bad_input(baton: Baton, stack: Stack) -> None:
    for url in ("hooks.example.com", "https://hooks.example.com/a b", "https://x/" + "a" * 2050, ""):
        baton("webhooks", "create", url).failed(2, "is not an HTTPS URL", "https://")
    baton("webhooks", "create", "http://hooks.example.com/").failed(3, "invalid_value", "not https")
    baton("webhooks", "create", "https://127.0.0.1/").failed(3, "invalid_value", "loopback")
    baton("webhooks", "create", URL, "--type", "job.melted").failed(2, "--type")
    baton("webhooks", "delete", "nosuchhook").failed(2, "no webhook has the id", "baton webhooks list")
    baton("webhooks", "deliveries", "abc").failed(2, "no webhook has the id")
    webhook = made(baton)["id"]
    baton("webhooks", "replay", webhook, "146683a1-cb76-4702-9fef-fcccd32594f1").failed(3, "job_not_found")
    baton("webhooks", "replay", webhook, "146683a1-cb76-4702-9fef-fcccd32594f1", "--from-seq", "0").failed(2)
    baton("webhooks", "deliveries", webhook, "--limit", "0").failed(2)
    baton("webhooks", "list", BATON_API_URL=stack.url, BATON_API_KEY=stack.keys["submit"]).failed(
        3, "wrong_scope", "admin"
    )


def test_a_deletion_whose_answer_was_lost_is_one(baton: Baton, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = stack.client.create_webhook(WebhookCreate(url=URL))
    gone = stack.client.create_webhook(WebhookCreate(url=URL))
    real = BatonClient.delete_webhook

    def twice(client: BatonClient, webhook_id: str) -> None:
        real(client, webhook_id)
        real(client, webhook_id)

    monkeypatch.setattr(BatonClient, "delete_webhook", twice)
    assert baton("webhooks", "delete", gone.id).ok().out == f"Webhook {gone.id} is deleted.\n"
    monkeypatch.undo()
    assert [webhook.id for webhook in stack.client.list_webhooks()] == [kept.id]


def test_a_webhook_whose_answer_was_lost_may_exist(baton: Baton, stack: Stack) -> None:
    with FaultyProxy(stack.front) as front, front.dropping("POST /webhooks"):
        place = {"BATON_API_URL": front.url, "BATON_API_KEY": stack.keys["admin"]}
        said = baton("webhooks", "create", URL, **place)
    said.failed(4, "The webhook may have been created", "baton webhooks list")

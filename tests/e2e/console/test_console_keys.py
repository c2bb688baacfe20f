"""Keys, sessions and webhooks, for admins alone."""

from __future__ import annotations

import re
from time import time
from typing import Any
from uuid import uuid4

import pytest
from playwright.sync_api import expect

from functions.storage.dynamodb.webhooks import DynamoWebhookStore
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import ApiError
from tests.e2e.console.desk import Desk
from tests.e2e.console.scenes import Scene
from tests.kits.stack.stack import Stack
from tests.kits.waiting import until


def kept_keys(stack: Stack) -> set[tuple[str, str]]:
    """Return names and ids of the keys that are no sessions."""
    return {(key.name, key.id) for key in stack.client.list_keys().keys if key.kind is None}


def drag_outside(page: Any, place: Any) -> None:
    """Press the pointer on `place` within a dialog, and release the pointer outside the dialog."""
    place.hover()
    page.mouse.down()
    page.mouse.move(2, 2)
    page.mouse.up()


def test_a_new_key_is_shown_once_works_and_is_revoked(reader: Desk, stack: Stack) -> None:
    name = f"laptop-{uuid4().hex[:6]}"
    page = reader.visit("/keys")
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    assert reader.complaints(page) == []
    drag_outside(page, dialog.get_by_label("Name"))
    expect(dialog).to_be_visible()
    page.mouse.click(2, 2)
    expect(dialog).to_have_count(0)
    page.get_by_role("button", name="New key").click()
    dialog.get_by_label("Name").fill(name)
    dialog.get_by_role("button", name="Create key").click()
    shown = page.get_by_role("dialog", name=f"Key {name}").locator("code")
    secret = shown.inner_text()
    # The secret is shown once: neither a drag nor a slip takes the secret from the screen.
    drag_outside(page, shown)
    page.mouse.click(2, 2)
    for _ in range(2):
        page.keyboard.press("Escape")
    expect(shown).to_be_visible()
    with BatonClient(stack.url, secret) as client:
        assert client.jobs(limit=1) is not None
    page.get_by_role("button", name="I have stored it").click()
    row = page.get_by_role("table", name="API keys").get_by_role("row").filter(has_text=name)
    expect(row).to_contain_text("submit")
    expect(row).to_contain_text("in 89 d")
    assert secret not in page.content()
    row.get_by_role("button", name=f"Revoke {name}").click()
    # The gateway keeps the authorizer's answer for a minute.
    expect(page.get_by_role("dialog")).to_contain_text("refused within a minute")
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(row).to_have_count(0)
    with BatonClient(stack.url, secret) as client, pytest.raises(ApiError, match="revoked"):
        client.jobs(limit=1)


def test_a_key_without_a_scope_is_refused_in_the_dialog(reader: Desk, stack: Stack) -> None:
    before = kept_keys(stack)
    page = reader.visit("/keys")
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("nothing")
    dialog.get_by_label(re.compile("^submit")).uncheck()
    dialog.get_by_role("button", name="Create key").click()
    expect(dialog.get_by_role("alert")).to_contain_text("scopes")
    assert kept_keys(stack) == before


def test_the_own_session_is_marked_and_its_revocation_signs_out(desk: Desk) -> None:
    page = desk.sign_in("/keys")
    row = page.get_by_role("row").filter(has_text="this browser")
    expect(row).to_have_count(1)
    desk.examine(page)
    row.get_by_role("button").click()
    expect(page.get_by_role("dialog")).to_contain_text("you will be signed out")
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    page.get_by_label("API key").wait_for()


def test_other_keys_see_neither_keys_nor_webhooks(desk: Desk) -> None:
    page = desk.sign_in(key="submit")
    places = page.get_by_role("navigation")
    expect(places.get_by_role("link", name="Jobs")).to_be_visible()
    expect(places.get_by_role("link", name=re.compile("Keys|Webhooks"))).to_have_count(0)
    page.goto(f"{desk.stack.url}/console#/keys")
    expect(page.get_by_role("alert")).to_contain_text("admin")


def test_a_webhook_shows_its_deliveries_and_replays_them(reader: Desk, scene: Scene, stack: Stack) -> None:
    page = reader.visit("/webhooks")
    page.get_by_role("button", name="New webhook").click()
    dialog = page.get_by_role("dialog")
    address = f"https://hooks.invalid/{uuid4().hex[:8]}"
    dialog.get_by_label("Address").fill(address)
    # A webhook that a job names receives the events at once, and no events of other jobs.
    dialog.locator('select[name="jobs"]').select_option("named")
    dialog.get_by_role("button", name="Create webhook").click()
    page.get_by_role("dialog", name="Secret of the webhook").get_by_role("button", name="I have stored it").click()
    hook = next(one for one in stack.client.list_webhooks() if one.url == address)
    # The address became one of a private network: each delivery fails at once and for good, and says why.
    webhooks = DynamoWebhookStore(stack.tables, stack.prefix)
    stored = webhooks.get("default", hook.id)
    assert stored is not None
    address = address.replace("hooks.invalid", "10.0.0.1")
    webhooks.put(stored.model_copy(update={"url": address}))
    job_id = scene.submit("delivered", webhook=hook.id)
    (first,) = until(lambda: stack.client.deliveries(hook.id).deliveries, what="a delivery")
    card = page.locator("section").filter(has_text=address)
    card.get_by_role("button", name="Deliveries").click()
    expect(card.get_by_role("table")).to_contain_text("job.submitted")
    reader.examine(page)
    until(lambda: time() >= first.last_at + 1, what="a second in which a delivery has another time")
    card.get_by_role("button", name=f"Replay {job_id}").click()
    page.get_by_role("dialog").get_by_role("button", name="Replay").click()
    expect(page.get_by_text(f"1 event of job {job_id[:8]} queued again.")).to_be_visible()

    def delivered_again() -> bool:
        (again,) = stack.client.deliveries(hook.id).deliveries
        return (again.event_id, again.attempts) == (first.event_id, 1) and again.last_at > first.last_at

    until(delivered_again, what="the delivery of the replay")
    page.get_by_role("button", name=f"Delete {address}").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(card).to_have_count(0)
    assert address not in [one.url for one in stack.client.list_webhooks()]

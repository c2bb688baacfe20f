"""Webhooks and deliveries: every store keeps the same promises."""

from __future__ import annotations

import pytest

from baton.contract.admin.webhooks import DeliveryState
from baton.contract.errors import ErrorCode
from functions.domain.errors import Refusal
from functions.domain.webhooks import Delivery
from tests.conformance.store_kit import NOW
from tests.kits.api.stream_records import JOB_ID, OTHER_JOB
from tests.kits.api.webhooks import HOOK_ID, make_webhook
from tests.kits.clouds.paging import all_pages
from tests.kits.clouds.store_sets import Cloud


def delivery(seq: int, at: int, *, job_id: str = JOB_ID, attempts: int = 1, webhook_id: str = HOOK_ID) -> Delivery:
    return Delivery(
        webhook_id=webhook_id,
        job_id=job_id,
        seq=seq,
        type="job.started",
        at=at,
        state=DeliveryState.WAITING,
        attempts=attempts,
        last_at=NOW,
        problem="no answer: too slow",
    )


def test_a_webhook_is_kept_as_it_is_and_only_for_its_tenant(cloud: Cloud) -> None:
    store = cloud.webhooks
    one, two = make_webhook(id="b" * 20, types=["job.failed"], every_job=False), make_webhook(id="a" * 20)
    for hook in (one, two, make_webhook(id="a" * 20, tenant="rival")):
        store.put(hook)
    assert store.get("acme", one.id) == one
    assert store.get("rival", one.id) is None
    assert store.of_tenant("acme") == [two, one]
    assert [hook.tenant for hook in store.of_tenant("rival")] == ["rival"]
    assert store.of_tenant("nobody") == []
    assert store.delete("acme", two.id) is True
    assert store.delete("acme", two.id) is False
    assert store.of_tenant("acme") == [one] and len(store.of_tenant("rival")) == 1


def test_a_delivery_is_noted_in_place_of_what_was_noted_before(cloud: Cloud) -> None:
    cloud.webhooks.record(delivery(1, NOW))
    cloud.webhooks.record(delivery(1, NOW, attempts=2))
    cloud.webhooks.record(delivery(1, NOW, webhook_id="c" * 20))
    assert list(cloud.webhooks.deliveries(HOOK_ID, limit=10).items) == [delivery(1, NOW, attempts=2)]


def test_deliveries_are_paged_newest_event_first(cloud: Cloud) -> None:
    noted = [delivery(seq, NOW + seq // 2, job_id=job) for seq in range(1, 6) for job in (JOB_ID, OTHER_JOB)]
    for one in noted:
        cloud.webhooks.record(one)
    found = all_pages(lambda cursor: cloud.webhooks.deliveries(HOOK_ID, limit=3, cursor=cursor), full=3)
    assert found == sorted(noted, key=lambda one: one.place, reverse=True)
    with pytest.raises(Refusal) as caught:
        cloud.webhooks.deliveries("d" * 20, limit=3, cursor=cloud.webhooks.deliveries(HOOK_ID, limit=3).cursor)
    assert caught.value.code is ErrorCode.INVALID_CURSOR

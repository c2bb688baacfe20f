"""Vast.ai's driver over the fake: creates that fail in each way, long lists, prices, logs, charges, the account."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fakes.vast.market import FakeAsk
from fakes.vast.paging import page
from fakes.vast.provider import KEY, PERMISSIONS
from functions.fleet.drivers.protocol import (
    Ambiguous,
    Created,
    CreateIntent,
    CreateResult,
    NotCreated,
    ProviderRefused,
    ProviderUnavailable,
    RefusalKind,
)
from functions.fleet.drivers.vast.driver import VastDriver
from functions.fleet.records import Offer, Sighting
from tests.conformance.drivers.driven_vast import VastDriven, vast_account
from tests.unit.fleet.test_vast_offers import spec

PREFIX = "dep10000-"
TOKEN = f"{PREFIX}nights-1"
CREATE = "PUT /api/v0/asks/"


class Market(VastDriven):
    """One service and its driver."""

    def create(self, offer: Offer | None = None, token: str = TOKEN, **changes: Any) -> CreateResult:
        offer = offer or self.driver.quote(spec(market="on-demand"))[0]
        values = {"image": "registry.example/agent:1", "disk_gib": 40, "max_usd_per_hour": 1.0, **changes}
        return self.driver.create(CreateIntent(token=token, offer=offer, environment={"A": "b"}, **values))

    def made(self, token: str = TOKEN) -> str:
        result = self.create(token=token)
        assert isinstance(result, Created)
        return result.handle

    def seen(self, handle: str) -> Sighting:
        found = self.driver.inventory(PREFIX, self.now())
        return next(one for one in found.sightings if one.handle == handle)


@pytest.fixture
def market() -> Iterator[Market]:
    made = Market(None)  # type: ignore[arg-type]
    made.driver = VastDriver(vast_account(made.fake), now=made.clock, pause=made.clock.advance)
    yield made
    made.fake.keys = {KEY: PERMISSIONS}
    made.close()


# Offers.


def test_a_quote_asks_each_permitted_market_once(market: Market) -> None:
    either = market.driver.quote(spec())
    assert {one.spot for one in either} == {False, True}
    assert [one.spot for one in market.driver.quote(spec(market="spot"))] == [True] * 20
    assert all(one.usd_per_hour <= 0.5 for one in market.driver.quote(spec(market="on-demand")))
    bodies = [call.json() for call in market.fake.calls]
    assert [one["type"] for one in bodies] == ["on-demand", "bid", "bid", "on-demand"]


def test_a_quote_leaves_hosts_out_that_are_not_verified_reliable_or_free(market: Market) -> None:
    market.fake.asks = [
        FakeAsk(1, 1, verified=False),
        FakeAsk(2, 2, reliability=0.9),
        FakeAsk(3, 3, rented=True),
        FakeAsk(4, 4, external=True),
        FakeAsk(5, 5, rentable=False),
        FakeAsk(6, 6, gpu_ram=16_000),
        FakeAsk(7, 7, disk_space=20),
        FakeAsk(8, 8, usd_per_hour=2.0),
        FakeAsk(9, 9, gpu_name="RTX 3090"),
        FakeAsk(10, 10, gpu_ram=23_000),
    ]
    found = market.driver.quote(spec(market="on-demand", min_vram_gib=24, gpu_models=["RTX 4090"]))
    assert [one.ref for one in found] == ["10"]
    assert market.driver.quote(spec(gpu_models=["B200"])) == []


def test_gpu_names_are_asked_once_and_unreadable_rows_are_left_out(market: Market) -> None:
    market.fake.asks = [FakeAsk(1, 1, gpu_name="A100 SXM4"), FakeAsk(2, 2, gpu_name="A100 PCIE", gpu_ram=float("inf"))]
    for _ in range(2):
        assert [one.gpu_model for one in market.driver.quote(spec(market="spot", gpu_models=["A100"]))] == ["A100"]
    assert [call.path for call in market.fake.calls].count("/api/v0/gpu_names/unique/") == 1
    market.fake.asks.pop(0)
    with pytest.raises(ProviderUnavailable, match="no offer is readable"):
        market.driver.quote(spec(market="spot"))


def test_a_search_with_a_bad_key_that_is_answered_404_names_the_key(market: Market) -> None:
    market.fake.keys, market.fake.hides_search = {}, True
    with pytest.raises(ProviderRefused) as refused:
        market.driver.quote(spec())
    assert refused.value.kind is RefusalKind.KEY


# Creates.


def test_the_body_of_a_create_carries_token_environment_and_no_price_on_demand(market: Market) -> None:
    market.made()
    (call,) = [call for call in market.fake.calls if call.method == "PUT"]
    assert call.json() == {
        "client_id": "me",
        "image": "registry.example/agent:1",
        "disk": 43,
        "label": TOKEN,
        "env": {"A": "b"},
        "runtype": "args",
        "target_state": "running",
        "cancel_unavail": True,
    }


def test_a_port_is_opened_as_an_option_of_docker(market: Market) -> None:
    assert isinstance(market.create(port=47100), Created)
    (call,) = [call for call in market.fake.calls if call.method == "PUT"]
    assert call.json()["env"] == {"A": "b", "-p 47100:47100": "1"}


def test_a_bid_is_sent_as_offered_and_billed_as_bid(market: Market) -> None:
    offer = market.driver.quote(spec(market="spot"))[0]
    result = market.create(offer)
    assert isinstance(result, Created)
    assert market.seen(result.handle).usd_per_hour == pytest.approx(offer.usd_per_hour)
    market.advance(3600)
    assert market.driver.charged_usd(result.handle) == pytest.approx(offer.usd_per_hour)


def test_a_taken_offer_is_a_certain_refusal_in_each_of_its_three_forms(market: Market) -> None:
    market.fake.snatched = 3
    reasons = []
    for _ in range(3):
        result = market.create()
        assert isinstance(result, NotCreated) and (result.kind, result.handle) == (None, None)
        reasons.append(result.reason)
    assert {reason.split(": ")[1].split()[0] for reason in reasons} == {"400", "404", "410"}
    assert market.fake.instances == []


def test_a_bid_that_became_too_low_surfaces_the_contract_that_the_refusal_left(market: Market) -> None:
    offer = market.driver.quote(spec(market="spot"))[0]
    market.fake.asks[0].min_bid = 0.3
    result = market.create(offer)
    assert isinstance(result, NotCreated) and result.handle is not None
    assert market.fake.meter.billing() == [result.handle]
    assert market.driver.destroy(result.handle)
    assert market.fake.meter.billing() == []


@pytest.mark.parametrize("fault", ["lost", "slow", "html", "truncated"])
def test_a_create_with_an_effect_and_without_a_readable_answer_is_ambiguous(market: Market, fault: Any) -> None:
    offer = market.driver.quote(spec())[0]
    market.driver = VastDriver(vast_account(market.fake), now=market.clock, timeout_s=1 if fault == "slow" else 5)
    market.fake.inject(fault, CREATE)
    assert isinstance(market.create(offer), Ambiguous)
    assert market.existing() == [TOKEN]


@pytest.mark.parametrize("fault", ["reset", "500", "429"])
def test_a_create_without_an_effect_and_a_clean_answer_is_ambiguous_and_sent_once(market: Market, fault: Any) -> None:
    offer = market.driver.quote(spec())[0]
    market.fake.inject(fault, CREATE)
    assert isinstance(market.create(offer), Ambiguous)
    assert [call.method for call in market.fake.calls].count("PUT") == 1
    assert market.existing() == []


def test_a_create_that_reaches_nobody_made_nothing(market: Market) -> None:
    offer = market.driver.quote(spec())[0]
    account = vast_account(market.fake).model_copy(update={"address": "http://127.0.0.1:1"})
    market.driver = VastDriver(account, now=market.clock)
    assert isinstance(market.create(offer), NotCreated)
    market.driver = VastDriver(vast_account(market.fake), now=market.clock)


@pytest.mark.parametrize(
    ("attributes", "kind", "remedy"),
    [
        ({"credit": 0.0}, RefusalKind.CREDIT, "add credit"),
        ({"spend_limited": True}, RefusalKind.QUOTA, "higher limit"),
        ({"keys": {}}, RefusalKind.KEY, "create a key"),
        ({"keys": {KEY: frozenset({"misc"})}}, RefusalKind.PERMISSION, "instance_write"),
    ],
)
def test_a_refusal_of_the_account_names_kind_and_remedy(
    market: Market, attributes: dict[str, Any], kind: RefusalKind, remedy: str
) -> None:
    offer = market.driver.quote(spec())[0]
    for name, value in attributes.items():
        setattr(market.fake, name, value)
    result = market.create(offer)
    assert isinstance(result, NotCreated)
    assert (result.kind, remedy in result.reason, "\n" in result.reason) == (kind, True, False)
    assert (KEY in result.reason, market.fake.instances) == (False, [])


def test_an_image_or_a_body_that_the_provider_refuses_hits_all_offers(market: Market) -> None:
    for changes, kind in (({"image": ""}, RefusalKind.IMAGE), ({"token": "t" * 1025}, None)):
        result = market.create(**changes)
        assert isinstance(result, NotCreated) and result.kind is kind
    dear = market.driver.quote(spec())[0].model_copy(update={"usd_per_hour": 1.5})
    assert isinstance(market.create(dear), NotCreated)


# Lists.


def test_a_list_of_many_pages_is_read_to_its_end_at_the_permitted_pace(market: Market) -> None:
    market.fake.asks = [FakeAsk(at, at) for at in range(1, 61)]
    handles = {market.made(f"{PREFIX}nights-{at}") for at in range(60)}
    market.fake.intervals_s["list"] = 1.0
    found = market.driver.inventory(PREFIX, market.now())
    assert (found.complete, {one.handle for one in found.sightings}) == (True, handles)
    market.advance(1)
    market.fake.broken_pages = 2
    found = market.driver.inventory(PREFIX, market.now())
    assert (found.complete, len(found.sightings)) == (False, 25)


@pytest.mark.parametrize(("total", "complete"), [(26, False), (25, True), (None, True)])
def test_a_list_that_names_more_instances_than_it_shows_is_incomplete(
    market: Market, monkeypatch: pytest.MonkeyPatch, total: int | None, complete: bool
) -> None:
    """The token of the next page is missing. An answer without the number is taken as before."""
    market.fake.asks = [FakeAsk(at, at) for at in range(1, 27)]
    for at in range(26):
        market.made(f"{PREFIX}nights-{at}")
    with monkeypatch.context() as patched:
        told = {"next_token": None, "total_instances": total}
        patched.setattr("fakes.vast.provider.page", lambda rows, query: {**page(rows, query), **told})
        found = market.driver.inventory(PREFIX, market.now())
    assert (found.complete, len(found.sightings)) == (complete, 25)


@pytest.mark.parametrize("body", [{"instances": None}, {"success": False}, [], "text"])
def test_a_list_without_instances_is_no_list(market: Market, monkeypatch: pytest.MonkeyPatch, body: Any) -> None:
    market.made()
    with monkeypatch.context() as patched:
        patched.setattr("fakes.vast.provider.page", lambda rows, query: body)
        with pytest.raises(ProviderUnavailable):
            market.driver.inventory(PREFIX, market.now())


def test_a_fresh_instance_is_listed_late(market: Market) -> None:
    market.fake.visible_after_s = 5
    market.made()
    assert market.driver.inventory(PREFIX, market.now()).sightings == []
    market.advance(5)
    assert len(market.driver.inventory(PREFIX, market.now()).sightings) == 1


def test_a_list_waits_once_for_a_list_that_another_process_has_read(market: Market) -> None:
    handle, began = market.made(), market.now()
    market.fake.intervals_s["list"] = 1.0
    hurried = VastDriver(vast_account(market.fake), now=market.clock, pause=market.clock.advance)
    market.driver.inventory(PREFIX, market.now())
    found = hurried.inventory(PREFIX, market.now())
    assert (found.complete, [one.handle for one in found.sightings]) == (True, [handle])
    assert market.now() == began + 1
    market.fake.intervals_s["list"] = 9.0
    with pytest.raises(ProviderUnavailable, match="429"):
        hurried.inventory(PREFIX, market.now())
    market.fake.intervals_s.clear()


def test_a_destroy_that_comes_too_early_is_throttled_and_ends_nothing(market: Market) -> None:
    handle = market.made()
    market.fake.intervals_s.update(destroy=3.0)
    market.driver.destroy("1")
    with pytest.raises(ProviderUnavailable, match="too frequent"):
        market.driver.destroy(handle)
    market.fake.intervals_s.clear()


def test_an_examination_keeps_the_pace_after_a_list(market: Market) -> None:
    market.fake.intervals_s["list"] = 1.0
    for _ in range(2):
        market.driver.inventory(PREFIX, market.now())
        assert market.driver.examine(PREFIX).problems == []


def test_a_destroy_with_a_bad_key_is_no_end(market: Market) -> None:
    handle = market.made()
    for keys, kind in (({}, RefusalKind.KEY), ({KEY: frozenset({"misc"})}, RefusalKind.PERMISSION)):
        market.fake.keys = keys
        with pytest.raises(ProviderRefused) as refused:
            market.driver.destroy(handle)
        assert refused.value.kind is kind
    assert market.existing() == [TOKEN]


# Prices, logs, charges.


def test_an_announced_price_is_listed_before_it_holds_and_extends_the_contract_once_accepted(market: Market) -> None:
    market.fake.asks[0].end_date = market.clock() + 7200
    handle = market.made()
    before = market.seen(handle)
    assert before.usd_per_hour == pytest.approx(0.41075)
    market.fake.raise_price(handle, 0.5)
    assert market.seen(handle).announced_usd_per_hour is None, "the old price holds for two more hours"
    market.advance(3600)
    announced = market.seen(handle).announced_usd_per_hour
    assert announced == pytest.approx(0.51075)
    market.driver.accept_price(handle, 0.45)
    assert market.seen(handle).announced_usd_per_hour == announced, "0.45 USD/h are not what the host wants"
    market.driver.accept_price(handle, announced or 0)
    after = market.seen(handle)
    assert (after.usd_per_hour, after.announced_usd_per_hour) == (before.usd_per_hour, None)
    market.driver.accept_price(handle, 0.6)
    market.driver.accept_price("77", 0.6)
    market.advance(7200)
    assert (market.seen(handle).running, market.seen(handle).usd_per_hour) == (True, announced)
    assert market.driver.charged_usd(handle) == pytest.approx(2 * 0.41075 + 0.51075, rel=2e-3)


def test_announced_prices_that_cannot_be_read_leave_the_list_usable(market: Market) -> None:
    market.fake.asks[0].end_date = market.clock() + 600
    handle = market.made()
    market.fake.raise_price(handle, 0.5)
    market.fake.inject("500", "GET /api/v0/instances/pending-price-increases/", count=2)
    seen = market.seen(handle)
    assert (seen.running, seen.announced_usd_per_hour) == (True, None)


def test_a_log_comes_with_a_later_call_and_without_tokens_or_the_accounts_key(market: Market) -> None:
    handle = market.made()
    market.fake.instance(handle).log = "BATON_ENROLMENT_TOKEN=baton_abc-DEF_123 set\nstarted\n"
    assert market.driver.logs(handle) is None
    market.advance(1)
    assert market.driver.logs(handle) == "BATON_ENROLMENT_TOKEN=[token] set\nstarted\n"
    results = [call for call in market.fake.calls if call.path.startswith("/results/")]
    assert len(results) == 2 and not any("authorization" in call.headers for call in results)
    assert market.driver.logs(handle) is None
    market.advance(121)
    market.fake.log_after_s = 0
    assert market.driver.logs(handle)


def test_a_charge_counts_gpu_disk_and_traffic_of_the_instance_alone(market: Market) -> None:
    handle, other = market.made(), market.made(f"{PREFIX}nights-2")
    market.advance(1800)
    market.fake.transfer(handle, gb=20)
    market.driver.destroy(handle)
    market.advance(1800)
    assert market.driver.charged_usd(handle) == pytest.approx(0.41075 / 2 + 20 * 0.005)
    assert market.driver.charged_usd(other) == market.fake.meter.usd(other)


# The account.


def test_an_account_is_reported_with_credit_foreign_machines_and_leftovers(market: Market) -> None:
    handle, foreign = market.made(), market.made("dep20000-nights-1")
    market.fake.set_status(handle, "exited")
    report = market.driver.examine(PREFIX)
    assert (report.account, report.balance_usd, report.problems) == ("ada@example.com", 100.0, [])
    assert [one.handle for one in report.foreign] == [foreign]
    (left,) = report.leftovers
    assert (left.handle, left.token, left.usd_per_hour) == (handle, TOKEN, pytest.approx(43 * 0.18 / 720))
    market.driver.remove_leftover(left)
    assert market.existing() == ["dep20000-nights-1"]


@pytest.mark.parametrize("missing", sorted(PERMISSIONS))
def test_a_permission_that_the_key_lacks_is_named_with_its_consequence(market: Market, missing: str) -> None:
    market.fake.keys = {KEY: PERMISSIONS - {missing}}
    (problem,) = market.driver.examine(PREFIX).problems
    assert problem.startswith(f"the key lacks {missing}: ") and "create a key" in problem


def test_a_key_with_all_permissions_and_an_account_without_credit_are_problems(market: Market) -> None:
    market.fake.keys, market.fake.credit = {KEY: PERMISSIONS | {"machine_read"}}, 0.0
    many, poor = market.driver.examine(PREFIX).problems
    assert "more permissions" in many and "add credit" in poor
    market.fake.keys = {}
    with pytest.raises(ProviderRefused) as refused:
        market.driver.examine(PREFIX)
    assert refused.value.kind is RefusalKind.KEY


def test_the_end_of_a_contract_and_of_the_credit_stop_instances(market: Market) -> None:
    market.fake.asks[0].end_date = market.clock() + 600
    handle = market.made()
    market.advance(3600)
    assert not market.seen(handle).running
    assert market.fake.meter.usd(handle, "gpu") == pytest.approx(0.4 / 6)
    market.driver.destroy(handle)
    second = market.made()
    market.fake.credit = market.fake.meter.usd() + 0.1
    market.advance(3600)
    assert market.seen(second).message.startswith("outbid")

"""The calls that show offers and a fleet's next steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.money import Budget
from baton.contract.jobs.job import JobState
from functions.api.fleet import quotes
from functions.domain.jobs.transaction import Put
from functions.domain.worlds.world_record import WorldNode, WorldRecord
from functions.fleet.accounts import AccountsUnreadable
from functions.fleet.breaker import CODE, Breaker, FormingPause
from functions.fleet.drivers.protocol import ProviderRefused, ProviderUnavailable, RefusalKind
from functions.fleet.ledger import Ledger
from functions.fleet.records import Offer, StoredFleet
from tests.conformance.drivers.driven_vast import VastDriven
from tests.kits.api.fleets import DOCUMENT, make_machine, put_machine, write
from tests.kits.api.harness import Api
from tests.kits.waiting import expire_for
from tests.twins.provider import VirtualProvider

COMMAND = {"command": ["true"]}


class Market(VirtualProvider):
    """A provider whose offers, or whose failure, the test names."""

    def __init__(self, name: str, *offers: dict[str, Any], failure: Exception | None = None) -> None:
        super().__init__(name=name)
        self._offers, self._failure = offers, failure

    def quote(self, spec: FleetSpec) -> Sequence[Offer]:
        if self._failure is not None:
            raise self._failure
        usual = {"vram_gib": 24, "disk_gib": 80, "usd_per_hour": 0.2, "boot_s": 0}
        return [Offer(provider=self.name, **{**usual, **one}) for one in self._offers]


def sell(api: Api, *markets: VirtualProvider) -> None:
    api.context = replace(api.context, drivers={one.name: one for one in markets})


def stored(api: Api) -> StoredFleet:
    assert api.context.fleet is not None
    found = api.context.fleet.fleet("acme", "nights")
    assert found is not None
    return found


def plan(api: Api, job: dict[str, Any] | None = None, hours: float | None = None, **changes: Any) -> dict[str, Any]:
    body = {"fleet": {**DOCUMENT, **changes}, **({"job": job} if job else {}), **({"hours": hours} if hours else {})}
    found: dict[str, Any] = api.post("/fleets/nights/plan", body).ok()
    return found


def test_a_plan_names_the_offers_that_it_takes_and_the_reasons_against_the_others(api: Api) -> None:
    calm = {"ref": "calm", "usd_per_hour": 0.2}
    fragile = {"ref": "fragile", "usd_per_hour": 0.15, "boot_s": 1800, "interruptions_per_hour": 0.5, "spot": True}
    sell(api, Market("loopback", {"ref": "dear", "usd_per_hour": 0.9}, fragile, calm))
    api.submit()
    with api.unchanged():
        found = plan(api, hours=2)
    assert (found["start"], found["why"], found["alive"]) == (1, "max is 1", 0)
    assert [(one["ref"], one["taken"], one["rejected"]) for one in found["offers"]] == [
        ("calm", 1, ""),
        ("fragile", 0, ""),
        ("dear", 0, "0.9 USD/h exceeds max_usd_per_hour 0.5"),
    ]
    first, second = (one["expected"] for one in found["offers"][:2])
    assert (first["total"], first["machine"], first["boot"], first["lost"]) == (0.4, 0.4, 0, 0)
    assert second["total"] > 0.4 and second["machine"] == 0.3 and second["boot"] == 0.075
    assert second["lost"] == pytest.approx(second["total"] - 0.3 - 0.075)
    # Two hours, five minutes of idle_timeout_s and one to four minutes until the absence is proved.
    assert found["usd"] == {"low": 0.42, "expected": 0.4233, "high": 0.43}
    assert found["hours"] == {"low": 2, "expected": 2, "high": 2}
    assert (found["room_usd"], found["room_bound"], found["paid_hours"]) == (20, "total_usd", 100)


def test_a_plan_is_what_the_next_tick_does(api: Api) -> None:
    from tests.unit.fleet.night import Night

    for changes in ({"max": 2}, {"max": 5}, {"max": 5, "budget": {"total_usd": 0.5}}, {"max_usd_per_hour": 0.1}):
        night = Night(FleetSpec.model_validate({**DOCUMENT, **changes}), {"loopback": VirtualProvider()})
        for _ in range(3):
            night.submit(hours=1)
        night.step()
        provider = VirtualProvider()
        sell(api, provider)
        while len(api.context.jobs.list_jobs("acme", state=JobState.PENDING, limit=9).items) < 3:
            api.submit()
        found = plan(api, **changes)
        assert found["start"] == len(night.providers["loopback"].creates), changes
        assert provider.creates == []


@pytest.mark.parametrize(
    ("jobs", "changes", "machines", "why"),
    [
        (0, {}, 0, "no job waits that the fleet can run"),
        (0, {"min": 1}, 0, "max is 1"),
        (0, {"min": 1, "max": 2}, 0, "min is 1"),
        (1, {"max": 2}, 0, "one job waits"),
        (2, {"max": 3}, 0, "2 jobs wait"),
        (1, {"max": 2}, 1, "machines that are there take the 1 waiting jobs"),
        (2, {}, 1, "max is 1, and the fleet has 1 machines"),
        (3, {"max": 9}, 0, "only 2 offers fit"),
        (1, {"min_vram_gib": 48}, 0, "no offer fits, the nearest: 24 GiB VRAM, min_vram_gib is 48"),
        (2, {"max": 2, "budget": {"per_day_usd": 0.3}}, 0, "per_day_usd has 0.10 USD left, boot and one hour of the"),
    ],
)
def test_a_plan_says_why_no_more_machines_start(
    api: Api, jobs: int, changes: dict[str, Any], machines: int, why: str
) -> None:
    sell(api, Market("loopback", {"ref": "a"}, {"ref": "b"}))
    for _ in range(jobs):
        api.submit()
    for number in range(machines):
        put_machine(api, make_machine(f"m{number}", State.READY))
    assert plan(api, **changes)["why"].startswith(why)


def test_a_plan_tells_what_only_a_create_meets(api: Api) -> None:
    sell(api, Market("loopback", {"ref": "a"}))
    api.submit()
    api.call("PUT", "/fleets/nights", DOCUMENT).ok()
    write(api, ledger=Ledger(version=1, waits="loopback: provider_credit_exhausted: add credit"))
    found = plan(api)
    assert (found["start"], found["waits"]) == (1, "loopback: provider_credit_exhausted: add credit")
    api.post("/fleets/nights/stop").ok()
    assert plan(api)["waits"] == ""


def test_a_budget_that_pays_for_no_machine_is_named_with_enough_digits(api: Api) -> None:
    sell(api, Market("loopback", {"ref": "a", "boot_s": 10}))
    api.submit()
    short = plan(api, budget={"total_usd": 0.2}, max_usd_per_hour=0.2)["why"]
    assert short == "total_usd has 0.2000 USD left, boot and one hour of the cheapest offer need 0.2006 USD"
    dear = plan(api, budget={"total_usd": 0.05}, max_usd_per_hour=0.05)["why"]
    assert dear.endswith("0.2 USD/h: the budget of 0.05 USD (total_usd) does not pay for boot and one hour")


def test_a_kind_of_machine_is_taken_for_each_job(api: Api) -> None:
    sell(api, Market("loopback", {"ref": "kind", "repeatable": True}))
    for _ in range(3):
        api.submit()
    found = plan(api, max=3)
    assert (found["start"], [one["taken"] for one in found["offers"]]) == (3, [3])


def test_an_offer_that_is_too_dear_hides_no_cheaper_one(api: Api) -> None:
    """The best offer for nine hours boots for two hours, which the budget does not pay for beside an hour of work."""
    best = {"ref": "best", "usd_per_hour": 0.05, "boot_s": 7200}
    sell(api, Market("loopback", best, {"ref": "next", "usd_per_hour": 0.11}))
    api.submit()
    found = plan(api, hours=9, budget={"total_usd": 0.13})
    assert [(one["ref"], one["taken"]) for one in found["offers"]] == [("best", 0), ("next", 1)]


def test_machines_of_another_fleet_take_jobs_and_the_deployment_bounds_all(api: Api) -> None:
    sell(api, Market("loopback", {"ref": "a"}))
    api.submit()
    api.call("PUT", "/fleets/days", {**DOCUMENT, "name": "days"}).ok()
    put_machine(api, make_machine("m1", State.READY, fleet="days"))
    assert plan(api)["why"] == "machines that are there take the 1 waiting jobs"
    assert plan(api, queues=["default", "more"], min=1)["start"] == 1
    settings = api.context.settings.model_copy(update={"fleet_budget": Budget(total_usd=0.1)})
    api.context = replace(api.context, settings=settings)
    found = plan(api, min=1)
    assert (found["room_usd"], found["room_bound"]) == (0.1, "total_usd of the deployment")
    assert found["start"] == 0 and found["why"].startswith("total_usd of the deployment has 0.10 USD left")


def test_a_job_is_planned_before_its_submission(api: Api) -> None:
    sell(api, Market("loopback", {"ref": "a", "usd_per_gb": 0.01}))
    with api.unchanged():
        found = plan(api, job={**COMMAND, "name": "mine"}, hours=1)
        assert [(one["job"], one["name"], one["hours_from"]) for one in found["works"]] == [(None, "mine", "given")]
        large = {"requirements": {"min_vram_gib": 80}}
        refused = plan(api, job={**COMMAND, **large})
        assert refused["unservable"] == [
            {"job": None, "reason": "needs 80 GiB VRAM, fleet nights guarantees 0 (min_vram_gib)"}
        ]
        assert (refused["start"], refused["usd"]) == (0, None)
        body = {"fleet": DOCUMENT, "job": COMMAND, "hours": 1, "input_gb": 95}
        assert api.post("/fleets/nights/plan", body).ok()["offers"][0]["expected"]["traffic"] == 1
        api.post("/fleets/nights/plan", {"fleet": DOCUMENT, "job": {"recipe": "nothing@1"}}).refused(
            ErrorCode.UNKNOWN_RECIPE, "job.recipe"
        )
        api.post("/fleets/days/plan", {"fleet": DOCUMENT}).refused(ErrorCode.INVALID_VALUE, "fleet.name")


def test_the_history_of_a_recipe_gives_hours_and_their_spread(api: Api) -> None:
    sell(api, Market("loopback", {"ref": "a"}))
    recipe: dict[str, Any] = {"recipe": "command@1", "parameters": {"command": ["true"]}}
    assert plan(api, job=recipe)["works"][0]["hours_from"] == "assumed"
    for seconds in (18, 36, 54):
        api.submit(**recipe)
        held = api.claim()
        api.clock.advance(seconds)
        held.complete().ok()
    found = plan(api, job=recipe)
    assert [(one["hours"], one["hours_from"]) for one in found["works"]] == [(0.01, "history")]
    assert found["hours"] == {"low": 0.006, "expected": 0.01, "high": 0.014}


def test_a_provider_without_an_answer_is_a_line_and_no_failure(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    release, hanging = threading.Event(), list[str]()
    # API Gateway ends a call after 30 s.
    monkeypatch.setattr(quotes, "wait", expire_for(lambda: len(hanging), below_s=30))

    class Slow(Market):
        def quote(self, spec: FleetSpec) -> Sequence[Offer]:
            hanging.append(self.name)
            release.wait(60)
            return []

    paced = Market("runpod", {"ref": "p"})
    paced.min_interval_s = {"quote": 6.0}
    markets = (
        Market("loopback", {"ref": "a"}),
        Market("vast", failure=ProviderUnavailable("HTTP 502 with an HTML page")),
        Market("salad", failure=ProviderRefused(RefusalKind.KEY, "the key is refused; run 'baton fleet login salad'")),
        Slow("ec2"),
        paced,
    )
    sell(api, *markets)
    api.post("/offers", {"providers": ["runpod"]}).ok()
    names = ["loopback", "vast", "salad", "ec2", "runpod", "ssh"]
    found = api.post("/offers", {"providers": names}).ok()
    release.set()
    assert [one["ref"] for one in found["offers"]] == ["a"]
    assert {one["provider"]: one["reason"] for one in found["silent"]} == {
        "vast": "HTTP 502 with an HTML page",
        "salad": "provider_key_refused: the key is refused; run 'baton fleet login salad'",
        "ec2": "did not answer within 20 s",
        "runpod": "takes one call in 6 s; try again then",
        "ssh": "no account is stored; run 'baton fleet login ssh'",
    }


def test_a_driver_that_fails_silences_its_own_provider_only(api: Api) -> None:
    sell(api, Market("loopback", {"ref": "a"}), Market("vast", failure=KeyError("id")))
    found = api.post("/offers", {"providers": ["vast", "loopback"]}).ok()
    assert [one["ref"] for one in found["offers"]] == ["a"]
    reason = "its driver failed with KeyError, and the log has the cause"
    assert found["silent"] == [{"provider": "vast", "reason": reason}]


def test_unreadable_accounts_silence_their_providers_only(api: Api) -> None:
    class Drivers(dict[str, VirtualProvider]):
        def __missing__(self, name: str) -> VirtualProvider:
            raise AccountsUnreadable("the file holds no JSON object")

        def get(self, name: str, default: Any = None) -> Any:
            return self[name]

        def __iter__(self) -> Any:
            raise AccountsUnreadable("the file holds no JSON object")

    drivers = Drivers(loopback=Market("loopback", {"ref": "a"}))
    api.context = replace(api.context, drivers=drivers)
    found = api.post("/offers", {"providers": ["loopback", "vast"]}).ok()
    assert [one["ref"] for one in found["offers"]] == ["a"]
    assert found["silent"] == [{"provider": "vast", "reason": "the file holds no JSON object"}]
    refused = api.post("/offers", {}).refused(ErrorCode.CONFLICT)
    assert "store all accounts again" in refused["message"]


def test_offers_of_vast_have_their_traffic_and_their_interruptions_in_the_total(api: Api, tmp_path: Path) -> None:
    vast = VastDriven(tmp_path)
    api.clock.advance(vast.now() - api.clock.now())
    api.context = replace(api.context, drivers={"vast": vast.driver})
    document = {"providers": ["vast"], "image": "ghcr.io/acme/worker:1", "max_usd_per_hour": 0.5, "max": 2}
    found = plan(api, job=COMMAND, hours=3, **document)
    assert (found["start"], found["silent"]) == (1, [])
    (taken,) = [one for one in found["offers"] if one["taken"]]
    parts = taken["expected"]
    assert parts["total"] == pytest.approx(
        sum(parts[name] for name in ("machine", "traffic", "boot", "lost")), abs=3e-4
    )
    assert parts["machine"] == pytest.approx(3 * taken["usd_per_hour"], abs=1e-4)
    assert parts["traffic"] > 0 and parts["boot"] > 0
    assert taken["expected"]["total"] == min(one["expected"]["total"] for one in found["offers"] if not one["rejected"])
    assert found["usd"]["low"] < found["usd"]["expected"] < found["usd"]["high"]
    assert all(one["rejected"] for one in found["offers"] if one["usd_per_hour"] > 0.5)
    dear = api.post("/offers", {"providers": ["vast"], "max_usd_per_hour": 0.01}).ok()
    assert dear["offers"] == [] or all("exceeds max_usd_per_hour" in one["rejected"] for one in dear["offers"])
    assert vast.fake.instances == [] and vast.fake.meter.usd() == 0
    vast.close()


def test_an_impossible_number_of_a_provider_is_no_offer(api: Api) -> None:
    sell(api, Market("loopback", {"ref": "a", "usd_per_hour": float("nan")}))
    assert api.post("/offers", {}).ok()["silent"] == [
        {"provider": "loopback", "reason": "the answer has 1 impossible values"}
    ]


def test_offers_are_ranked_by_the_length_of_the_work_and_the_rest_is_counted(api: Api) -> None:
    slow = {"ref": "slow", "usd_per_hour": 0.1, "boot_s": 7200}
    sell(api, Market("loopback", slow, {"ref": "fast"}, {"ref": "small", "vram_gib": 8}))
    with api.unchanged():
        short = api.post("/offers", {"hours": 0.5, "min_vram_gib": 16}).ok()
        assert [one["ref"] for one in short["offers"]] == ["fast", "slow", "small"]
        assert short["offers"][2]["rejected"] == "8 GiB VRAM, min_vram_gib is 16"
        long = api.post("/offers", {"hours": 24, "min_vram_gib": 16, "limit": 1}).ok()
    assert ([one["ref"] for one in long["offers"]], long["omitted"]) == (["slow"], 2)


@pytest.mark.parametrize(("body", "field"), [({"hours": 0}, "hours"), ({"providers": ["aws"]}, "providers.0")])
def test_bad_questions_are_refused_at_their_field(api: Api, body: dict[str, Any], field: str) -> None:
    api.post("/offers", body).refused(ErrorCode.INVALID_VALUE, field)


def test_a_plan_counts_the_nodes_of_a_job(api: Api) -> None:
    sell(api, Market("loopback", *({"ref": str(at), "usd_per_hour": 0.2 + at / 100} for at in range(4))))
    job = {**COMMAND, "nodes": {"min": 2, "max": 6}}
    found = plan(api, job, hours=3, max=6)
    assert (found["start"], found["why"]) == (4, "only 4 offers fit")
    assert found["works"] == [{"job": None, "name": None, "nodes": 6, "hours": 3, "hours_from": "given"}]
    # Four nodes train three hours each, and the nodes without a machine never train alone.
    assert (found["hours"]["expected"], found["usd"]["expected"]) == (3, pytest.approx(0.86 * 3.1167, abs=0.001))
    few = plan(api, {**COMMAND, "nodes": {"min": 5, "max": 6}}, max=6)
    assert (few["start"], few["why"], few["usd"]) == (0, "4 of 5 nodes can be rented; only 4 offers fit", None)
    small = plan(api, {**COMMAND, "nodes": {"min": 2, "max": 6}, "requirements": {"min_vram_gib": 48}}, max=6)
    assert len(small["unservable"]) == 1
    stored = api.submit(nodes={"min": 2, "max": 3})
    assert [(one["job"], one["nodes"]) for one in plan(api, max=6)["works"]] == [(stored["id"], 3)]


def test_the_plan_of_a_submitted_job_counts_its_nodes_once(api: Api) -> None:
    """`baton submit --rent` asks with the job, because the index of waiting jobs may not list its seats yet."""
    sell(api, Market("loopback", *({"ref": str(at)} for at in range(3))))
    nodes = {"min": 2, "max": 4}
    job = api.submit(nodes=nodes, rent={"budget_usd": 9, "providers": ["loopback"]})
    name = job["queue"]
    spec = api.get(f"/fleets/{name}").ok()["spec"]
    body = {"fleet": spec, "job": {**COMMAND, "nodes": nodes, "queue": name}}
    found = api.post(f"/fleets/{name}/plan", body).ok()
    assert (found["start"], found["why"]) == (3, "only 3 offers fit")
    assert [one["nodes"] for one in found["works"]] == [4]


def test_offers_for_nodes_are_counted_by_hosts(api: Api) -> None:
    """The host of the first two offers sells one GPU, on demand and to bids; the kind of the last has many machines."""
    one = {"ref": "a", "machine_ref": "h1", "usd_per_hour": 0.2}
    bid = {"ref": "a@bid", "ask": "a", "machine_ref": "h1", "usd_per_hour": 0.21, "spot": True}
    many = {"ref": "k", "usd_per_hour": 0.3, "repeatable": True}
    sell(api, Market("loopback", one, bid, {"ref": "b", "machine_ref": "h2", "usd_per_hour": 0.25}, many))

    def taken(**more: Any) -> dict[str, int]:
        found = api.post("/offers", more).ok()["offers"]
        return {one["ref"]: one["taken"] for one in found}

    assert taken() == {"a": 0, "a@bid": 0, "b": 0, "k": 0}
    assert taken(nodes=2) == {"a": 1, "a@bid": 0, "b": 1, "k": 0}
    assert taken(nodes=4, limit=1) == {"a": 1, "a@bid": 0, "b": 1, "k": 2}


def test_a_training_that_has_lost_nodes_plans_each_machine(api: Api) -> None:
    sell(api, Market("loopback", {"ref": "a"}))
    job = api.submit(nodes={"min": 3, "max": 3})
    seat = api.claim().item["world"]["seat"]
    assert plan(api, max=3)["why"] == "2 of 3 nodes can be rented; only one offer fits"
    old, new = (WorldNode(node=f"{seat}.{attempt}.9f86d081") for attempt in (9, 1))
    api.context.jobs.put(Put(owner=job["id"], record=WorldRecord(version=1, epoch=2, members=[old])))
    assert plan(api, max=3)["start"] == 0, "the world of an earlier attempt"
    api.context.jobs.put(Put(owner=job["id"], record=WorldRecord(version=2, epoch=3, members=[new])))
    assert (plan(api, max=3)["start"], plan(api, max=3)["why"]) == (1, "only one offer fits")


PAUSED = "only 2 of 3 nodes could be rented within 30 minutes; next try at "


def test_a_plan_says_until_when_a_training_waits_that_could_not_begin(api: Api) -> None:
    """A new document ends the pause, therefore the plan of another document starts machines, as its apply does."""
    sell(api, Market("loopback", {"ref": "kind", "repeatable": True}))
    api.call("PUT", "/fleets/nights", {**DOCUMENT, "max": 4}).ok()
    api.clock.advance(60)
    job, now = api.submit(nodes={"min": 3, "max": 3}), api.clock.now()
    pause = FormingPause(reason=PAUSED.partition(";")[0], since=now, pause_s=900)
    write(api, ledger=Ledger(version=1, forming={job["id"]: pause}, waits=pause.waits(stored(api), now)))
    with api.unchanged():
        found = plan(api, max=4)
        assert (found["start"], found["usd"], found["works"]) == (0, None, [])
        assert found["why"] == f"{PAUSED}{datetime.fromtimestamp(now + 900, UTC):%H:%M} UTC" == found["waits"]
        other = plan(api, COMMAND, max=4)
        assert (other["start"], len(other["works"])) == (1, 1)
        assert other["why"] == f"{found['why']}; one job waits"
    api.clock.advance(899)
    assert (plan(api, max=4)["start"], plan(api, max=5)["start"]) == (0, 3)
    api.clock.advance(1)
    assert (plan(api, max=4)["start"], plan(api, max=4)["why"]) == (3, "3 jobs wait")
    api.clock.advance(-1)
    api.post("/fleets/nights/stop").ok()
    assert plan(api, max=4)["start"] == 3, "the next apply ends the pause of a stopped fleet"


def test_a_plan_takes_no_offer_of_a_provider_whose_machines_do_not_start(api: Api) -> None:
    sell(api, Market("loopback", {"ref": "a"}), Market("vast", {"ref": "b", "usd_per_hour": 0.3}))
    document = {"providers": ["loopback", "vast"], "image": "acme/worker:1"}
    api.call("PUT", "/fleets/nights", {**DOCUMENT, **document}).ok()
    api.clock.advance(60)
    api.submit()
    now = api.clock.now()
    broken = Breaker(failures=3, failed_at=now, reason="lost", machine="m", pause_s=900, paused_until=now + 900)
    write(api, ledger=Ledger(version=1, breakers={"loopback": broken}))
    found = plan(api, **document)
    assert {one["ref"]: one["taken"] for one in found["offers"]} == {"a": 0, "b": 1}
    write(api, ledger=Ledger(version=2, breakers={"loopback": broken, "vast": broken}))
    found = plan(api, **document)
    assert (found["start"], found["paid_hours"]) == (0, None)
    told = f"{CODE}: 3 machines in a row ended before they began a job, the last: lost; its output: baton fleet logs m"
    until = f"; next try at {datetime.fromtimestamp(now + 900, UTC):%H:%M} UTC"
    assert found["why"] == f"no offer fits, the nearest: {told}{until}"
    api.clock.advance(1)
    assert plan(api, **document, max=2)["start"] == 1

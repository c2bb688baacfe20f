"""Accounts and providers that refuse, fail or lie, at the real drivers: stable code, one line, remedy, no machine.

Contradictory documents are refused before they are stored (tests/functional/api/test_fleets.py); colliding names and
clocks that differ are scenarios 20 and 25.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.contract.fleets.fleet import MachineState as State
from fakes.vast.provider import KEY, PERMISSIONS
from tests.twins.provider import VirtualProvider
from tests.unit.fleet.rented import FOREIGN, HAPPY, HTTP_PROVIDERS, LOST, OVERDUE, RentedNight

Change = Callable[[Any], object]


def _set(name: str, value: object) -> Change:
    return lambda fake: setattr(fake, name, value)


def _answer(kind: Any) -> Change:
    return lambda fake: fake.inject(kind, count=100_000)


def _heal(fake: Any) -> None:
    fake.faults.clear()


def _hour(night: RentedNight) -> None:
    """Let 54 minutes pass, with a tick each ninth minute."""
    for _ in range(6):
        night.step()
        night.skip(8 * 60)


ANSWERS = ("401", "429", "500", "html", "truncated", "reset")
TROUBLES: list[tuple[str, str, Change, Change, str, str]] = [
    *(
        (name, kind, _answer(kind), _heal, *told)
        for name in HTTP_PROVIDERS
        for kind in ANSWERS
        for told in [
            ("provider_key_refused", "Store a valid key with `baton fleet login`")
            if kind == "401"
            else ("provider_unavailable", "the next tick asks again")
        ]
    ),
    (
        *("vast", "permission", _set("keys", {KEY: PERMISSIONS - {"instance_write"}})),
        *(_set("keys", {KEY: PERMISSIONS}), "provider_permission_missing", "create a key with instance_read"),
    ),
    (
        *("runpod", "permission", _set("scopes", {"billing"})),
        *(_set("scopes", {"billing", "pods"}), "provider_permission_missing", "read/write access to the REST API"),
    ),
    ("vast", "credit", _set("credit", 0.0), _set("credit", 99.0), "provider_credit_exhausted", "add credit at"),
    ("salad", "credit", _set("has_credit", False), _set("has_credit", True), "provider_credit_exhausted", "Buy credit"),
    ("runpod", "credit", _set("credit_usd", 0.39), _set("credit_usd", 99.0), "provider_credit_exhausted", "add credit"),
    ("vast", "quota", _set("spend_limited", True), _set("spend_limited", False), "provider_quota_reached", "wait, or"),
    (
        *("salad", "quota", lambda fake: setattr(fake.cloud, "replicas_quota", 1)),
        *(lambda fake: setattr(fake.cloud, "replicas_quota", 9), "provider_quota_reached", "Delete container groups"),
    ),
    (
        *("runpod", "impossible price", lambda fake: setattr(fake.gpus[0], "secure", -1.0)),
        *(lambda fake: setattr(fake.gpus[0], "secure", 0.69), "provider_unavailable", "the next tick asks again"),
    ),
]


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    driven = HTTP_PROVIDERS[request.param](tmp_path)
    yield driven
    driven.close()


@pytest.mark.parametrize(
    ("made", "trouble", "begin", "mend", "code", "remedy"),
    TROUBLES,
    ids=[f"{name}-{trouble}" for name, trouble, *_ in TROUBLES],
    indirect=["made"],
)
def test_a_provider_that_refuses_for_an_hour_is_told_in_one_line_and_leaves_no_machine(
    made: Any, trouble: str, begin: Change, mend: Change, code: str, remedy: str
) -> None:
    """Afterwards the job runs as if nothing had been."""
    night = RentedNight(made)
    night.night.submit(hours=0.2)
    begin(made.fake)
    _hour(night)
    told = night.waits()
    assert code in told and remedy in told and "\n" not in told, told
    assert not any("\n" in failure for report in night.night.reports for failure in report.failures)
    assert {one.state for one in night.machines()} <= {State.FAILED}
    assert (night.night.spent_usd(), night.usd()) == (0, 0)
    mend(made.fake)
    night.step(2)
    assert night.waits() == ""
    failed = ["planned requested failed"] * (len(night.machines()) - 1)
    night.finish(*failed, HAPPY)


@pytest.mark.parametrize("made", ["runpod"], indirect=True)
def test_a_key_that_loses_its_permission_in_mid_job_leaves_no_machine_once_it_is_mended(made: Any) -> None:
    """RunPod lists the pods meanwhile, and bills them."""
    night = RentedNight(made)
    night.night.submit(hours=0.2)
    night.step_until(State.BUSY)
    made.fake.scopes = {"billing"}
    ending = night.step_until(State.TERMINATING)
    night.step(10)
    assert night.machine(ending.id).state is State.TERMINATING
    failures = night.night.reports[-1].failures
    assert any("provider_permission_missing" in one and "read/write access" in one for one in failures), failures
    made.fake.scopes = {"billing", "pods"}
    night.finish(OVERDUE)


@pytest.mark.parametrize("made", ["vast"], indirect=True)
def test_a_credit_that_ends_in_mid_job_leaves_no_machine_and_the_job_goes_on_with_the_next_credit(made: Any) -> None:
    """Vast.ai stops the machine at once, and bills its disk until the destroy."""
    night = RentedNight(made)
    training = night.night.submit(hours=1)
    busy = night.step_until(State.BUSY)
    made.fake.credit = made.fake.meter.usd()
    night.market.dead.add(busy.id)
    night.step_until(State.GONE)
    assert night.machine(busy.id).reason.startswith("outbid") and training.left_s > 0
    night.step(3)
    told = night.waits()
    assert "provider_credit_exhausted" in told and "add credit at" in told and "\n" not in told, told
    assert made.existing() == [FOREIGN]
    billed = night.usd()
    night.step(5)
    assert night.usd() == pytest.approx(billed)
    made.fake.credit = 99.0
    night.step_until(State.READY)
    refused = sum(one.state is State.FAILED for one in night.machines())
    assert refused >= 1
    night.finish(LOST, *["planned requested failed"] * refused, HAPPY, over_usd=0.2)


@pytest.mark.parametrize("made", ["runpod"], indirect=True)
@pytest.mark.parametrize("trouble", ["permission", "closed pool", "image"])
def test_the_next_provider_serves_while_one_refuses(made: Any, trouble: str) -> None:
    night = RentedNight(made)
    other = night.night.providers["loopback"] = VirtualProvider(price=0.9, now=night.night.now)
    night.change(providers=["runpod", "loopback"])
    if trouble == "permission":
        made.fake.scopes = {"billing"}
    elif trouble == "closed pool":
        made.fake.closed_gpus = {one.id for one in made.fake.gpus}
    else:
        made.fake.fails_to_start = True
    training = night.night.submit(hours=0.2)
    night.step(30)
    assert (training.left_s, len(other.machines)) == (0, 1) and made.existing() == [FOREIGN]
    assert night.creates() == (1 if trouble == "permission" else 3), "a key without the permission is tried once"
    assert night.usd() < 0.1


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("made", HTTP_PROVIDERS, indirect=True)
def test_an_hour_without_a_usable_answer_ends_no_machine(made: Any, answer: str) -> None:
    night = RentedNight(made)
    night.night.submit(hours=1.5)
    busy = night.step_until(State.BUSY)
    begun = len(night.night.reports)
    _answer(answer)(made.fake)
    _hour(night)
    assert [(one.id, one.state) for one in night.machines()] == [(busy.id, State.BUSY)]
    assert all(one.failures and "\n" not in "".join(one.failures) for one in night.night.reports[begun:])
    made.fake.faults.clear()
    night.finish(HAPPY)


@pytest.mark.parametrize("made", HTTP_PROVIDERS, indirect=True)
def test_an_image_that_does_not_start_pauses_the_fleet_after_three_machines(made: Any) -> None:
    night = RentedNight(made)
    if night.name != "salad":
        made.fake.fails_to_start = True
    else:
        made.fake.cloud.crashing_images = {night.night.spec.image}
        made.fake.cloud.allocate_s = 30.0
    night.night.submit(hours=0.1)
    for _ in range(110):
        night.step()
        night.night.silent.update(one.id for one in night.machines())
        if night.waits():
            break
    told = night.waits()
    assert "machines_do_not_start: 3 machines in a row ended before they began a job, the last: " in told, told
    assert "; its output: baton fleet logs " in told and "next try at" in told, told
    night.step(3)
    assert len(night.machines()) == 3 and {one.state for one in night.machines()} == {State.GONE}
    assert made.existing() == ["dep20000-nights-1"]
    assert night.usd() < 0.2


@pytest.mark.parametrize("made", HTTP_PROVIDERS, indirect=True)
def test_a_gpu_that_nobody_sells_is_told(made: Any) -> None:
    night = RentedNight(made, gpu_models=["RTX 9999"], min_vram_gib=0)
    night.night.submit(hours=0.1)
    night.step(2)
    assert "gpu_models" in night.waits(), night.waits()
    assert night.machines() == [] and night.creates() == 0

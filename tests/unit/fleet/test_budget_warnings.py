"""The warning of a budget names the jobs whose work its end would destroy."""

from __future__ import annotations

from baton.contract.fleets.money import Budget
from functions.fleet.records import StoredFleet
from tests.unit.fleet.night import TENANT, Night
from tests.unit.fleet.test_fleet_nights import make_night, spec

DRAIN = "when it is spent, machines save a checkpoint and go; jobs without a checkpoint lose their work: "


def warnings(night: Night) -> list[str]:
    found = night.store.events(TENANT, "nights", limit=1000)
    return [one.reason for one in found if one.type == "budget.warning"]


def test_a_warning_names_each_job_without_a_checkpoint_since_its_start() -> None:
    night = make_night(budget={"total_usd": 2}, max=3)
    bare, saved, resumed = (night.submit(hours=9) for _ in range(3))
    night.step(10)
    epoch = {"epoch": 2, "checkpoint_step": 400}
    saved.job = saved.job.model_copy(update={**epoch, "checkpoint_epoch": 2})
    resumed.job = resumed.job.model_copy(update={**epoch, "checkpoint_epoch": 1})
    night.step(200)
    assert warnings(night) == [f"total_usd 2; {DRAIN}job-0 since 22:17 UTC, job-2 since 22:17 UTC"]
    assert bare.job.id == "job-0"


def test_a_warning_without_such_a_job_says_no_more_than_the_bound() -> None:
    night = make_night(budget={"total_usd": 1})
    training = night.submit(hours=9)
    night.step(5)
    training.job = training.job.model_copy(update={"epoch": 1, "checkpoint_step": 5, "checkpoint_epoch": 1})
    night.step(260)
    assert warnings(night) == ["total_usd 1"]


def test_many_jobs_are_counted_and_those_of_other_tenants_are_not_named() -> None:
    night = make_night(max=12)
    night.budget = Budget(total_usd=5)
    rival = spec(name="nights", min=1, queues=["other"])
    night.store.put_fleet(StoredFleet(tenant="rival", spec=rival, version=1, created_at=0, updated_at=night.now))
    for _ in range(12):
        night.submit(hours=9)
    night.step(150)
    (told,) = warnings(night)
    assert told.startswith(f"total_usd of the deployment 5; {DRAIN}job-0 since") and told.endswith(" and 4 more")
    assert told.count("since") == 8

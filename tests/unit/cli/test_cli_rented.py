"""Sentences about the fleets and rented machines of a job: `baton explain`, `show`, `watch`."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.fleets.fleet import FleetView
from baton.contract.fleets.job_machines import FAILED_WAITING_JOBS, JobMachines
from baton.contract.jobs.job import AttemptEnd, JobState
from gpu_client.cli.jobs.explain import Explanation, JobFacts, explain
from gpu_client.cli.jobs.rented import cost_usd, rent_lines, watch_text
from tests.unit.cli.cli_kit import ID, NOW, a_job, an_attempt
from tests.unit.cli.test_cli_fleet_view import SPEC, a_fleet, a_machine
from tests.unit.cli.test_cli_plan_view import a_plan, an_offer

TOKEN = "a1b2c3d4-nights-9f8e7d6c5b4a"
FAILED = f"The machine {TOKEN} of fleet nights is free, but failed the job, which avoids it"
MACHINE = "the machine a1b2c3d4-nights-9f8e7d6c5b4a of loopback (RTX 4090, 0.40 USD/h)"
DOCUMENT = "baton fleet show nights --document > nights.yaml"
POSITION = "The job has been claimable for 10 min, and no worker has claimed it. It is the first job of its queue."


def found(*fleets: FleetView, cannot: str = "", attempts: tuple[int, ...] = (), usd: float = 0.0) -> JobMachines:
    rented = [{"epoch": epoch, "machine": a_machine(), "held_s": 1800, "usd": 0.2} for epoch in attempts]
    served = [{"fleet": fleet, "cannot": cannot} for fleet in fleets]
    return JobMachines.model_validate({"fleets": served, "attempts": rented, "usd": usd, "at": NOW})


def told(machines: JobMachines, state: JobState = JobState.PENDING, **more: Any) -> Explanation:
    return explain(JobFacts(now=NOW, job=a_job(state, **more.pop("job", {})), machines=machines, **more))


@pytest.mark.parametrize(
    ("fleet", "sentence", "advice"),
    [
        (a_fleet(), "Fleet nights serves its queue; its controller looks for waiting jobs once a minute.", None),
        (a_fleet(a_machine("booting")), f"Fleet nights rents: {MACHINE} boots (2 min so far).", None),
        (
            a_fleet(a_machine("ready")),
            "The machine a1b2c3d4-nights-9f8e7d6c5b4a of fleet nights is ready and asks for jobs.",
            None,
        ),
        (
            a_fleet(a_machine(), a_machine("draining"), spec={**SPEC, "max": 2}),
            "Fleet nights has its maximum of 2 machines: 1 busy, 1 on the way out.",
            None,
        ),
        (
            a_fleet(stopped=True),
            "Fleet nights serves its queue and is stopped.",
            f"To let fleet nights rent again: {DOCUMENT}, then: baton fleet apply nights.yaml",
        ),
        (
            a_fleet(waits="total_usd has 0.02 USD left, boot and one hour of the cheapest offer need 0.42 USD"),
            "Fleet nights rents no machine: total_usd has 0.02 USD left, boot and one hour of the cheapest offer "
            "need 0.42 USD.",
            f"To raise the budget of fleet nights: {DOCUMENT}, change the file, then: baton fleet apply nights.yaml",
        ),
        (
            a_fleet(waits="no offer fits, the nearest: 0.6 USD/h exceeds max_usd_per_hour 0.5"),
            "Fleet nights rents no machine: no offer fits, the nearest: 0.6 USD/h exceeds max_usd_per_hour 0.5.",
            f"To see why each offer does not fit: {DOCUMENT}, then: baton fleet plan nights.yaml",
        ),
        (
            a_fleet(waits="3 machines in a row ended before they began a job, the last: lost; next try at 10:00 UTC"),
            "Fleet nights rents no machine: 3 machines in a row ended before they began a job, the last: lost; "
            "next try at 10:00 UTC.",
            "To see why its machines ended: baton fleet events nights",
        ),
        (
            a_fleet(waits="vast: no account is stored; run 'baton fleet login vast'"),
            "Fleet nights rents no machine: vast: no account is stored; run 'baton fleet login vast'.",
            "To let fleet nights rent at vast, an admin of the tenant default runs: baton fleet login vast",
        ),
    ],
)
def test_a_waiting_job_names_the_machine_that_comes_or_why_none_does(
    fleet: FleetView, sentence: str, advice: str | None
) -> None:
    explanation = told(found(fleet))
    assert explanation.answer == f"{POSITION} {sentence}"
    # No worker is to be started by hand where a fleet serves the queue.
    assert explanation.advice[:1] == ([] if advice is None else [advice])


@pytest.mark.parametrize(
    ("state", "reason", "most", "sentence"),
    [
        (
            *("ready", "", 1),
            f"{FAILED}; the fleet rents another machine, and gives this one back first, once no other job waits for "
            "it.",
        ),
        ("ready", "", 2, f"{FAILED}; the fleet rents another machine."),
        (
            *("terminating", FAILED_WAITING_JOBS, 1),
            f"Fleet nights gives the machine {TOKEN} back, because {FAILED_WAITING_JOBS}, and rents another one.",
        ),
    ],
)
def test_a_job_that_avoids_the_only_machine_says_that_another_one_comes(
    state: str, reason: str, most: int, sentence: str
) -> None:
    fleet = a_fleet(a_machine(state, reason=reason), spec={**SPEC, "max": most})
    failed = an_attempt(1, AttemptEnd.FAILED, machine_id=TOKEN, ended_at=NOW - 60)
    explanation = told(found(fleet), attempts=[failed], job={"epoch": 1})
    assert f" {sentence} The next attempt begins" in explanation.answer
    assert explanation.advice[0].startswith(f"These machines failed the job and cannot claim it yet: {TOKEN} (for ")


@pytest.mark.parametrize(
    ("waits", "providers"),
    [
        ("vast: provider_key_refused: GET /x was answered 401: Invalid user key", ["vast"]),
        ("vast: no offers: provider_key_refused: GET /x was answered 401; salad: sells nothing now", ["vast"]),
        ("salad: provider_permission_missing: 403 forbidden; vast: no account is stored; run it", ["salad", "vast"]),
        ("vast: provider_credit_exhausted: add credit at cloud.vast.ai/billing", []),
        ("vast: provider_unavailable: GET /x was answered 502; the next tick asks again", []),
    ],
)
def test_a_missing_or_revoked_account_has_the_login_as_advice(waits: str, providers: list[str]) -> None:
    fleet = a_fleet(waits=waits)
    logins = [f"an admin of the tenant default runs: baton fleet login {one}" for one in providers]
    assert [line.partition(", ")[2] for line in told(found(fleet)).advice] == logins


def test_a_fleet_that_cannot_run_the_job_says_what_is_missing() -> None:
    explanation = told(found(a_fleet(), cannot="needs 48 GiB VRAM, fleet nights guarantees 20"))
    assert "Fleet nights serves its queue and cannot run it: needs 48 GiB VRAM" in explanation.answer
    assert explanation.advice == [
        "To permit such machines, change the document of a fleet (the field in brackets): baton fleet apply FILE"
    ]


def test_the_fleet_of_a_job_has_its_own_remedies() -> None:
    stopped = told(found(a_fleet(stopped=True, job_id=ID)))
    assert stopped.advice == ["To let the job rent a machine again: baton stop ID, then baton retry ID"]
    spent = told(found(a_fleet(job_id=ID, waits="total_usd has 0.02 USD left, boot needs 0.42 USD")))
    assert spent.advice[0].startswith(f"To raise the budget of fleet nights: {DOCUMENT}, change the file")
    dear = told(
        found(a_fleet(job_id=ID, waits="no offer fits, the nearest: 0.2 USD/h: the budget of 0.05 USD (total_usd)"))
    )
    assert dear.advice == spent.advice, "the user set a budget and no price cap"


def test_a_job_that_no_fleet_serves_still_needs_a_worker() -> None:
    explanation = told(found(), job={"queue": "other"})
    assert explanation.answer.endswith("No fleet serves the queue 'other'.")
    worker, rent = explanation.advice
    assert "Start a worker" in worker and "'other' in the document of a fleet" in rent and "--rent --budget" in rent


def test_a_running_job_names_its_machine_and_its_cost() -> None:
    attempts = [an_attempt(1, AttemptEnd.INTERRUPTED), an_attempt(2)]
    machines = found(a_fleet(), attempts=(1, 2), usd=0.4)
    explanation = told(machines, JobState.RUNNING, attempts=attempts, job={"epoch": 2, "machine_id": "m-2"})
    assert explanation.answer.endswith(f"Fleet nights rents {MACHINE}; the job has cost 0.40 USD so far.")
    note = " (loopback RTX 4090, 0.40 USD/h, 0.20 USD), from the start: "
    assert [line.startswith(f"attempt {at} on m-{at}{note}") for at, line in enumerate(explanation.history, 1)] == [
        *(True, True)
    ]
    own = told(found(a_fleet(), attempts=(1,), usd=0.2), JobState.RUNNING, attempts=attempts, job={"epoch": 2})
    assert "USD" not in own.answer, "the second attempt runs on a machine that nobody rented"


def test_an_ended_job_says_what_it_cost() -> None:
    explanation = told(found(attempts=(1,), usd=0.2), JobState.COMPLETE, job={"completed_at": NOW, "epoch": 1})
    assert explanation.answer.endswith("On rented machines the job has cost 0.20 USD.")


def test_a_job_that_rents_for_itself_costs_all_that_its_fleet_spent() -> None:
    machines = found(a_fleet(job_id=ID, spent_usd=0.0833), attempts=(1,), usd=0.0167)
    ended = told(machines, JobState.COMPLETE, job={"completed_at": NOW, "epoch": 1})
    share = "boot and idle time included (0.0167 USD while it ran)."
    assert ended.answer.endswith(f"On rented machines the job has cost 0.0833 USD, {share}")
    running = told(machines, JobState.RUNNING, job={"epoch": 1}, attempts=[an_attempt(1)])
    assert running.answer.endswith(f"the job has cost 0.0833 USD so far, {share}")
    # A machine that ended before it began the job has cost money, too.
    assert "has cost 0.0833 USD" in told(found(a_fleet(job_id=ID, spent_usd=0.0833))).answer
    assert (cost_usd(machines), cost_usd(found(a_fleet(), usd=0.2))) == (0.0833, 0.2)
    # The stored spending of a fleet lags by up to five minutes, therefore the job's own time can cost more.
    assert cost_usd(found(a_fleet(job_id=ID, spent_usd=0.0167), attempts=(1,), usd=0.02)) == 0.02


def test_a_submitted_job_says_what_it_rents_or_why_nothing() -> None:
    rented, lost = rent_lines(a_plan(silent=[]), a_fleet(spec={**SPEC, "max": 1}))
    assert rented == "The job rents a machine of vast (RTX 4090, 0.20 USD/h); the budget pays for 100.0 h."
    assert lost.startswith("When the budget ends, the work since the last checkpoint is lost")
    silent = [{"provider": "vast", "reason": "no account is stored; run 'baton fleet login vast'"}]
    none = a_plan(start=0, why="no provider has an offer", offers=[], paid_hours=None, silent=silent)
    problem, account, _ = rent_lines(none, a_fleet())
    assert problem.startswith("No machine can be rented now: no provider has an offer. The job waits; its budget must")
    assert account == "vast: no account is stored; run 'baton fleet login vast'"
    # The controller was faster: the machine of the job is no offer any more.
    alive = none.model_copy(update={"alive": 1})
    taken, _, _ = rent_lines(alive, a_fleet(a_machine("booting")))
    assert taken == f"The job rents {MACHINE}; the budget pays for 50.0 h."
    both = list(rent_lines(alive, a_fleet(a_machine("booting"), a_machine("planned"))))
    assert [line.endswith("; the budget pays for 25.0 h.") for line in both[:2]] == [False, True]
    free, _, _ = rent_lines(alive, a_fleet(a_machine("booting", usd_per_hour=0)))
    assert free.endswith("(RTX 4090, 0.00 USD/h).")


def test_a_training_without_enough_offers_says_how_many_nodes_can_be_rented() -> None:
    waits = "1 of 4 nodes can be rented: only one offer fits"
    explanation = told(found(a_fleet(waits=waits)), job={"nodes": {"min": 4, "max": 8}})
    assert f"Fleet nights rents no machine: {waits}." in explanation.answer
    assert explanation.advice[0] == (
        f"To see why each offer does not fit: {DOCUMENT}, then: baton fleet plan nights.yaml"
    )


def test_a_training_says_which_slow_node_is_replaced_and_what_that_costs() -> None:
    why = "a slow node is replaced: its node trains 30% of the median, the change costs about 0.03 USD"
    machines = found(a_fleet(a_machine("draining", reason=why), job_id=ID, spent_usd=0.5), attempts=(1,), usd=0.4)
    explanation = told(machines, JobState.RUNNING, job={"epoch": 1, "nodes": {"min": 1, "max": 2}})
    assert f"{TOKEN} back: {why}. On rented machines the job has cost 0.50 USD so far" in explanation.answer


def test_a_submitted_elastic_job_says_how_many_machines_it_rents() -> None:
    fleet = a_fleet(spec={**SPEC, "max": 4})
    offers = [an_offer("a", taken=1), an_offer("b", taken=2, usd_per_hour=0.3)]
    rented, few, *_ = rent_lines(a_plan(start=3, why="only 3 offers fit", offers=offers, silent=[]), fleet)
    assert rented == (
        "The job rents 3 machines, the first one of vast (RTX 4090, 0.20 USD/h), for 0.80 USD/h together; "
        "the budget pays for 25.0 h."
    )
    assert few == "The job may have 4 machines; now only 3 offers fit."
    none, *_ = rent_lines(a_plan(start=0, why="1 of 4 nodes can be rented; only one offer fits", offers=[]), fleet)
    assert none.startswith("No machine can be rented now: 1 of 4 nodes can be rented; only one offer fits. The job")


@pytest.mark.parametrize(
    ("machines", "state", "text"),
    [
        (found(), JobState.PENDING, ""),
        (found(a_fleet()), JobState.PENDING, ""),
        (found(a_fleet(a_machine("booting"))), JobState.PENDING, f"{MACHINE} boots"),
        (found(a_fleet(waits="no offer is left")), JobState.PENDING, "fleet nights waits: no offer is left"),
        (found(a_fleet(stopped=True)), JobState.PENDING, "fleet nights is stopped"),
        (found(a_fleet(), cannot="needs 48 GiB VRAM"), JobState.PENDING, "needs 48 GiB VRAM"),
        (found(a_fleet(), attempts=(1,)), JobState.RUNNING, f"on {MACHINE}"),
        (found(a_fleet(), attempts=(1,)), JobState.COMPLETE, ""),
    ],
)
def test_watching_shows_the_machine(machines: JobMachines, state: JobState, text: str) -> None:
    assert watch_text(machines, state, 1) == text

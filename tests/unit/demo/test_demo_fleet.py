"""The demo of fleets: its documents, its offers, its timeline, its numbers, its claims and its chart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from PIL import Image

from baton.contract.fleets.fleet import FleetEventView, MachineView
from baton.contract.fleets.plan import OfferView
from baton.contract.jobs.job import JobState
from demo.failure import DemoError
from demo.fleet import figures, scenario
from demo.fleet.provider import Bill
from demo.fleet.results import DEFINITIONS, FleetResults, Leftovers, LostHost
from demo.fleet.timeline import (
    FleetHistory,
    JobMoment,
    Money,
    StateSpan,
    cut,
    describe,
    describe_job,
    moment_of,
)
from demo.fleet.watch import FleetWatch
from gpu_client.cli.fleet.document import read_fleet
from gpu_client.cli.jobs.submit import SubmitOptions, build_job, parse_job_file
from gpu_client.transport.api.client import BatonClient
from tests.kits.clock import Clock
from tests.unit.cli.cli_kit import a_job, an_attempt
from tests.unit.cli.test_cli_fleet_view import a_fleet

BEGAN = 1_790_000_000
FOLDER = Path(scenario.__file__).parent
UNANSWERED = [
    (1, "planned"), (1, "requested"), (1, "ambiguous"), (2, "failed"), (10, "terminating"), (12, "gone"),
]  # fmt: skip
FIRST = [
    (2, "planned"), (2, "requested"), (2, "booting"), (6, "registered"), (6, "ready"), (6, "busy"),
    (40, "lost"), (40, "terminating"), (43, "gone"),
]  # fmt: skip
SECOND = [
    (34, "planned"), (34, "requested"), (35, "booting"), (39, "registered"), (39, "ready"), (39, "busy"),
    (55, "ready"), (60, "terminating"), (63, "gone"),
]  # fmt: skip
REASONS = {"lost": "the process of the machine has ended", "terminating": "no job for idle_timeout_s"}


def at(minute: float) -> int:
    return BEGAN + int(60 * minute)


def events(machine: str, steps: Sequence[tuple[int, str]]) -> list[FleetEventView]:
    return [
        FleetEventView(
            at=at(minute), type=f"machine.{state}", machine=machine, reason=REASONS.get(state, ""), usd=minute / 100
        )
        for minute, state in steps
    ]


def moment(minute: float, state: JobState, epoch: int = 0, **steps: int) -> JobMoment:
    return JobMoment(at(minute), state, epoch, steps.get("resumed"), steps.get("saved"))


def history() -> FleetHistory:
    all_events = events("m0", UNANSWERED) + events("m1", FIRST) + events("m2", SECOND)
    both = sorted(all_events, key=lambda one: one.at)
    job = [
        moment(0, JobState.PENDING),
        moment(6, JobState.RUNNING, 1),
        moment(14, JobState.RUNNING, 1, saved=80),
        moment(20, JobState.RUNNING, 1, saved=160),
        moment(32, JobState.PENDING, saved=160),
        moment(39, JobState.RUNNING, 2, saved=160),
        moment(41, JobState.RUNNING, 2, saved=160, resumed=160),
        moment(55, JobState.COMPLETE, saved=320),
    ]
    money = [Money(at(minute), minute / 100, 0.4 if minute < 60 else 0.0) for minute in range(64)]
    return FleetHistory(BEGAN, both, money, job)


def machine(name: str, spent_usd: float, provider: str = "vast") -> MachineView:
    receipt = {"quoted_usd_per_hour": 0.4, "observed_usd": spent_usd, "charged_usd": spent_usd - 0.02}
    return MachineView.model_validate(
        {
            "id": name, "fleet": "demo", "state": "gone", "provider": provider, "usd_per_hour": 0.0, "since": at(60),
            "spent_usd": spent_usd, "reason": "no job for idle_timeout_s", "receipt": receipt,
        }
    )  # fmt: skip


def offer(provider: str, ref: str, usd_per_hour: float, total: float, rejected: str = "") -> OfferView:
    parts = {"machine": total, "traffic": 0, "boot": 0, "lost": 0, "hours": 1}
    return OfferView.model_validate(
        {
            "provider": provider, "ref": ref, "usd_per_hour": usd_per_hour, "rejected": rejected,
            "expected": {"total": total, **parts},
        }
    )  # fmt: skip


OFFERS = [
    offer("vast", "101", 0.40, 0.47), offer("salad", "rtx", 0.40, 0.61), offer("loopback", "cheap-1", 0.25, 1.2),
    offer("loopback", "dear-1", 0.9, 0.9, "exceeds the cap"),
]  # fmt: skip


def results() -> FleetResults:
    bills = [
        Bill("m0", "vast host 101", True, 0.01), Bill("m1", "vast host 102", True, 0.25),
        Bill("m2", "salad node", True, 0.17),
    ]  # fmt: skip
    return FleetResults(
        offers=OFFERS,
        history=history(),
        budget_usd=2,
        spent_usd=0.47,
        machines=[machine("m0", 0.02), machine("m1", 0.26), machine("m2", 0.19, "salad")],
        attempts=[an_attempt(1, machine_id="m1"), an_attempt(2, machine_id="m2", resumed_step=160)],
        idle_timeout_s=300,
        lost=LostHost("m1", at(25), 215, 160, 4),
        left=Leftovers(0, 0, bills, bills),
    )


def failure(measured: FleetResults) -> str:
    return next((claim.failure for claim in measured.claims() if claim.failure), "")


def test_the_documents_of_the_demo_are_sound() -> None:
    assert read_fleet(FOLDER / "fleet.yaml").name == scenario.FLEET
    job = build_job(parse_job_file((FOLDER / "job.yaml").read_text(), "job.yaml"), SubmitOptions())
    assert job.parameters["steps"] == scenario.STEPS
    first, before_kill = job.parameters["checkpoint_every"], scenario.KILL_AT % job.parameters["checkpoint_every"]
    assert first < scenario.KILL_AT < scenario.STEPS - first and before_kill > 10, "some steps are repeated"


def test_events_that_enter_no_state_are_told_and_not_drawn() -> None:
    known = history()
    before = known.machine_spans("m1"), known.states("m1")
    reason = "vast charges 0.2 USD"
    known.events += [
        FleetEventView(at=at(12), type="machine.overdue", machine="m1", reason=reason),
        FleetEventView(at=at(60), type="charge.differs", machine="m1", reason=reason),
    ]
    assert (known.machine_spans("m1"), known.states("m1")) == before
    assert [describe(one, "machine 1") for one in known.events[-2:]] == [
        f"machine 1 takes long: {reason}",
        f"machine 1: {reason}",
    ]


def test_events_are_told_in_sentences() -> None:
    told = {one.type: describe(one, "machine 1") for one in events("m0", UNANSWERED) + events("m1", FIRST)}
    assert told["machine.ambiguous"].startswith("the answer is lost; machine 1 may exist")
    assert "the process of the machine has ended, and its worker was silent for 15 min" in told["machine.lost"]
    assert told["machine.failed"].startswith("two complete lists lack machine 1")
    assert told["machine.gone"].endswith("it is gone, and has cost 0.43 USD")
    other = FleetEventView(at=at(1), type="budget.warning", reason="total_usd 2", usd=1.6)
    assert describe(other, "the fleet") == "the fleet: budget.warning total_usd 2"


def test_changes_of_the_job_are_told_once() -> None:
    whole = history().job
    told = [
        sentence
        for before, now in zip([None, *whole], whole, strict=False)
        for sentence in describe_job(before, now, {1: "machine 1", 2: "machine 2"})
    ]
    assert told == [
        "the job waits for a machine",
        "the checkpoint of step 80 is committed",
        "the checkpoint of step 160 is committed",
        "the job's lease has run out; the job waits for another machine",
        "the job continues on machine 2 from the checkpoint of step 160",
        "the checkpoint of step 320 is committed",
        "the job is complete",
    ]


def test_a_moment_names_the_attempt_that_holds_the_job() -> None:
    attempts = [an_attempt(1), an_attempt(2, resumed_step=160)]
    running = moment_of(at(1), a_job(JobState.RUNNING, checkpoint_step=240), attempts)
    assert running == moment(1, JobState.RUNNING, 2, resumed=160, saved=240)
    assert moment_of(at(1), a_job(JobState.PENDING), attempts[:1]) == moment(1, JobState.PENDING)


def test_the_spans_of_the_chart() -> None:
    whole = history()
    first = whole.machine_spans("m1")
    assert [(one.state, (one.end - one.begin) // 60) for one in first] == [
        ("booting", 4), ("busy", 34), ("terminating", 3),
    ]  # fmt: skip
    assert [one.state for one in whole.machine_spans("m0")] == ["ambiguous", "terminating"]
    assert [(one.state, one.begin, one.end) for one in whole.attempt_spans()] == [
        ("attempt 1", at(6), at(32)), ("attempt 2", at(39), at(55)),
    ]  # fmt: skip
    assert cut(first, at(25), "busy", "silent")[1:3] == [
        StateSpan("busy", at(6), at(25)), StateSpan("silent", at(25), at(40)),
    ]  # fmt: skip
    assert whole.checkpoints() == [(at(14), 80), (at(20), 160), (at(55), 320)]


class Api:
    """Answers with one status of the job after the other; the last one stays."""

    def __init__(self, *jobs: JobState) -> None:
        self.jobs = list(jobs)
        self.asked = 0

    def fleet(self, name: str) -> object:
        self.asked += 1
        bound = {"name": "total_usd", "cap_usd": 2, "spent_usd": self.asked / 100, "reserved_usd": 0.4}
        return a_fleet(at=at(self.asked), bounds=[bound], waits="no offer is left")

    def get_job(self, job_id: str) -> object:
        state = self.jobs.pop(0) if len(self.jobs) > 1 else self.jobs[0]
        return a_job(state, failed_at=at(9) if state is JobState.FAILED else None)

    def attempts(self, job_id: str) -> object:
        return SimpleNamespace(attempts=[an_attempt(1, machine_id="m1")])

    def fleet_events(self, name: str, *, limit: int) -> list[FleetEventView]:
        return events("m1", FIRST)[: 2 * self.asked][::-1]


def watch(api: Api, told: list[tuple[int, str]], seen: FleetHistory) -> FleetWatch:
    time = Clock(0.0)

    def tell(moment_s: int, sentence: str) -> None:
        told.append(((moment_s - BEGAN) // 60, sentence))

    return FleetWatch(cast(BatonClient, api), "demo", "job", seen, tell, clock=time, sleep=time.sleep)


def test_watching_tells_every_event_once_and_collects_the_money() -> None:
    told: list[tuple[int, str]] = []
    seen = FleetHistory(BEGAN)
    api = Api(JobState.PENDING, JobState.RUNNING, JobState.COMPLETE)
    watch(api, told, seen).until(lambda now: now.job.state.terminal, "the end", 10.0)
    assert [minute for minute, _ in told] == [2, 2, 1, 2, 6, 6, 6, 3]
    assert len(seen.events) == 6
    assert seen.money == [Money(at(n), n / 100, 0.4) for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (JobState.PENDING, "the end took more than 5 s; the fleet waits: no offer is left"),
        (JobState.FAILED, "the job has failed, before the end: no reason given"),
    ],
)
def test_watching_ends_at_its_deadline_and_with_a_failed_job(state: JobState, message: str) -> None:
    with pytest.raises(DemoError, match=message):
        watch(Api(state), [], FleetHistory(BEGAN)).until(lambda _: False, "the end", 5.0)


def test_the_numbers() -> None:
    summary = results().as_dict()
    assert (summary["steps_repeated"], summary["resumed_from_step"]) == (55, 160)
    assert (summary["spent_usd"], summary["charged_usd"], summary["most_committed_usd"]) == (0.47, 0.43, 0.99)
    assert summary["killed_at_minutes"] == 25
    assert summary["events"][0] == {
        "type": "machine.planned", "machine": "m0", "reason": "", "usd": 0.01, "minutes": 1.0,
    }  # fmt: skip
    assert json.loads(json.dumps(summary)) == summary
    assert DEFINITIONS.keys() - summary.keys() == {"minutes"}


def test_the_claims_carry_the_numbers() -> None:
    words = " ".join(claim.sentence for claim in results().claims())
    for fact in (
        "asked vast first, for 0.40 USD an hour, although loopback sells cheap-1 for 0.25", "0.47 USD, not 1.20",
        "when machine 1 appeared after all, the fleet gave it back. It has cost 0.02 USD",
        "The host of machine 2 vanished at step 215: SIGKILL to all 4 processes",
        "Machine 3, of salad, continued from the checkpoint of step 160; 55 steps", "0.47 of 2.00 USD",
        "meters say 0.43 USD",
        "After 5 min without a job",
    ):  # fmt: skip
        assert fact in words


ALIVE = [Bill("m1", "vast host 102", True, 0.26), Bill("m2", "salad node", False, 0.17)]
LATER = [ALIVE[0], replace(ALIVE[1], charged_usd=0.57)]


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, ""),
        ({"spent_usd": 0.5}, "the receipts sum up to 0.4700 USD, the fleet says 0.5000"),
        ({"budget_usd": 0.9}, "0.99 USD were spent and reserved, the budget is 0.90"),
        ({"attempts": [an_attempt(1)]}, "the job had 1 attempts, and 2 machines held it"),
        (
            {"machines": [machine("m0", 0.02), machine("m1", 0.26), machine("m2", 0.19)]},
            "the job continued at vast, where it began",
        ),
        ({"lost": LostHost("m1", at(25), 215, 200, 4)}, "the job continued from step 160, not from 200"),
        (
            {"machines": [machine("m0", 0.02), machine("m1", 0.45).model_copy(update={"reason": "x"})]},
            "machine 2 was given back: x",
        ),
        ({"left": Leftovers(0, 2, [], [])}, "2 processes of machines still run"),
        ({"left": Leftovers(1, 0, ALIVE, LATER)}, f"machines are left at the providers: 1 exist, bills {ALIVE}"),
        ({"left": Leftovers(0, 0, ALIVE[:1], LATER[1:])}, "the meter of a provider still runs"),
    ],
)
def test_what_does_not_hold_is_a_failure(changed: dict[str, Any], wrong: str) -> None:
    failures = [claim.failure for claim in replace(results(), **changed).claims()]
    assert wrong in failures if wrong else not any(failures)


def test_a_machine_that_boots_too_slowly_on_a_loaded_computer_is_no_failure() -> None:
    whole = results()
    slow = events("slow", [(2, "planned"), (2, "requested"), (3, "booting"), (18, "terminating"), (20, "gone")])
    machines = [whole.machines[0], machine("slow", 0.1), *whole.machines[1:]]
    bill = Bill("slow", "vast host 103", True, 0.05)
    left = Leftovers(0, 0, [*whole.left.bills, bill], [*whole.left.bills, bill])
    told = replace(whole.history, events=[*whole.history.events, *slow])
    assert failure(replace(whole, history=told, machines=machines, left=left, spent_usd=0.57)) == ""


def test_another_offer_and_a_second_create_are_failures() -> None:
    whole = results()
    assert failure(replace(whole, offers=OFFERS[1:])) == "the fleet asked vast first, not salad"
    assert failure(replace(whole, offers=OFFERS[::-1])) == (
        "the plan begins with dear-1, which has not the lowest expected total"
    )
    more = [*whole.left.bills, Bill("m3", "salad node", True, 0.0)]
    assert failure(replace(whole, left=Leftovers(0, 0, more, more))) == (
        "the providers made 4 machines, the fleet knows 3"
    )
    answered = replace(whole.history, events=[one for one in whole.history.events if one.type != "machine.ambiguous"])
    assert failure(replace(whole, history=answered)).startswith("the machine without an answer went through planned,")


def test_the_chart_shows_machines_and_money(tmp_path: Path) -> None:
    figure = figures.draw(results())["fleet.png"]
    lanes, money = figure.axes
    assert [text.get_text().splitlines()[0] for text in lanes.get_yticklabels()] == [
        "job", "machine 1", "machine 2", "machine 3",
    ]  # fmt: skip
    # The last list of Salad names no price of a machine that has stopped; the receipt keeps the quoted one.
    assert {text.get_text().rpartition(", ")[2] for text in lanes.get_yticklabels()[1:]} == {"0.40 USD/h"}
    budget = [line for line in money.lines if list(line.get_ydata()) == [2, 2]]  # type: ignore[arg-type]
    assert len(budget) == 1
    figure.savefig(tmp_path / "fleet.png")
    with Image.open(tmp_path / "fleet.png") as image:
        assert image.size == (1760, 1376)

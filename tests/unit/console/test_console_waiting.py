"""The page of a waiting job and `baton explain` give the same causes from the same answers of the API."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.contract.fleets.fleet import FleetView
from baton.contract.fleets.job_machines import FAILED_WAITING_JOBS, JobMachines
from baton.contract.jobs.history import AttemptView
from baton.contract.jobs.job import AttemptEnd, JobView
from cdk import NODE
from gpu_client.cli.jobs.explain import JobFacts, explain
from tests.unit.cli.cli_kit import NOW, a_job, an_attempt
from tests.unit.cli.test_cli_fleet_view import SPEC, a_fleet, a_machine

WAITING = Path(__file__).parents[3] / "console" / "src" / "jobs" / "waiting.js"
JOB = a_job(epoch=1)
TOKEN = a_machine().id
BY = an_attempt(1, AttemptEnd.FAILED, machine_id=TOKEN)


def another(number: int, **more: Any) -> JobView:
    return a_job(**{"id": f"{number:08d}-0000-4000-8000-000000000000", "epoch": 1, **more})


def served(*fleets: FleetView, cannot: str = "", attempts: Sequence[AttemptView] = ()) -> JobFacts:
    found = {"fleets": [{"fleet": one, "cannot": cannot} for one in fleets], "attempts": [], "usd": 0, "at": NOW}
    machines = JobMachines.model_validate(found)
    return JobFacts(now=NOW, job=JOB, pending=[JOB], attempts=attempts, machines=machines)


def queued(pending: Sequence[JobView] = (), running: Sequence[JobView] = ()) -> JobFacts:
    machines = JobMachines(fleets=[], attempts=[], usd=0, at=NOW)
    return JobFacts(now=NOW, job=JOB, pending=[JOB, *pending], running=running, machines=machines)


BEHIND = [another(1, priority=49), another(2, created_at=NOW), another(3, epoch=0, priority=99)]
LATER = another(4, priority=99, not_before=NOW + 60)
AHEAD = [another(5, priority=51), another(6, created_at=NOW - 601), another(7), another(8, not_before=NOW)]
CAUSES: list[tuple[JobFacts, str]] = [
    (queued(), "No job of the queue 'default' runs now. Start a worker."),
    (queued([*BEHIND, LATER]), "It is the first job of its queue."),
    (queued([*BEHIND, LATER, *AHEAD]), "4 jobs of its queue precede it."),
    (queued(AHEAD[:1], [another(9)]), "1 job of its queue precedes it."),
    (queued(running=[another(9)]), "busy or unsuitable: 1 job of the queue 'default' runs now."),
    (queued(running=[another(9), another(10)]), "2 jobs of the queue 'default' run now."),
    (queued(), "No fleet serves the queue 'default'."),
    (served(a_fleet(), cannot="needs 48 GiB VRAM, fleet nights guarantees 20"), "cannot run it: needs 48 GiB VRAM"),
    (served(a_fleet(a_machine("ready"), stopped=True)), "is stopped."),
    (served(a_fleet(a_machine("ready"))), "of fleet nights is ready and asks for jobs."),
    *(
        (served(a_fleet(a_machine(), a_machine(state, since=NOW - 45))), f"{words} (45 s so far).")
        for state, words in (
            ("planned", "is about to be rented"),
            ("requested", "is requested"),
            ("ambiguous", "may exist, because the provider's answer was lost"),
            ("booting", "boots"),
            ("registered", "is checked"),
        )
    ),
    (served(a_fleet(a_machine("ready")), attempts=[BY]), "failed the job, which avoids it; the fleet rents another"),
    (served(a_fleet(a_machine("ready"), spec={**SPEC, "max": 1}), attempts=[BY]), "gives this one back first"),
    (served(a_fleet(a_machine(), waits="no offer fits")), "Fleet nights rents no machine: no offer fits."),
    (
        served(a_fleet(a_machine("terminating", reason=FAILED_WAITING_JOBS))),
        f"gives the machine {TOKEN} back, because {FAILED_WAITING_JOBS}, and rents another one.",
    ),
    (served(a_fleet(a_machine(), a_machine("draining"), spec={**SPEC, "max": 2})), "1 busy, 1 on the way out."),
    (served(a_fleet(a_machine(), spec={**SPEC, "max": 1})), "has its maximum of 1 machine: 1 busy."),
    (served(a_fleet(), a_fleet(spec={**SPEC, "name": "days"})), "Fleet days serves its queue; its controller looks"),
]


def answers_of(facts: JobFacts) -> dict[str, Any]:
    """Return the answers of the API from which `facts` were read."""
    lists = {
        name: {"jobs": [one.model_dump(mode="json") for one in jobs], "next_cursor": None}
        for name, jobs in (("pending", facts.pending), ("running", facts.running))
    }
    machines = facts.machines and facts.machines.model_dump(mode="json")
    return {
        "job": facts.job.model_dump(mode="json"),
        "attempts": [one.model_dump(mode="json") for one in facts.attempts],
        "found": {**lists, "machines": machines},
    }


def said(cases: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the page's sentences for each case, from one process."""
    call = f"({{ job, attempts, found }}) => waitingFor(job, {NOW}, attempts, found, {NOW}).map((one) => one.join(''))"
    program = (
        f"import {{ waitingFor }} from {json.dumps(WAITING.as_uri())};"
        f"console.log(JSON.stringify(JSON.parse(process.argv[1]).map({call})))"
    )
    command = [str(NODE), "--input-type=module", "-e", program, json.dumps(list(cases))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    sentences: list[list[str]] = json.loads(done.stdout)
    return sentences


@pytest.fixture(scope="module")
def pages() -> list[list[str]]:
    return said([answers_of(facts) for facts, _ in CAUSES])


@pytest.mark.parametrize("index", range(len(CAUSES)), ids=[cause[:50] for _, cause in CAUSES])
def test_the_page_and_the_command_give_the_same_causes(pages: list[list[str]], index: int) -> None:
    facts, cause = CAUSES[index]
    explanation = explain(facts)
    # The page writes `$0.40` for `0.40 USD`, and starts no worker by a command.
    command = re.sub(r"([\d.]+) USD/h", r"$\1/h", " ".join([explanation.answer, *explanation.advice]))
    command = command.replace("Start a worker: ", "Start a worker. ")
    page = pages[index]
    assert cause in " ".join(page)
    assert [sentence for sentence in page if sentence not in command] == []
    assert len(page) == (3 if facts.machines and not facts.machines.fleets else 1 + len(facts.machines.fleets))


def test_a_page_of_a_longer_list_proves_no_absence() -> None:
    cases = [answers_of(queued(AHEAD[:1], [another(9)])), answers_of(queued())]
    for case in cases:
        for name in ("pending", "running"):
            case["found"][name]["next_cursor"] = "more"
    assert said(cases) == [
        [
            "At least 1 job of its queue precedes it.",
            "No fleet serves the queue 'default'.",
            "All workers are busy or unsuitable: at least 1 job of the queue 'default' runs now.",
        ],
        ["No fleet serves the queue 'default'."],
    ]


def test_an_answer_that_is_not_there_yet_is_left_out() -> None:
    case = answers_of(queued())
    found = case["found"]
    without = [{**case, "found": {"pending": found["pending"]}}, {**case, "found": {}}]
    assert said(without) == [["It is the first job of its queue."], []]

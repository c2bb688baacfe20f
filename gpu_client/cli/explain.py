"""`baton explain`: why is it not running, why did it move?"""

from __future__ import annotations

import typer
from gpu_client.cli.explaining import Explanation, Facts, explain
from gpu_client.cli.output import Screen
from gpu_client.cli.session import AsJson, JobIdArgument, find_job, session_of

from baton.contract.history import EventView
from baton.contract.jobs import JobState, JobView
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient

_TO_DO = "What to do"
_MAX_PAGES = 10
"""Ten thousand jobs in one state are enough to tell that a queue is long, and as many events of one job."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain")(explain_job)


def explain_job(context: typer.Context, job_id: JobIdArgument, as_json: AsJson = False) -> None:
    """Say in plain words why a job is where it is, and why it moved."""
    session = session_of(context)
    with session.client() as client:
        facts = gather(client, find_job(client, job_id))
    explanation = explain(facts)
    if as_json:
        session.screen.json({"id": facts.job.id, "state": facts.job.state.value, **explanation.as_data()})
    else:
        _show(session.screen, facts.job, explanation)


def gather(client: BatonClient, job: JobView) -> Facts:
    """Everything that the explanation needs, and for a job that does not wait nothing about others."""
    waits = job.state is JobState.PENDING
    return Facts(
        now=client.health().server_time,
        job=job,
        attempts=[one for page in pages(lambda c: client.attempts(job.id, cursor=c)) for one in page.attempts],
        events=_events(client, job) if job.epoch else (),
        pending=_of_queue(client, job.queue, JobState.PENDING) if waits else (),
        running=_of_queue(client, job.queue, JobState.RUNNING) if waits else (),
    )


def _events(client: BatonClient, job: JobView) -> list[EventView]:
    found: list[EventView] = []
    listed = pages(lambda cursor: client.events(job.id, limit=1000, cursor=cursor))
    for _, page in zip(range(_MAX_PAGES), listed, strict=False):
        found += page.events
    return found


def _of_queue(client: BatonClient, queue: str, state: JobState) -> list[JobView]:
    found: list[JobView] = []
    listed = pages(lambda cursor: client.jobs(status=state, queue=queue, limit=1000, cursor=cursor))
    for _, page in zip(range(_MAX_PAGES), listed, strict=False):
        found += page.jobs
    return found


def _show(screen: Screen, job: JobView, explanation: Explanation) -> None:
    screen.line(f"{job.name or job.recipe or 'job'} {job.id}")
    screen.paragraph(explanation.answer)
    for title, lines in (
        ("What presets tell", explanation.alerts),
        ("What happened", explanation.history),
        ("Used of its policy", explanation.budgets),
        (_TO_DO, explanation.advice),
    ):
        if lines:
            screen.line("")
            screen.line(f"{title}:")
            screen.items(line.replace(" ID", " " + job.id[:8]) if title == _TO_DO else line for line in lines)

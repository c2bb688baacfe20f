"""`baton report`: one page about a job's training, to look at and to keep."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from gpu_client.cli.formats import count, finite, size
from gpu_client.cli.metric_history import history_of
from gpu_client.cli.report_page import Material, page_of
from gpu_client.cli.session import SHOWN_ID_CHARACTERS, AsJson, JobIdArgument, find_job, session_of

from gpu_client.transport.api.calls import pages
from gpu_client.transport.net.files import write_whole


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(
    context: typer.Context,
    job_id: JobIdArgument,
    *,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Default: report-ID.html. One that is there is replaced.")
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Of one machine; default: the profile's. Shows the cost.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page about a job: its curves, and on them what happened.

    Attempts, checkpoints and what rules did. One HTML file that needs nothing else, also of a job that still runs.
    """
    session = session_of(context)
    price = finite(price_per_hour, "--price-per-hour")
    if price is None:
        price = session.profile().price_per_hour
    with session.client() as client:
        job = find_job(client, job_id)
        listed = pages(lambda cursor: client.attempts(job.id, limit=1000, cursor=cursor))
        attempts = [attempt for page in listed for attempt in page.attempts]
        happened = pages(lambda cursor: client.events(job.id, limit=1000, cursor=cursor))
        events = [event for page in happened for event in page.events]
        history = history_of(client, job.id, attempts)
    page = page_of(Material(job, attempts, events, history, price, int(time.time()))).encode()
    file = output or Path(f"report-{job.id[:SHOWN_ID_CHARACTERS]}.html")
    write_whole(file, page)
    points = len(history.kept) + len(history.void)
    if as_json:
        session.screen.json({"file": str(file), "size_bytes": len(page), "points": points})
    else:
        session.screen.line(f"{file}: {count(points, 'point')}, {size(len(page))}")

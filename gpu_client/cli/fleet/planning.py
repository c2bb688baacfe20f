"""Commands `baton fleet plan` and `baton offers`: see prices, reasons and a forecast before anything is rented."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from baton.contract.fleets.plan import OffersRequest, PlanRequest
from baton.contract.jobs.job import JobSubmit
from gpu_client.cli.core.documents import read_text
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.session import AsJson, session_of
from gpu_client.cli.fleet.document import read_fleet
from gpu_client.cli.fleet.plan_view import offers_page, plan_page
from gpu_client.cli.jobs.submit import MAX_FILE_BYTES, SubmitOptions, build_job, parse_job_file
from gpu_client.transport.api.client import BatonClient

GB = 1_000_000_000
MAX_INPUT_PAGES = 100
"""Pages of stored objects that are summed up for a job's inputs; more would take minutes."""

HoursOption = Annotated[
    float | None,
    typer.Option("--hours", min=0.01, max=8760, help="Hours of a job from its first step. Default: from history."),
]


def register(app: typer.Typer, fleet: typer.Typer) -> None:
    """Add the commands."""
    fleet.command("plan")(plan)
    app.command("offers")(offers)


def plan(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Fleet document, YAML.", show_default=False)],
    job: Annotated[
        Path | None, typer.Option(metavar="JOBFILE", help="Job file of a job that is not submitted yet.")
    ] = None,
    hours: HoursOption = None,
    as_json: AsJson = False,
) -> None:
    """Show what a fleet would rent now, why not more, the cost and the finish. Stores nothing, rents nothing."""
    session = session_of(context)
    spec = read_fleet(file)
    planned = None
    if job is not None:
        planned = build_job(parse_job_file(read_text(job, "a job file", MAX_FILE_BYTES), str(job)), SubmitOptions())
    with session.client() as client:
        input_gb = 0.0 if planned is None else _measure_inputs(client, planned)
        found = client.plan_fleet(PlanRequest(fleet=spec, job=planned, hours=hours, input_gb=input_gb))
    if as_json:
        session.output.json(found)
    else:
        session.output.print(plan_page(spec, found))


def offers(
    context: typer.Context,
    *,
    providers: Annotated[
        list[str] | None, typer.Option("--provider", help="Provider; repeatable. Default: all.")
    ] = None,
    gpus: Annotated[list[str] | None, typer.Option("--gpu", help="GPU model, as RTX 4090; repeatable.")] = None,
    min_vram_gib: Annotated[float, typer.Option("--min-vram", help="Least memory of one GPU in GiB.")] = 0,
    disk_gib: Annotated[float, typer.Option("--disk", help="Disk in GiB.")] = 40,
    regions: Annotated[
        list[str] | None, typer.Option("--region", help="Country (two letters) or region; repeatable.")
    ] = None,
    market: Annotated[str, typer.Option(help="spot, on-demand or either.")] = "either",
    max_usd_per_hour: Annotated[
        float | None, typer.Option("--max-usd-per-hour", help="Price cap in USD an hour.")
    ] = None,
    hours: Annotated[float, typer.Option("--hours", help="Hours of work for the expected total.")] = 1,
    nodes: Annotated[
        int | None, typer.Option("--nodes", help="Nodes of an elastic job, whose cost is summed up.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Number of offers to list, at most 200.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List the providers' offers of the moment by expected total."""
    session = session_of(context)
    wanted: dict[str, Any] = {
        "providers": providers or [],
        "gpu_models": gpus or [],
        "min_vram_gib": min_vram_gib,
        "disk_gib": disk_gib,
        "regions": regions or [],
        "market": market,
        "hours": hours,
        "limit": limit,
        "nodes": nodes,
    }
    if max_usd_per_hour is not None:
        wanted["max_usd_per_hour"] = max_usd_per_hour
    try:
        request = OffersRequest.model_validate(wanted)
    except ValidationError as error:
        raise CliError(
            "invalid options", problems=[_describe(one["loc"], one["msg"]) for one in error.errors()]
        ) from error
    with session.client() as client:
        found = client.offers(request)
    if as_json:
        session.output.json(found)
    else:
        session.output.print(offers_page(found, nodes))


_OPTIONS = {
    "providers": "--provider",
    "gpu_models": "--gpu",
    "min_vram_gib": "--min-vram",
    "disk_gib": "--disk",
    "regions": "--region",
    "max_usd_per_hour": "--max-usd-per-hour",
}


def _describe(loc: tuple[int | str, ...], message: str) -> str:
    return f"{_OPTIONS.get(str(loc[0]), f'--{loc[0]}')}: {message[0].lower()}{message[1:]}"


def _measure_inputs(client: BatonClient, job: JobSubmit) -> float:
    """Return the size in GB of the stored objects that a job reads."""
    size_bytes, pages = 0, 0
    for prefix in {ref.prefix for ref in job.inputs}:
        cursor: str | None = None
        while pages < MAX_INPUT_PAGES:
            page = client.list_objects(prefix=prefix, cursor=cursor)
            size_bytes += sum(one.size_bytes for one in page.objects)
            cursor, pages = page.next_cursor, pages + 1
            if cursor is None:
                break
    return size_bytes / GB

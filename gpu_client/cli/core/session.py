"""Provide the session of a command (profile, client, output, clock), and resolve abbreviated ids."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, TypeVar

import typer

from baton.contract.admin.keys import KeyView
from baton.contract.admin.webhooks import WebhookView
from baton.contract.base import JOB_ID_PATTERN
from baton.contract.elastic.nodes import MAX_NODES
from baton.contract.jobs.history import AttemptView
from baton.contract.jobs.job import JobView
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import require_finite
from gpu_client.cli.core.output import CommandOutput
from gpu_client.cli.core.profiles import ConnectionProfile, choose_profile
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import Unreachable
from gpu_client.transport.retry import RetryPolicy
from gpu_client.transport.transfer.manager import Transfer

V = TypeVar("V", KeyView, WebhookView)

RETRY_POLICY = RetryPolicy(max_tries=5, budget_s=20.0, first_delay_s=0.3, max_delay_s=4.0)
"""Policy of retries within seconds, because a user waits for the command."""

MIN_ID_CHARACTERS = 4
SHOWN_ID_CHARACTERS = 8
"""Length of the ids that `baton jobs` prints; unique among thousands of jobs."""
_SEARCH_PAGE_SIZES = (100, 1000, 1000, 1000, 1000)
"""Sizes of the searched pages, newest jobs first; most searches end on the first page."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
NodeOption = Annotated[
    int | None,
    typer.Option("--node", metavar="N", min=0, max=MAX_NODES - 1, help="Only this node of an elastic job."),
]
PricePerHour = Annotated[
    float | None,
    typer.Option(min=0, help="Price of one machine per hour; adds costs to the output. Default: the profile's price."),
]
JobIdArgument = Annotated[str, typer.Argument(metavar="ID", help="Job id or unique prefix.", show_default=False)]


@dataclass
class CliSession:
    """Session of one command. Tests replace `sleep` and `clock` (seconds since 1970, used for ages only)."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    profile_name: str | None = None
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    cancel: threading.Event = field(default_factory=threading.Event)
    """Event that Ctrl-C sets to cancel transfers in other threads."""

    @cached_property
    def output(self) -> CommandOutput:
        """Return the output streams of this run."""
        return CommandOutput()

    def profile(self) -> ConnectionProfile:
        """Return the selected profile. Raises CliError."""
        return choose_profile(self.environ, self.profile_name)

    def price_per_hour(self, option: float | None) -> float | None:
        """Return the option `--price-per-hour`, else the profile's price. Raises CliError."""
        price = require_finite(option, "--price-per-hour")
        return self.profile().price_per_hour if price is None else price

    @contextmanager
    def client(self) -> Iterator[BatonClient]:
        """Yield a client for the selected profile."""
        with connect(self.profile()) as client:
            yield client


def session_of(context: typer.Context) -> CliSession:
    """Return the session that `main` created."""
    found = context.find_object(CliSession)
    assert found is not None
    return found


def connect(profile: ConnectionProfile, *, transfer: Transfer | None = None) -> BatonClient:
    """Create a client for a profile. Raises CliError for a malformed address or key."""
    try:
        return BatonClient(profile.url, profile.api_key, policy=RETRY_POLICY, transfer=transfer)
    except ValueError as error:
        raise CliError(str(error), "See: baton login --help") from error


def list_attempts(client: BatonClient, job_id: str) -> list[AttemptView]:
    """Return all attempts of a job, oldest first."""
    listed = pages(lambda cursor: client.attempts(job_id, limit=1000, cursor=cursor))
    found = [attempt for page in listed for attempt in page.attempts]
    # The attempts of an elastic job come seat by seat.
    return sorted(found, key=lambda one: one.started_at) if any(one.seat is not None for one in found) else found


def find_job(client: BatonClient, text: str) -> JobView:
    """Return the job with an id or unique prefix. Raises CliError."""
    return client.get_job(resolve_job_id(client, text))


def find_by_id(kind: str, known: Sequence[V], given: str) -> V:
    """Return the key or webhook in `known` with an id or unique prefix. Raises CliError."""
    found = [one for one in known if one.id == given]
    if not found and len(given) >= MIN_ID_CHARACTERS:
        found = [one for one in known if one.id.startswith(given)]
    if len(found) != 1:
        problem = f"no {kind} has" if not found else f"{len(found)} {kind}s have"
        raise CliError(f"{problem} the id {given[:40]!r}", f"See: baton {kind}s list")
    return found[0]


@contextmanager
def guard_creation(kind: str, remedy: str) -> Iterator[None]:
    """Add to a connection error that the key or webhook may exist, because a create call is not retried."""
    try:
        yield
    except Unreachable as error:
        raise Unreachable(f"{error}. The {kind} may have been created: see baton {kind}s list, and {remedy}") from error


def resolve_job_id(client: BatonClient, text: str) -> str:
    """Return the full job id for an id or prefix. Raises CliError if none or several of the newest jobs match.

    A prefix of SHOWN_ID_CHARACTERS ends the search at the first page with a match.
    """
    given = text.strip().lower()
    if re.fullmatch(JOB_ID_PATTERN, given):
        return given
    if not re.fullmatch(r"[0-9a-f][0-9a-f-]{0,35}", given):
        raise CliError(f"{text[:80]!r} is not a job id", "See: baton jobs")
    if len(given) < MIN_ID_CHARACTERS:
        raise CliError(f"{given!r} is too short for a job id", f"Give at least {MIN_ID_CHARACTERS} characters.")
    matching: list[str] = []
    cursor: str | None = None
    for limit in _SEARCH_PAGE_SIZES:
        page = client.jobs(limit=limit, cursor=cursor, newest_first=True)
        matching += [job.id for job in page.jobs if job.id.startswith(given)]
        cursor = page.next_cursor
        if cursor is None or (matching and len(given) >= SHOWN_ID_CHARACTERS):
            break
    if not matching and cursor is not None:
        raise CliError(
            f"none of the newest {sum(_SEARCH_PAGE_SIZES):,} jobs begins with {given!r}", "Give the full id."
        )
    if not matching:
        raise CliError(f"no job id begins with {given!r}", "See: baton jobs")
    if len(matching) > 1:
        shown = ", ".join(matching[:3]) + (", ..." if len(matching) > 3 else "")
        raise CliError(f"{len(matching)} job ids begin with {given!r}: {shown}", "Give a longer prefix.")
    return matching[0]

"""What every command is handed: profile, client, screen, clock; and job ids as people type them."""

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

from baton.contract.base import JOB_ID_PATTERN
from baton.contract.jobs import JobView
from baton.contract.keys import KeyView
from baton.contract.webhooks import WebhookView
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.output import Screen
from gpu_client.cli.core.profiles import Profile, choose_profile
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import Unreachable
from gpu_client.transport.retry import RetryPolicy
from gpu_client.transport.transfer.manager import Transfer

V = TypeVar("V", KeyView, WebhookView)

PATIENCE = RetryPolicy(max_tries=5, budget_s=20.0, first_delay_s=0.3, max_delay_s=4.0)
"""A person waits: an address at which nobody answers is given up within seconds."""

MIN_ID_CHARACTERS = 4
SHOWN_ID_CHARACTERS = 8
"""What `baton jobs` shows of an id: so many tell jobs of thousands apart."""
_SEARCHED_JOBS = (100, 1000, 1000, 1000, 1000)
"""Page by page, from the newest on: mostly it is one of the last few."""

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output; nothing else on standard output.")]
JobIdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="Job id, or the beginning of one.", show_default=False)
]


@dataclass
class Session:
    """One run of the program. `sleep` and `clock` (seconds since 1970, for ages only) are for tests."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    profile_name: str | None = None
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    cancel: threading.Event = field(default_factory=threading.Event)
    """Set by Ctrl-C: stops what other threads do."""

    @cached_property
    def screen(self) -> Screen:
        """The output of this run."""
        return Screen()

    def profile(self) -> Profile:
        """Where to go, and with which key."""
        return choose_profile(self.environ, self.profile_name)

    @contextmanager
    def client(self) -> Iterator[BatonClient]:
        """A client of the chosen profile."""
        with connect(self.profile()) as client:
            yield client


def session_of(context: typer.Context) -> Session:
    """The session that `main` made."""
    found = context.find_object(Session)
    assert found is not None
    return found


def connect(profile: Profile, *, transfer: Transfer | None = None) -> BatonClient:
    """A client for a profile. Raises CliError for an address or key that can be none."""
    try:
        return BatonClient(profile.url, profile.api_key, policy=PATIENCE, transfer=transfer)
    except ValueError as error:
        raise CliError(str(error), "See: baton login --help") from error


def find_job(client: BatonClient, text: str) -> JobView:
    """The job that `text` names."""
    return client.get_job(full_id(client, text))


def named(kind: str, known: Sequence[V], given: str) -> V:
    """The one of the `known` keys or webhooks that an id, or its beginning, names. Raises CliError."""
    found = [one for one in known if one.id == given]
    if not found and len(given) >= MIN_ID_CHARACTERS:
        found = [one for one in known if one.id.startswith(given)]
    if len(found) != 1:
        problem = f"no {kind} has" if not found else f"{len(found)} {kind}s have"
        raise CliError(f"{problem} the id {given[:40]!r}", f"See: baton {kind}s list")
    return found[0]


@contextmanager
def making(kind: str, remedy: str) -> Iterator[None]:
    """A call that makes something, and is not tried again: the first try may have made one. Then the error says so."""
    try:
        yield
    except Unreachable as error:
        raise Unreachable(f"{error}. A {kind} may have been made: see baton {kind}s list, and {remedy}") from error


def full_id(client: BatonClient, text: str) -> str:
    """The whole id for the beginning of one. Raises CliError if it fits none of the newest jobs, or several.

    With as many characters as `baton jobs` shows, the search ends with the page that has it.
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
    for limit in _SEARCHED_JOBS:
        page = client.jobs(limit=limit, cursor=cursor, newest_first=True)
        matching += [job.id for job in page.jobs if job.id.startswith(given)]
        cursor = page.next_cursor
        if cursor is None or (matching and len(given) >= SHOWN_ID_CHARACTERS):
            break
    if not matching and cursor is not None:
        raise CliError(f"none of the newest {sum(_SEARCHED_JOBS):,} jobs begins with {given!r}", "Give the whole id.")
    if not matching:
        raise CliError(f"no job id begins with {given!r}", "See: baton jobs")
    if len(matching) > 1:
        shown = ", ".join(matching[:3]) + (", ..." if len(matching) > 3 else "")
        raise CliError(f"{len(matching)} job ids begin with {given!r}: {shown}", "Give more of it.")
    return matching[0]

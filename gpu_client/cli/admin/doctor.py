"""Command `baton doctor`: check the path between this machine and the control plane."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from baton.contract.keys import HealthAnswer
from baton.contract.names import DATA_BUCKET, Scope
from gpu_client.cli.admin.keys import scopes_of
from gpu_client.cli.core.errors import CliError, ExitCode, describe
from gpu_client.cli.core.formats import duration, size
from gpu_client.cli.core.session import AsJson, Session, connect, session_of
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import BatonError, Unreachable
from gpu_client.transport.net.connections import user_agent
from gpu_client.transport.net.digests import hash_file
from gpu_client.transport.retry import RetryPolicy
from gpu_client.transport.transfer.manager import Transfer

SKEW_WARN_S, SKEW_FAIL_S = 5, 900
"""Nothing is decided by this machine's clock, but TLS fails when it is far off, and logs are hard to match."""
SLOW_ROUND_TRIP_S = 1.0
SLOW_BYTES_PER_S = 500_000
PROBE_BYTES = 1_000_000
PROBE_PREFIX = ".baton-doctor"
_ROUND_TRIPS = 3
_IN_THE_WAY = "Is the address right, is it running, and is no proxy or firewall in the way?"
_ONE_MORE_TRY = RetryPolicy(max_tries=2, budget_s=5.0)
"""What a transfer of data waits out is here what is looked for."""


class Verdict(StrEnum):
    """What came of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `said` is what was found, `remedy` what to do unless it is ok."""

    name: str
    verdict: Verdict
    said: str
    remedy: str = ""

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {"name": self.name, "verdict": self.verdict.value, "found": self.said, "remedy": self.remedy or None}


def examine(session: Session, timer: Callable[[], float] = time.perf_counter) -> Iterator[Check]:
    """Each check as it is done; those that need what has failed are left out."""
    try:
        profile = session.profile()
        client = connect(profile, transfer=Transfer(policy=_ONE_MORE_TRY))
    except CliError as error:
        yield Check("profile", Verdict.FAIL, str(error))
        return
    with client:
        yield Check("profile", Verdict.OK, profile.url)
        try:
            health, trips_s = _round_trips(client, timer)
        except BatonError as error:
            yield _failed("address", error)
            return
        yield Check("address", Verdict.OK, f"{profile.url} answers")
        yield judge_latency(min(trips_s))
        yield judge_clock(session.clock(), health.server_time, min(trips_s))
        yield judge_versions(user_agent().partition(" ")[0].partition("/")[2], health.version)
        try:
            scopes = scopes_of(client)
        except BatonError as error:
            yield _failed("key", error)
            return
        yield judge_scopes(scopes)
        if Scope.SUBMIT in scopes:
            yield from _bandwidth(session, client, timer)


def _round_trips(client: BatonClient, timer: Callable[[], float]) -> tuple[HealthAnswer, list[float]]:
    trips_s = []
    health = client.health()  # opens the connection
    for _ in range(_ROUND_TRIPS):
        began = timer()
        health = client.health()
        trips_s.append(timer() - began)
    return health, trips_s


def judge_latency(trip_s: float) -> Check:
    """The fastest of a few calls on an open connection."""
    said = f"{trip_s * 1000:.0f} ms for a round trip"
    if trip_s <= SLOW_ROUND_TRIP_S:
        return Check("latency", Verdict.OK, said)
    return Check("latency", Verdict.WARN, said, "Is a proxy or a VPN in the way, or the region far away?")


def judge_clock(here: float, server_time: int, trip_s: float) -> Check:
    """This machine's clock against the server's, which tells whole seconds only."""
    # the server's second began up to one second before it was told, and the answer was under way
    skew_s = max(0.0, abs(here - (server_time + 0.5)) - 0.5 - trip_s)
    way = "ahead of" if here > server_time else "behind"
    said = "agrees with the server's" if skew_s < 1 else f"{duration(skew_s)} {way} the server's"
    if skew_s < SKEW_WARN_S:
        return Check("clock", Verdict.OK, said)
    verdict = Verdict.WARN if skew_s < SKEW_FAIL_S else Verdict.FAIL
    return Check(
        "clock", verdict, said, "Set this machine's clock (NTP). Ages and dates shown here are off by as much."
    )


def judge_versions(ours: str, theirs: str) -> Check:
    """Client and API of the same major and minor version know the same fields."""
    said = f"client {ours}, API {theirs}"
    if ours.split(".")[:2] == theirs.split(".")[:2]:
        return Check("versions", Verdict.OK, said)
    return Check("versions", Verdict.WARN, said, "Bring the older one up to the newer one's version.")


def judge_scopes(scopes: frozenset[Scope]) -> Check:
    """What the key may do, and what of this program that leaves out."""
    named = [scope.value for scope in Scope if scope in scopes]
    if Scope.SUBMIT in scopes:
        return Check("key", Verdict.OK, f"valid; may: {', '.join(named)}")
    if scopes:
        remedy = "Jobs and data need the scope submit: ask an admin for such a key."
        return Check("key", Verdict.WARN, f"valid; may only: {', '.join(named)}", remedy)
    return Check("key", Verdict.FAIL, "valid, but may do nothing", "Ask an admin for another key.")


def _bandwidth(session: Session, client: BatonClient, timer: Callable[[], float]) -> Iterator[Check]:
    """A small object up, down, and away again. It goes away when interrupted, too."""
    key = f"{PROBE_PREFIX}/{secrets.token_hex(8)}"
    try:
        with tempfile.TemporaryDirectory(prefix="baton-doctor-", ignore_cleanup_errors=True) as scratch:
            up, down = Path(scratch) / "up", Path(scratch) / "down"
            up.write_bytes(secrets.token_bytes(PROBE_BYTES))
            began = timer()
            try:
                client.upload_files(DATA_BUCKET, {key: up}, cancel=session.cancel)
                uploaded = timer()
                client.download(DATA_BUCKET, key, down, digest=hash_file(up), cancel=session.cancel)
            finally:
                client.delete_object(DATA_BUCKET, key)
    except BatonError as error:
        yield _failed("store", error)
        return
    yield judge_bandwidth("upload", PROBE_BYTES / max(1e-6, uploaded - began))
    yield judge_bandwidth("download", PROBE_BYTES / max(1e-6, timer() - uploaded))


def judge_bandwidth(name: str, bytes_per_s: float) -> Check:
    """Measured with one small object, latency included: a lower bound."""
    said = f"at least {size(bytes_per_s)}/s, with {size(PROBE_BYTES)}"
    if bytes_per_s >= SLOW_BYTES_PER_S:
        return Check(name, Verdict.OK, said)
    return Check(name, Verdict.WARN, said, "Large data and checkpoints take long over this connection.")


def _failed(name: str, error: BatonError) -> Check:
    """What the program would say about the error, as a check: but not that this one should be made."""
    if isinstance(error, Unreachable):
        return Check(name, Verdict.FAIL, " ".join(str(error).split()), _IN_THE_WAY)
    return Check(name, Verdict.FAIL, " ".join(describe(error)[1].split()))


_COLOURS = {Verdict.OK: "\x1b[32m", Verdict.WARN: "\x1b[33m", Verdict.FAIL: "\x1b[31m"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(context: typer.Context, as_json: AsJson = False) -> None:
    """Check address, key, clock, versions, latency and bandwidth.

    Exit code 1 if anything fails.
    """
    session = session_of(context)
    found: list[Check] = []
    for check in examine(session):
        found.append(check)
        if not as_json:
            session.screen.line(f"{_COLOURS[check.verdict]}{check.verdict.value:5}\x1b[0m{check.name:12} {check.said}")
            if check.remedy:
                session.screen.line(f"{'':17} {check.remedy}")
    failed = any(check.verdict is Verdict.FAIL for check in found)
    if as_json:
        session.screen.json({"ok": not failed, "checks": [check.as_data() for check in found]})
    if failed:
        raise typer.Exit(ExitCode.FAILED)

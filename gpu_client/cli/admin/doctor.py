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

from baton.contract.admin.keys import HealthAnswer
from baton.contract.names import DATA_BUCKET, Scope
from gpu_client.cli.admin.keys import probe_scopes
from gpu_client.cli.core.errors import CliError, ExitCode, describe
from gpu_client.cli.core.formats import duration, size
from gpu_client.cli.core.session import AsJson, CliSession, connect, session_of
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import BatonError, Unreachable
from gpu_client.transport.net.connections import user_agent
from gpu_client.transport.net.digests import hash_file
from gpu_client.transport.retry import RetryPolicy
from gpu_client.transport.transfer.manager import Transfer

SKEW_WARN_S, SKEW_FAIL_S = 5, 900
"""Limits of the clock skew in seconds. A large skew breaks TLS, and any skew makes logs hard to compare."""
SLOW_ROUND_TRIP_S = 1.0
SLOW_BYTES_PER_S = 500_000
PROBE_BYTES = 1_000_000
PROBE_PREFIX = ".baton-doctor"
_ROUND_TRIPS = 3
_ADDRESS_REMEDY = "Check the address, that the API runs, and any proxy or firewall."
_SHORT_RETRY = RetryPolicy(max_tries=2, budget_s=5.0)
"""Policy of a single retry. Many retries would hide the failures that this command must find."""


class CheckStatus(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """Finding of a check. `remedy` is empty if the status is OK."""

    name: str
    status: CheckStatus
    finding: str
    remedy: str = ""

    def as_data(self) -> dict[str, Any]:
        """Return the check as JSON values."""
        return {"name": self.name, "verdict": self.status.value, "found": self.finding, "remedy": self.remedy or None}


def run_checks(session: CliSession, timer: Callable[[], float] = time.perf_counter) -> Iterator[Check]:
    """Run the checks and yield each result; skip the checks that depend on a failed check."""
    try:
        profile = session.profile()
        client = connect(profile, transfer=Transfer(policy=_SHORT_RETRY))
    except CliError as error:
        yield Check("profile", CheckStatus.FAIL, str(error))
        return
    with client:
        yield Check("profile", CheckStatus.OK, profile.url)
        try:
            health, trips_s = _measure_round_trips(client, timer)
        except BatonError as error:
            yield _failed_check("address", error)
            return
        yield Check("address", CheckStatus.OK, f"{profile.url} answers")
        yield judge_latency(min(trips_s))
        yield judge_clock(session.clock(), health.server_time, min(trips_s))
        yield judge_versions(user_agent().partition(" ")[0].partition("/")[2], health.version)
        try:
            scopes = probe_scopes(client)
        except BatonError as error:
            yield _failed_check("key", error)
            return
        yield judge_scopes(scopes)
        if Scope.SUBMIT in scopes:
            yield from _check_bandwidth(session, client, timer)


def _measure_round_trips(client: BatonClient, timer: Callable[[], float]) -> tuple[HealthAnswer, list[float]]:
    trips_s = []
    health = client.health()  # opens the connection, which the measurement must not include
    for _ in range(_ROUND_TRIPS):
        began = timer()
        health = client.health()
        trips_s.append(timer() - began)
    return health, trips_s


def judge_latency(trip_s: float) -> Check:
    """Rate the fastest round trip on an open connection."""
    finding = f"{trip_s * 1000:.0f} ms for a round trip"
    if trip_s <= SLOW_ROUND_TRIP_S:
        return Check("latency", CheckStatus.OK, finding)
    return Check("latency", CheckStatus.WARN, finding, "A proxy, a VPN or a distant region can cause this.")


def judge_clock(here: float, server_time: int, trip_s: float) -> Check:
    """Rate the clock skew. The server's time has a resolution of one second."""
    # The server truncates to seconds and the answer takes time, so both are subtracted from the difference.
    skew_s = max(0.0, abs(here - (server_time + 0.5)) - 0.5 - trip_s)
    way = "ahead of" if here > server_time else "behind"
    finding = "agrees with the server" if skew_s < 1 else f"{duration(skew_s)} {way} the server"
    if skew_s < SKEW_WARN_S:
        return Check("clock", CheckStatus.OK, finding)
    status = CheckStatus.WARN if skew_s < SKEW_FAIL_S else CheckStatus.FAIL
    return Check(
        "clock",
        status,
        finding,
        "Synchronize this machine's clock (NTP). Printed ages and dates are wrong by the difference.",
    )


def judge_versions(ours: str, theirs: str) -> Check:
    """Compare the versions: client and API with equal major and minor versions have the same fields."""
    finding = f"client {ours}, API {theirs}"
    if ours.split(".")[:2] == theirs.split(".")[:2]:
        return Check("versions", CheckStatus.OK, finding)
    return Check("versions", CheckStatus.WARN, finding, "Update the older of the two.")


def judge_scopes(scopes: frozenset[Scope]) -> Check:
    """Rate the scopes of the key for this program."""
    named = [scope.value for scope in Scope if scope in scopes]
    if Scope.SUBMIT in scopes:
        return Check("key", CheckStatus.OK, f"valid; scopes: {', '.join(named)}")
    if scopes:
        remedy = "Jobs and data need the scope submit. Ask an admin for such a key."
        return Check("key", CheckStatus.WARN, f"valid; scopes only: {', '.join(named)}", remedy)
    return Check("key", CheckStatus.FAIL, "valid, but without any scope", "Ask an admin for another key.")


def _check_bandwidth(session: CliSession, client: BatonClient, timer: Callable[[], float]) -> Iterator[Check]:
    """Upload, download and delete a small object. An interruption also deletes the object."""
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
        yield _failed_check("store", error)
        return
    yield judge_bandwidth("upload", PROBE_BYTES / max(1e-6, uploaded - began))
    yield judge_bandwidth("download", PROBE_BYTES / max(1e-6, timer() - uploaded))


def judge_bandwidth(name: str, bytes_per_s: float) -> Check:
    """Rate a bandwidth measured with one small object; latency is included, so the value is a lower bound."""
    finding = f"at least {size(bytes_per_s)}/s, with {size(PROBE_BYTES)}"
    if bytes_per_s >= SLOW_BYTES_PER_S:
        return Check(name, CheckStatus.OK, finding)
    return Check(name, CheckStatus.WARN, finding, "Large data sets and checkpoints are slow on this connection.")


def _failed_check(name: str, error: BatonError) -> Check:
    """Convert an error to a failed check, without the remedy to run baton doctor."""
    if isinstance(error, Unreachable):
        return Check(name, CheckStatus.FAIL, " ".join(str(error).split()), _ADDRESS_REMEDY)
    return Check(name, CheckStatus.FAIL, " ".join(describe(error)[1].split()))


_COLORS = {CheckStatus.OK: "\x1b[32m", CheckStatus.WARN: "\x1b[33m", CheckStatus.FAIL: "\x1b[31m"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(context: typer.Context, as_json: AsJson = False) -> None:
    """Check address, key, clock, versions, latency and bandwidth.

    Exit code 1 if a check fails.
    """
    session = session_of(context)
    found: list[Check] = []
    for check in run_checks(session):
        found.append(check)
        if not as_json:
            session.output.line(f"{_COLORS[check.status]}{check.status.value:5}\x1b[0m{check.name:12} {check.finding}")
            if check.remedy:
                session.output.line(f"{'':17} {check.remedy}")
    failed = any(check.status is CheckStatus.FAIL for check in found)
    if as_json:
        session.output.json({"ok": not failed, "checks": [check.as_data() for check in found]})
    if failed:
        raise typer.Exit(ExitCode.FAILED)

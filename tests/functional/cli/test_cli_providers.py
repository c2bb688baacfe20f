"""`baton fleet login`, `logout`, `providers`, `doctor`: with the fake Vast behind the real driver."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.contract.fleets.doctor import DoctorFinding, DoctorReport, FindingCode, FixOutcome
from baton.contract.fleets.fleet import MachineState, MachineView, Receipt
from fakes.vast.provider import KEY, FakeVast
from gpu_client.transport.api.client import BatonClient
from tests.functional.cli.people import Baton

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

FLEET = """\
name: rented
queues: [empty]
providers: [vast, salad]
image: ghcr.io/acme/worker:1
max_usd_per_hour: 0.5
budget: {total_usd: 20}
"""
PASSWORD = "canary-5e1f0c2d9b7a4e3f"
STRAY = DoctorFinding(
    id="stray_machine/vast/7",
    code=FindingCode.STRAY_MACHINE,
    provider="vast",
    detail="vast lists the machine 7, and no record explains it",
    fix="destroys the machine 7",
)
FOREIGN = DoctorFinding(
    id="foreign_machines/vast", code=FindingCode.FOREIGN_MACHINES, provider="vast", detail="2 others"
)


@pytest.fixture
def vast() -> Iterator[FakeVast]:
    fake = FakeVast(time.time)
    fake.intervals_s.clear()
    with fake:
        yield fake


@pytest.fixture
def accounts(tmp_path: Path, vast: FakeVast) -> Path:
    file = tmp_path / "accounts.yaml"
    file.touch(mode=0o600)
    file.write_text(f"vast: {{api_key: {KEY}, address: '{vast.url}'}}\n")
    return file


def test_an_account_from_login_to_logout(baton: Baton, accounts: Path, vast: FakeVast, tmp_path: Path) -> None:
    assert "baton fleet login PROVIDER" in baton("fleet", "providers").ok().err
    said = baton("fleet", "login", "vast", "--file", accounts).ok()
    assert said.out.startswith("The account ") and "credit 100.00 USD" in said.out and said.err == ""
    (listed,) = baton("fleet", "providers", "--json").ok().json
    assert listed["provider"] == "vast" and listed["balance_usd"] == 100.0
    shown = baton("fleet", "providers").ok()
    assert shown.out.splitlines()[1].startswith("vast") and "of the last login" in shown.err
    accounts.chmod(0o644)
    again = baton("fleet", "login", "vast", "--json", "--file", accounts).ok()
    assert again.json["provider"] == "vast" and f"chmod 600 {accounts}" in again.err
    document = tmp_path / "fleet.yaml"
    document.write_text(FLEET)
    assert "run 'baton fleet login salad'" in baton("fleet", "apply", document).ok().err
    baton("fleet", "stop", "rented").ok()
    assert baton("fleet", "logout", "vast").ok().out == "The account at vast is removed.\n"
    baton("fleet", "logout", "vast").failed(
        3, "provider_not_found", "No account at vast is stored. List the accounts with: baton fleet providers"
    )
    assert not any(KEY in heard for heard in baton.heard)


def test_a_login_at_a_registry_from_login_to_logout(baton: Baton, accounts: Path) -> None:
    assert "baton fleet login REGISTRY" in baton("fleet", "registries").ok().err
    accounts.write_text(f"registries: {{ghcr.io: {{username: acme, password: {PASSWORD}}}}}\n")
    said = baton("fleet", "login", "ghcr.io", "--file", accounts).ok()
    assert said.out == "The login of acme at ghcr.io is stored.\n" and "only reads the images" in said.err
    (listed,) = baton("fleet", "registries", "--json").ok().json
    assert (listed["registry"], listed["username"]) == ("ghcr.io", "acme")
    assert baton("fleet", "registries").ok().out.splitlines()[1].split()[:2] == ["ghcr.io", "acme"]
    assert baton("fleet", "logout", "ghcr.io").ok().out == "The login at ghcr.io is removed.\n"
    baton("fleet", "logout", "ghcr.io").failed(
        3, "registry_not_found", "No login at ghcr.io is stored. List the logins with: baton fleet registries"
    )
    assert not any(PASSWORD in heard for heard in baton.heard)


def test_a_key_that_does_not_work_is_not_stored(baton: Baton, accounts: Path, vast: FakeVast) -> None:
    vast.keys.clear()
    baton("fleet", "login", "vast", "--file", accounts).failed(3, "provider_key_refused")
    assert baton("fleet", "providers", "--json").ok().json == []
    baton("fleet", "login", "gcp", stdin=KEY).failed(2, "'gcp' is not a provider with an account")
    assert not any(KEY in heard for heard in baton.heard)


def test_a_provider_out_of_reach_is_named_and_tried_once(baton: Baton, accounts: Path, vast: FakeVast) -> None:
    vast.__exit__(None, None, None)
    refused = baton("fleet", "login", "vast", "--file", accounts)
    refused.failed(3, "provider_unavailable: vast cannot be reached from the control plane", "Nothing was stored.")
    assert "127.0.0.1:8787" not in refused.err and "baton doctor" not in refused.err


def examined(patch: pytest.MonkeyPatch, *findings: DoctorFinding) -> list[list[str]]:
    """Let the doctor find something; return the ids of each call of a fix, of which the first comes too early."""
    report = DoctorReport(providers=["vast"], findings=list(findings), at=1)
    calls: list[list[str]] = []

    def fix(_client: BatonClient, ids: list[str]) -> list[FixOutcome]:
        calls.append(ids)
        later = len(calls) == 1
        return [FixOutcome(id=one, fixed=not later, later=later, detail="vast ends the machine") for one in ids]

    patch.setattr(BatonClient, "examine_fleets", lambda _client: report)
    patch.setattr(BatonClient, "fix_findings", fix)
    return calls


def test_a_doctor_of_healthy_fleets_finds_nothing(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests leave fleets in the same control plane; none of them concerns this provider."""
    said = baton("fleet", "doctor", "--json").json
    assert "loopback" in said["providers"]
    assert [one for one in said["findings"] if one["provider"] == "loopback"] == []
    examined(monkeypatch)
    assert baton("fleet", "doctor").ok().out == "Nothing was found; examined: vast.\n"


def test_a_finding_is_shown_with_what_a_fix_does(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = examined(monkeypatch, STRAY, FOREIGN)
    said = baton("fleet", "doctor")
    assert said.code == 1 and "stray_machine" in said.out and "destroys the machine 7" in said.out
    assert baton("fleet", "doctor", "--json").json["findings"][0]["id"] == STRAY.id
    assert calls == []
    examined(monkeypatch, FOREIGN)
    assert "2 others" in baton("fleet", "doctor", "--fix").ok().out


def test_the_receipts_of_strays_are_shown(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    receipt = Receipt(quoted_usd_per_hour=0.6, observed_usd=0.31, charged_usd=0.3, absent_at=[1, 61])
    stray = MachineView(
        id="dep-lost-1",
        fleet="strays",
        state=MachineState.GONE,
        provider="vast",
        usd_per_hour=0.6,
        spent_usd=0.31,
        since=61,
        reason="no record explained the machine",
        receipt=receipt,
    )
    report = DoctorReport(providers=["vast"], findings=[], strays=[stray], at=61)
    monkeypatch.setattr(BatonClient, "examine_fleets", lambda _client: report)
    shown = baton("fleet", "doctor").ok().out
    assert "strays that the deployment paid" in shown and "dep-lost-1" in shown and "0.31" in shown


def test_a_fix_asks_first_and_waits_for_the_provider(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = examined(monkeypatch, STRAY, FOREIGN)
    said = baton("fleet", "doctor", "--fix", stdin="n\n")
    assert said.code == 1 and "Fix 1 finding as described?" in said.err and "nothing was fixed" in said.err
    assert baton("fleet", "doctor", "--fix", "--json").code == 1 and calls == []
    slept: list[float] = []
    baton.session_options["sleep"] = slept.append
    fixed = baton("fleet", "doctor", "--fix", stdin="y\n").ok().out
    assert f"fixed  {STRAY.id}: vast ends the machine" in fixed
    assert (calls, slept) == ([[STRAY.id], [STRAY.id]], [3.0])
    assert baton("fleet", "doctor", "--fix", "--yes", "--json").ok().json["outcomes"][0]["fixed"]

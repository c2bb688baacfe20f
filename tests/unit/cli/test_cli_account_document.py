"""The account at a provider from a document, a key on standard input, a terminal; no message repeats a value."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from baton.contract.fleets.providers import reveal
from baton.contract.names import ProviderName
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.fleet.account_document import find_provider, is_registry, read_account, read_login

KEY = "canary-5e1f0c2d9b7a4e3f"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def piped(patch: pytest.MonkeyPatch, text: str) -> None:
    patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def refused(patch: pytest.MonkeyPatch, provider: ProviderName, text: str) -> str:
    piped(patch, text)
    with pytest.raises(CliError) as raised:
        read_account(provider, None)
    said = "\n".join([str(raised.value), *raised.value.problems])
    assert KEY not in said and raised.value.__cause__ is None
    return said


@pytest.mark.parametrize("text", [KEY, f"{KEY}\n", f"vast: {{api_key: {KEY}}}", f"vast:\n  api_key: {KEY}\nsalad:\n"])
def test_standard_input_is_a_key_or_a_document(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    piped(monkeypatch, text)
    assert reveal(read_account("vast", None))["api_key"] == KEY


def test_a_document_has_accounts_by_provider(tmp_path: Path) -> None:
    file = tmp_path / "accounts.yaml"
    file.write_text(
        f"""\
salad: {{api_key: {KEY}, organization: acme, project: training}}
ssh:
  private_key: |
    -----BEGIN OPENSSH PRIVATE KEY-----
    abc
  hosts:
    - {{name: desk, address: 10.0.0.7, user: u, host_key: ssh-ed25519 AAAA}}
"""
    )
    assert reveal(read_account("salad", file))["organization"] == "acme"
    ssh = reveal(read_account("ssh", file))
    assert ssh["private_key"] == "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n" and ssh["hosts"][0]["port"] == 22
    with pytest.raises(CliError) as raised:
        read_account("vast", file)
    assert "no account at vast. Write 'vast: {api_key: ...}'." in raised.value.problems[0]


@pytest.mark.parametrize(
    ("provider", "text", "part"),
    [
        ("vast", "", "no account at vast was given. Redirect a file: baton fleet login vast < FILE"),
        (
            "salad",
            KEY,
            "the document has no account at salad. Write 'salad: {api_key: ..., organization: ..., project:",
        ),
        ("salad", f"salad: {{api_key: {KEY}}}", "organization: is missing"),
        ("vast", f"vast: {{api_key: [{KEY}]}}", "api_key"),
        ("vast", f"vast: {{api_key: {KEY}, adress: x}}", "Did you mean 'address'?"),
        ("vast", f"vast: {{api_key: {KEY}", "not YAML"),
        ("vast", f"vast: {{api_key: {KEY}, address: ftp}}", "address"),
        ("vast", KEY * 1000, "16384"),
    ],
)
def test_a_fault_names_its_place_and_no_value(
    monkeypatch: pytest.MonkeyPatch, provider: ProviderName, text: str, part: str
) -> None:
    assert part in refused(monkeypatch, provider, text)


def test_a_terminal_is_asked_for_what_is_required_and_a_secret_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def answer(label: str, *, hide_input: bool, err: bool) -> str:
        asked.append((label, hide_input))
        answers = {"region": "us-east-1", "image id": "ami-1", "subnet ids (separated by commas)": "s-1, s-2"}
        return answers.get(label.partition(" ")[2], KEY)

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(typer, "prompt", answer)
    assert reveal(read_account("vast", None))["api_key"] == KEY
    assert asked == [("vast api key", True)]
    found: dict[str, Any] = reveal(read_account("ec2", None))
    assert found["subnet_ids"] == ["s-1", "s-2"] and found["instance_types"]
    assert [hidden for _, hidden in asked[1:]] == [False, True, False, False, False, False]
    with pytest.raises(CliError, match="--file FILE"):
        read_account("ssh", None)


def test_an_invalid_answer_at_a_terminal_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(typer, "prompt", lambda label, **_: f"{KEY} with spaces")
    with pytest.raises(CliError, match="salad: organization: ") as raised:
        read_account("salad", None)
    assert KEY not in str(raised.value) and raised.value.__cause__ is None


def test_an_unknown_provider_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CliError, match="vast, salad, runpod, ec2, ssh"):
        find_provider("loopback")


def test_a_login_comes_from_a_document_beside_accounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = f"vast: {{api_key: x}}\nregistries:\n  ghcr.io: {{username: acme, password: {KEY}}}\n"
    file = tmp_path / "accounts.yaml"
    file.write_text(text)
    assert reveal(read_login("ghcr.io", file)) == {"username": "acme", "password": KEY}
    assert reveal(read_account("vast", file)) == {"api_key": "x", "address": "https://console.vast.ai"}
    piped(monkeypatch, text)
    assert reveal(read_login("ghcr.io", None))["password"] == KEY


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "no login at ghcr.io. Write 'registries: {ghcr.io: {username: ..., password: ...}}'."),
        (KEY, "no login at ghcr.io"),
        (f"registries: {{docker.io: {{username: a, password: {KEY}}}}}", "no login at ghcr.io"),
        (f"registries: {{ghcr.io: {{password: {KEY}}}}}", "username: is missing"),
        (f"registries: {{ghcr.io: {{username: a, token: {KEY}}}}}", "token: is not a field"),
        (f"registries: {{ghcr.io: {{username: a, password: [{KEY}]}}}}", "password"),
    ],
)
def test_a_fault_of_a_login_names_its_place_and_no_value(monkeypatch: pytest.MonkeyPatch, text: str, part: str) -> None:
    piped(monkeypatch, text)
    with pytest.raises(CliError) as raised:
        read_login("ghcr.io", None)
    said = "\n".join([str(raised.value), *raised.value.problems])
    assert part in said and KEY not in said and raised.value.__cause__ is None


def test_a_terminal_is_asked_for_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def answer(label: str, *, hide_input: bool = False, err: bool) -> str:
        asked.append((label, hide_input))
        return KEY if hide_input else "acme"

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(typer, "prompt", answer)
    assert reveal(read_login("ghcr.io", None)) == {"username": "acme", "password": KEY}
    assert asked == [("ghcr.io username", False), ("ghcr.io password or token", True)]


@pytest.mark.parametrize(
    ("name", "registry"),
    [
        ("ghcr.io", True),
        ("localhost:5000", True),
        ("localhost", True),
        ("vast", False),
        ("run-pod", False),
        ("a b.c", False),
    ],
)
def test_a_registry_is_told_from_a_provider_by_its_name(name: str, registry: bool) -> None:
    assert is_registry(name) is registry

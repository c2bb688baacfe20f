"""The command that opens the console, through the local front."""

from __future__ import annotations

import webbrowser

import pytest
import requests

from tests.functional.cli.people import Baton
from tests.kits.stack.stack import Stack

pytestmark = [pytest.mark.emulator, pytest.mark.processes]


def test_the_link_signs_a_browser_in_once(baton: Baton, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: bool(opened.append(url)))
    said = baton("console").ok()
    (link,) = opened
    assert said.out == f"{link}\n" and "Open the link within a minute" in said.err
    address, _, code = link.partition("#code=")
    assert address == f"{stack.url}/console"
    assert requests.get(stack.url, timeout=30).url == address
    with requests.Session() as browser:
        browser.headers["origin"] = stack.url
        made = browser.post(f"{stack.url}/sessions", json={"code": code}, timeout=30)
        assert made.status_code == 201 and "HttpOnly" in made.headers["set-cookie"]
        token = browser.post(f"{stack.url}/sessions/token", timeout=30).json()["token"]
        headers = {"x-api-key": token}
        assert requests.get(f"{stack.url}/jobs", headers=headers, timeout=30).status_code == 200
        assert browser.delete(f"{stack.url}/sessions/current", timeout=30).status_code == 204
        assert requests.get(f"{stack.url}/jobs", headers=headers, timeout=30).json()["error"]["code"] == "session_over"
    again = requests.post(f"{stack.url}/sessions", json={"code": code}, timeout=30)
    assert again.json()["error"]["code"] == "session_code_invalid"


def test_the_link_is_printed_without_a_browser(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda _: pytest.fail("a browser was opened"))
    assert "/console#code=" in baton("console", "--no-open", "--json").ok().json["url"]


def test_a_shared_job_is_read_by_the_link_alone(baton: Baton, stack: Stack) -> None:
    admin = {"x-api-key": stack.keys["admin"]}
    job = requests.post(f"{stack.url}/job", json={"command": ["train"]}, headers=admin, timeout=30).json()["id"]
    said = baton("share", job[:12], "--expires-in", "1h").ok()
    key, _, shown = said.out.strip().partition("#share=")[2].partition("&job=")
    assert shown == job and f"baton keys revoke {key.split('_')[1]}" in said.err
    headers = {"x-api-key": key}
    assert requests.get(f"{stack.url}/job/{job}", headers=headers, timeout=30).json()["id"] == job
    assert requests.get(f"{stack.url}/jobs", headers=headers, timeout=30).status_code == 403
    # A submitter cannot list keys, and ends a link by the whole id.
    submitter = {"BATON_API_URL": stack.url, "BATON_API_KEY": stack.keys["submit"]}
    key_id = key.split("_")[1]
    assert baton("keys", "revoke", key_id, **submitter).ok().out == f"Key {key_id} is revoked.\n"
    assert requests.get(f"{stack.url}/job/{job}", headers=headers, timeout=30).json()["error"]["code"] == "key_revoked"
    baton("keys", "revoke", stack.keys["admin"].split("_")[1], **submitter).failed(3, "wrong_scope")
    baton("share", job, "--expires-in", "31d").failed(2, "--expires-in 31d", "60s to 30d")

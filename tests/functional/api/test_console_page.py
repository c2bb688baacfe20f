"""The console's page and files: bytes, cache, headers."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from baton.contract.errors import ErrorCode
from functions.api.admin import console_page
from functions.settings import ControlPlaneSettings
from tests.kits.api.harness import Api

PAGE, SCRIPT = b"<!doctype html><title>Baton</title>" * 9, b"document.title = 'Baton';" * 99


@pytest.fixture(autouse=True)
def dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small build in the place of `console/dist`."""
    for name, content in (("index.html", PAGE), ("main-A1.js", SCRIPT)):
        (tmp_path / name).write_bytes(content)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    files = {"index.html": {"content_type": "text/html"}, "main-A1.js": {"content_type": "text/javascript"}}
    (tmp_path / "manifest.json").write_text(json.dumps({"files": files}))
    monkeypatch.setattr(console_page, "DIST", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("target", "content", "cache"),
    [
        ("/console", PAGE, "no-cache"),
        ("/console/main-A1.js", SCRIPT, "public, max-age=31536000, immutable"),
    ],
)
def test_a_file_is_served_plain_compressed_or_not_at_all_if_known(
    api: Api, target: str, content: bytes, cache: str
) -> None:
    plain = api.request("GET", target)
    packed = api.request("GET", target, headers={"accept-encoding": "br, gzip;q=0.8"})
    assert (plain.status, plain.body, packed.status, gzip.decompress(packed.body)) == (200, content, 200, content)
    assert "content-encoding" not in plain.headers and packed.headers["content-encoding"] == "gzip"
    assert len(packed.body) < len(plain.body)
    for answer in (plain, packed):
        assert answer.headers["cache-control"] == cache and answer.headers["vary"] == "accept-encoding"
        assert answer.headers["content-type"] == ("text/html" if content == PAGE else "text/javascript")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    tag = plain.headers["etag"]
    assert packed.headers["etag"] == tag
    for sent in (tag, f'"other", {tag}', tag.removeprefix("W/")):
        known = api.request("GET", target, headers={"if-none-match": sent})
        assert (known.status, known.body, known.headers["etag"]) == (304, b"", tag)
        assert known.headers["cache-control"] == cache
    for sent in ("", '"other"', 'W/""'):
        assert api.request("GET", target, headers={"if-none-match": sent}).status == 200


def test_the_root_leads_to_the_console(api: Api) -> None:
    answer = api.request("GET", "/")
    assert (answer.status, answer.headers["location"], answer.body) == (307, "/console", b"")


@pytest.mark.parametrize("target", ["/", "/console"])
@pytest.mark.parametrize("sent", [{}, {"accept-encoding": "gzip"}, {"if-none-match": "known"}], ids=str)
def test_head_answers_like_get_without_a_body(api: Api, target: str, sent: dict[str, str]) -> None:
    """Monitors and link checkers ask so."""
    if sent.get("if-none-match"):
        sent = {"if-none-match": api.request("GET", "/console").headers["etag"]}
    get, head = (api.request(method, target, headers=sent) for method in ("GET", "HEAD"))
    assert (head.status, head.headers, head.body) == (get.status, get.headers, b"")


def test_the_page_may_load_its_own_scripts_and_the_bytes_of_the_store_alone(api: Api) -> None:
    policy = dict(
        part.partition(" ")[::2]
        for part in api.request("GET", "/console").headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["form-action"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    describe = lambda settings: console_page.describe_policy(replace(api.context, settings=settings))  # noqa: E731
    own = ControlPlaneSettings(s3_endpoint="http://10.0.0.1:9000/x", s3_public_endpoint="https://store.example:9443/y")
    assert "connect-src 'self' https://store.example:9443;" in describe(own)
    aws = ControlPlaneSettings(s3_region="eu-west-1", data_bucket="d", checkpoints_bucket="c")
    assert "img-src 'self' blob: data: https://d.s3.amazonaws.com https://d.s3.eu-west-1.amazonaws.com https://c." in (
        describe(aws)
    )


@pytest.mark.parametrize("name", ["index.html", "manifest.json", "main-A1.js.gz", "..%2Fmain-A1.js", "%00", "x" * 3000])
def test_only_the_files_of_the_build_are_served(api: Api, name: str) -> None:
    answer = api.request("GET", f"/console/{name}")
    assert answer.status == 404 and len(answer.text) < 500
    if "%2F" not in name:
        answer.refused(ErrorCode.NOT_FOUND, "file", "Load /console again.")


def test_a_console_that_is_not_built_names_the_remedy_and_a_new_build_is_served_at_once(api: Api, dist: Path) -> None:
    (dist / "manifest.json").rename(dist / "aside")
    for target in ("/console", "/console/main-A1.js"):
        answer = api.request("GET", target)
        assert "make setup" in answer.refused(ErrorCode.CONSOLE_NOT_BUILT)["message"]
    (dist / "main-B2.js").write_bytes(b"1")
    (dist / "main-B2.js.gz").write_bytes(gzip.compress(b"1"))
    (dist / "manifest.json").write_text('{"files": {"main-B2.js": {"content_type": "text/javascript"}}}')
    assert api.request("GET", "/console/main-B2.js").body == b"1"

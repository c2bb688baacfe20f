"""The build of the console is small and reproducible, and serves what its page names."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from console.build import ConsoleBuildError, build

MAX_SCRIPT_GZIP_BYTES = 120_000
FIRST_CALLS = 2
"""Requests of the first view beside page, script and style sheet: the token and the jobs."""
MAX_REQUESTS = 5


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("console") / "dist"
    build(made)
    return made


def test_scripts_are_small_and_requests_few(dist: Path) -> None:
    files = json.loads((dist / "manifest.json").read_text())["files"]
    scripts = [name for name in files if name.endswith(".js")]
    assert sum(files[name]["gzip_bytes"] for name in scripts) <= MAX_SCRIPT_GZIP_BYTES
    (entry,) = (name for name in scripts if name.startswith("main-"))
    # A script that another one imports statically would be a request of the first view, too.
    assert not re.search(r"""(?:from|import)\s*["']\./""", (dist / entry).read_text())
    later = [name for name in scripts if name != entry]
    assert len(files) - len(later) + FIRST_CALLS <= MAX_REQUESTS


def test_what_downloads_a_checkpoint_is_a_script_of_its_own(dist: Path) -> None:
    """No page without a download reads the decoder and the hash."""
    (reader,) = dist.glob("reader-*.js")
    assert not re.search(r"""(?:from|import)\s*["']\./""", reader.read_text()), "a second request for shared code"
    (main,) = dist.glob("main-*.js")
    assert re.findall(r"""import\(["']\./(reader-[^"']+)["']\)""", main.read_text()) == [reader.name]
    assert "zstd" not in main.read_text()


def test_the_page_names_files_of_the_build_and_nothing_else(dist: Path) -> None:
    page = (dist / "index.html").read_text()
    named = re.findall(r'(?:src|href)="([^"]+)"', page)
    files = {f"/console/{path.name}" for path in dist.iterdir()}
    assert {address for address in named if not address.startswith("data:image/svg+xml,")} <= files
    # The Content-Security-Policy refuses inline scripts and styles.
    assert not re.search(r"<style|style=|<script(?![^>]*src=)|\son\w+=", page)


def test_equal_sources_give_equal_bytes(dist: Path, tmp_path: Path) -> None:
    build(tmp_path / "dist")
    assert {path.name: path.read_bytes() for path in dist.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "dist").iterdir()
    }
    for compressed in dist.glob("*.gz"):
        assert gzip.decompress(compressed.read_bytes()) == compressed.with_suffix("").read_bytes()


def test_a_faulty_source_keeps_the_earlier_build(dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "style").mkdir()
    (tmp_path / "main.js").write_text("export const = 1;")
    (tmp_path / "style" / "main.css").write_text("")
    monkeypatch.setattr("console.build.SOURCES", tmp_path)
    before = sorted(path.name for path in dist.iterdir())
    with pytest.raises(ConsoleBuildError, match=r"main\.js:1:13"):
        build(dist)
    assert sorted(path.name for path in dist.iterdir()) == before

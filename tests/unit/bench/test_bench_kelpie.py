"""Test the installation of the mirror's npm packages."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench.checkpoints.rivals import kelpie_mirror


def test_what_was_installed_by_half_is_installed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def npm(line: list[str], **_more: object) -> subprocess.CompletedProcess[str]:
        tries.append(line[2])
        if len(tries) == 1:
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(line, 0, "", "")

    monkeypatch.setattr(subprocess, "run", npm)
    with pytest.raises(KeyboardInterrupt):
        kelpie_mirror.install(tmp_path)
    (tmp_path / "mirror.mjs").write_text("an older one")
    for _ in range(2):
        program = kelpie_mirror.install(tmp_path)
        assert program.read_text() == (kelpie_mirror.SOURCE / "mirror.mjs").read_text()
    assert tries == ["ci", "ci"], "the second one finished what the first one had begun; the third had nothing to do"


def test_without_npm_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess(["npm"], 1, "", "no way to the registry")
    monkeypatch.setattr(subprocess, "run", lambda *_line, **_more: failed)
    with pytest.raises(RuntimeError, match="could not be installed from npm: no way to the registry"):
        kelpie_mirror.install(tmp_path)
    assert not (tmp_path / "installed-lock.json").exists()


def test_every_package_is_pinned_and_none_says_where_from() -> None:
    packages = json.loads((kelpie_mirror.SOURCE / "package-lock.json").read_text())["packages"]
    own = packages.pop("")
    assert own["dependencies"] == json.loads((kelpie_mirror.SOURCE / "package.json").read_text())["dependencies"]
    assert all(set(package) >= {"version", "integrity"} and "resolved" not in package for package in packages.values())

"""What is deployed: our code and what it needs, for Lambda's machines, the same bytes every time."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cdk.access import ACCESS
from cdk.bundling import ROOT, bundle, requirements

MAX_UNZIPPED_BYTES = 250 * 1024 * 1024
"""Lambda's limit."""


def digests(folder: Path) -> dict[str, str]:
    """Every file's digest."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    bundle(folder, "lambda")
    return folder


def test_the_same_code_gives_the_same_bytes(bundled: Path, tmp_path: Path) -> None:
    bundle(tmp_path, "lambda")
    assert digests(tmp_path) == digests(bundled)


def test_it_is_for_lambdas_machines_and_nothing_of_this_one_is_in_it(bundled: Path) -> None:
    libraries = [path.name for path in bundled.rglob("*.so*")]
    assert libraries and all("aarch64" in name for name in libraries), libraries
    assert not (bundled / "bin").exists()
    assert sum(path.stat().st_size for path in bundled.rglob("*") if path.is_file()) < MAX_UNZIPPED_BYTES
    here = str(ROOT).encode()
    assert not [path for path in bundled.rglob("*") if path.is_file() and here in path.read_bytes()]


def test_it_has_our_code_and_neither_the_client_nor_the_local_stack(bundled: Path) -> None:
    ours = {
        path.relative_to(bundled).parts[:2]
        for name in ("contract", "functions")
        for path in (bundled / name).rglob("*.py")
    }
    assert ("functions", "handlers") in ours and ("functions", "local") not in ours
    assert not [name for name in ("gpu_client", "torch", "ministack") if (bundled / name).exists()]
    for recipe in (ROOT / "functions" / "recipes").glob("*.yaml"):
        assert (bundled / "functions" / "recipes" / recipe.name).read_bytes() == recipe.read_bytes()


def test_versions_are_the_pinned_ones(bundled: Path) -> None:
    pinned = {
        re.sub(r"[-_.]+", "_", name).lower(): version
        for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.M)
    }
    found = dict(
        re.fullmatch(r"(.+)-([^-]+)\.dist-info", path.name).groups()  # type: ignore[union-attr]
        for path in bundled.glob("*.dist-info")
    )
    assert {name.lower(): version for name, version in found.items()}.items() <= pinned.items()
    assert {re.split(r"[<>=]", line)[0].replace("-", "_") for line in requirements()} <= {
        name.lower() for name in found
    }


def test_every_handler_starts_from_the_bundle_alone(tmp_path: Path) -> None:
    bundle(tmp_path, "host")
    for name in ACCESS:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
             f"from functions.handlers.{name} import handler; print(handler.__module__)"],
            env={"AWS_DEFAULT_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"},
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.stdout.strip() == f"functions.handlers.{name}", done.stderr

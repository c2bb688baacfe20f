"""Test the bundle: Baton's code and dependencies for Lambda, with reproducible bytes."""

from __future__ import annotations

import hashlib
import marshal
import re
import shutil
import subprocess
import sys
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path

import pytest

from cdk.bundling import PYTHON_VERSION, ROOT, bundle, interpreter_of, requirements
from cdk.resources.access import ACCESS

MAX_UNZIPPED_BYTES = 250 * 1024 * 1024
"""Size limit of Lambda."""


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of every file."""
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


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosted")
    bundle(folder, "host")
    return folder


def started(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Import a handler from a folder without other packages."""
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); "
         f"from functions.handlers.{name} import handler; print(handler.__module__)"],
        env={"AWS_DEFAULT_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip


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
        for name in ("baton", "functions")
        for path in (bundled / name).rglob("*.py")
    }
    assert ("functions", "handlers") in ours and ("functions", "local") not in ours
    assert not [name for name in ("gpu_client", "torch", "ministack") if (bundled / name).exists()]
    for recipe in (ROOT / "functions" / "recipes").glob("*.yaml"):
        assert (bundled / "functions" / "recipes" / recipe.name).read_bytes() == recipe.read_bytes()


def test_the_built_console_is_in_it_and_none_of_its_sources(bundled: Path) -> None:
    assert {path.name for path in (bundled / "console").iterdir()} == {"dist"}
    assert digests(bundled / "console" / "dist") == digests(ROOT / "console" / "dist")


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


@pytest.mark.parametrize("name", sorted(ACCESS))
def test_every_handler_starts_from_the_bundle_alone(hosted: Path, name: str) -> None:
    done = started(hosted, name)
    assert done.stdout.strip() == f"functions.handlers.{name}", done.stderr


def test_recipes_are_read_and_rendered_from_the_bundle_alone(hosted: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(hosted)!r}); "
        "from baton.contract.recipes.rendering import plan_of; from functions.recipes import built_in_recipe; "
        "plan, faults = plan_of(built_in_recipe('command@1'), {'command': ['a', 'b']}); "
        "import jinja2; print(plan.steps[0].command, faults, jinja2.__file__)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"['a', 'b'] [] {hosted}"), done.stderr


def test_every_module_is_compiled_and_says_where_it_lies_in_lambda(hosted: Path) -> None:
    modules = list(hosted.rglob("*.py"))
    assert len(modules) > 500
    for module in modules:
        magic, flags, code = (data := Path(cache_from_source(str(module))).read_bytes())[:4], data[4:8], data[16:]
        assert (magic, flags) == (MAGIC_NUMBER, b"\1\0\0\0"), "unchecked: Lambda's files have no times to compare"
        assert marshal.loads(code).co_filename == f"/var/task/{module.relative_to(hosted)}"


def test_a_cold_start_compiles_nothing(hosted: Path, tmp_path: Path) -> None:
    """A module with bytecode starts even if its source does not compile."""
    shutil.copytree(hosted, tmp_path / "spoiled")
    for module in (tmp_path / "spoiled").rglob("*.py"):
        module.write_text("this is no Python")
    done = started(tmp_path / "spoiled", "worker")
    assert done.stdout.strip() == "functions.handlers.worker", done.stderr


def test_lambdas_bundle_is_compiled_by_lambdas_python_where_there_is_one(bundled: Path) -> None:
    compiled = len(list(bundled.rglob("*.pyc")))
    tag = f"cpython-{PYTHON_VERSION.replace('.', '')}"
    assert compiled == len(list(bundled.rglob(f"*.{tag}.pyc")))
    assert compiled == (len(list(bundled.rglob("*.py"))) if interpreter_of(PYTHON_VERSION) else 0)


def test_a_name_that_leads_to_no_python_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyenv has such stubs for installed versions that are not selected."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    shim = tmp_path / "python9.9"
    shim.write_text("#!/bin/sh\necho 'python9.9: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert interpreter_of("9.9") is None
    assert interpreter_of(here) == sys.executable
    real = tmp_path / "pyenv/versions/9.9.1/bin/python9.9"
    real.parent.mkdir(parents=True)
    real.write_text("#!/bin/sh\necho 9.9\n")
    real.chmod(0o755)
    assert interpreter_of("9.9") == str(real)


def test_without_lambdas_python_it_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cdk.bundling.interpreter_of", lambda _version: None)
    bundle(tmp_path, "lambda")
    assert list(tmp_path.rglob("*.py")) and not list(tmp_path.rglob("*.pyc"))
    assert capsys.readouterr().err == (
        f"baton: no Python {PYTHON_VERSION} is found here, so cold starts will take longer.\n"
    )

"""The functions' code and its dependencies in one folder, made by uv: no Docker, and the same bytes every time.

With bytecode where a Python of the functions' version is found here: without it each cold start compiles everything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import jsii
from aws_cdk import AssetHashType, BundlingOptions, DockerImage, ILocalBundling
from aws_cdk import aws_lambda as lambda_

from cdk.stage import Target

ROOT = Path(__file__).resolve().parents[1]
PYTHON_VERSION = "3.13"
PLATFORM = "aarch64-manylinux2014"
PACKAGES = ("baton", "functions")
TASK_ROOT = "/var/task"
"""Where Lambda puts the folder: what tracebacks show."""
_NOISE = shutil.ignore_patterns("__pycache__", "*.pyc", "README.md", "openapi.json", "local")


class BundlingError(Exception):
    """The folder could not be filled; the message ends with what uv, or the compiler, said."""


def code(target: Target) -> lambda_.Code:
    """The asset of all functions; they differ in their handler only."""
    return lambda_.Code.from_asset(
        str(ROOT / "functions"),
        # What is deployed decides, not the folder it was made from.
        asset_hash_type=AssetHashType.OUTPUT,
        bundling=BundlingOptions(
            image=DockerImage.from_registry("not-used"),
            local=_Local(target),
        ),
    )


@jsii.implements(ILocalBundling)
class _Local:
    """What CDK calls instead of Docker."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def try_bundle(self, output_dir: str, *_options: object, **_more: object) -> bool:
        """Fill the folder, or end the program; never answers that Docker should try."""
        try:
            bundle(Path(output_dir), self._target)
        except BundlingError as error:
            # An error would come back from CDK as a page of its own calls.
            raise SystemExit(f"baton: {error}") from error
        return True


def bundle(output: Path, target: Target) -> None:
    """Put dependencies and code into `output`, an empty folder, for Lambda on arm64 or for this machine."""
    _install(output, target)
    # Scripts with this machine's paths in their first lines, and a record of them.
    shutil.rmtree(output / "bin", ignore_errors=True)
    for record in sorted(output.glob("*.dist-info/RECORD")):
        record.unlink()
    for package in PACKAGES:
        shutil.copytree(ROOT / package, output / package, ignore=_NOISE)
    interpreter = interpreter_of(_version(target))
    if interpreter is None:
        sys.stderr.write(f"baton: no Python {_version(target)} is found here, so cold starts will take longer.\n")
    else:
        _compile(output, interpreter)


def interpreter_of(version: str) -> str | None:
    """A Python of that minor version: this one, one on the PATH, or one of pyenv's; None if none of them runs."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    found = [Path(folder, f"python{version}") for folder in os.get_exec_path()]
    found += sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
    return next((str(path) for path in (Path(sys.executable), *found) if _version_of(path) == version), None)


def requirements() -> list[str]:
    """What the functions need besides their own code, as pyproject.toml names it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["functions"]]


def _version(target: Target) -> str:
    return PYTHON_VERSION if target == "lambda" else f"{sys.version_info.major}.{sys.version_info.minor}"


def _version_of(interpreter: Path) -> str | None:
    """What it says itself: a name may lead to a program that only says that there is no such Python."""
    try:
        done = subprocess.run(
            [interpreter, "-I", "-S", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return done.stdout.strip()


def _compile(output: Path, interpreter: str) -> None:
    """Bytecode beside each module, believed without a look at the module: nothing in it depends on time or place."""
    done = subprocess.run(
        [
            *(interpreter, "-I", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"),
            *("-s", str(output), "-p", TASK_ROOT, str(output)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BundlingError(f"a module cannot be compiled: {' '.join((done.stdout + done.stderr).split())}")


def _install(output: Path, target: Target) -> None:
    platform = ["--python-platform", PLATFORM] if target == "lambda" else []
    command = [
        str(Path(sysconfig.get_path("scripts"), "uv")),
        *("pip", "install", "--quiet", "--no-config", "--no-progress", "--color", "never"),
        "--no-compile-bytecode",
        # What a proxy in between signs is as good to uv as it is to pip.
        "--system-certs",
        *("--only-binary", ":all:"),
        *("--target", str(output), "--constraint", str(ROOT / "constraints.txt"), "--python-version", _version(target)),
        *platform,
        *requirements(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BundlingError(f"uv could not install the functions' dependencies: {' '.join(done.stderr.split())}")

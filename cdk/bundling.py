"""Bundle of the functions' code and dependencies, made by uv without Docker; equal inputs give equal bytes.

The bundle contains bytecode if this machine has a Python of the functions' version. Without bytecode each cold start
compiles all modules.
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
CONSOLE = ROOT / "console" / "dist"
TASK_ROOT = "/var/task"
"""Path of the bundle in Lambda, for tracebacks."""
_NOISE = shutil.ignore_patterns("__pycache__", "*.pyc", "README.md", "openapi.json", "local")


class BundlingError(Exception):
    """The bundle could not be made; the message ends with the output of uv or the compiler."""


def code(target: Target) -> lambda_.Code:
    """Return the asset of all functions, which differ in their handler only."""
    return lambda_.Code.from_asset(
        str(ROOT / "functions"),
        # The hash covers the bundle, not the sources.
        asset_hash_type=AssetHashType.OUTPUT,
        bundling=BundlingOptions(
            image=DockerImage.from_registry("not-used"),
            local=_LocalBundling(target),
        ),
    )


@jsii.implements(ILocalBundling)
class _LocalBundling:
    """Bundling without Docker, called by CDK."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def try_bundle(self, output_dir: str, *_options: object, **_more: object) -> bool:
        """Make the bundle, or end the program; True, since False would make CDK try Docker."""
        try:
            bundle(Path(output_dir), self._target)
        except BundlingError as error:
            # CDK would wrap any other exception into a long trace of its own calls.
            raise SystemExit(f"baton: {error}") from error
        return True


def bundle(output: Path, target: Target) -> None:
    """Write dependencies and code into `output`, an empty folder, for Lambda on arm64 or for this machine."""
    _install(output, target)
    # The scripts and the records of their digests contain paths of this machine, so they would change the hash.
    shutil.rmtree(output / "bin", ignore_errors=True)
    for record in sorted(output.glob("*.dist-info/RECORD")):
        record.unlink()
    for package in PACKAGES:
        shutil.copytree(ROOT / package, output / package, ignore=_NOISE)
    if not (CONSOLE / "manifest.json").exists():
        raise BundlingError("the console is not built; run make setup")
    shutil.copytree(CONSOLE, output / CONSOLE.relative_to(ROOT))
    interpreter = interpreter_of(python_version(target))
    if interpreter is None:
        sys.stderr.write(f"baton: no Python {python_version(target)} is found here, so cold starts will take longer.\n")
    else:
        _compile(output, interpreter)


def interpreter_of(version: str) -> str | None:
    """Find an interpreter of a minor version: the running one, on the PATH, or of pyenv; None if all fail to start."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    found = [Path(folder, f"python{version}") for folder in os.get_exec_path()]
    found += sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
    return next((str(path) for path in (Path(sys.executable), *found) if _version_of(path) == version), None)


def requirements() -> list[str]:
    """Read the dependencies of the functions from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["functions"]]


def python_version(target: Target) -> str:
    """Return the Python version of the functions: Lambda's, or the version of this interpreter."""
    return PYTHON_VERSION if target == "lambda" else f"{sys.version_info.major}.{sys.version_info.minor}"


def _version_of(interpreter: Path) -> str | None:
    """Run an interpreter to read its version; a file on the PATH may be a stub that only prints an error."""
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
    """Compile each module to unchecked bytecode, which depends on neither time nor path."""
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
        # Certificates of the system, so that uv accepts a company's proxy as pip does.
        "--system-certs",
        *("--only-binary", ":all:"),
        *(
            "--target",
            str(output),
            "--constraint",
            str(ROOT / "constraints.txt"),
            "--python-version",
            python_version(target),
        ),
        *platform,
        *requirements(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BundlingError(f"uv could not install the functions' dependencies: {' '.join(done.stderr.split())}")

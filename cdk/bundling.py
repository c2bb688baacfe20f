"""The functions' code and its dependencies in one folder, made by uv: no Docker, and the same bytes every time."""

from __future__ import annotations

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
PACKAGES = ("contract", "functions")
NOT_DEPLOYED = ("functions/local",)
_NOISE = shutil.ignore_patterns("__pycache__", "*.pyc", "README.md", "openapi.json", "local")


class BundlingError(Exception):
    """The dependencies could not be put together; the message ends with what uv said."""


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
        """Fill the folder. Raises BundlingError; never answers that Docker should try."""
        bundle(Path(output_dir), self._target)
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


def requirements() -> list[str]:
    """What the functions need besides their own code, as pyproject.toml names it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["functions"]]


def _install(output: Path, target: Target) -> None:
    version, platform = (
        (PYTHON_VERSION, ["--python-platform", PLATFORM])
        if target == "lambda"
        else (f"{sys.version_info.major}.{sys.version_info.minor}", [])
    )
    command = [
        str(Path(sysconfig.get_path("scripts"), "uv")),
        *("pip", "install", "--quiet", "--no-config", "--no-progress", "--no-compile-bytecode"),
        # What a proxy in between signs is as good to uv as it is to pip.
        "--system-certs",
        *("--only-binary", ":all:"),
        *("--target", str(output), "--constraint", str(ROOT / "constraints.txt"), "--python-version", version),
        *platform,
        *requirements(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BundlingError(f"uv could not install the functions' dependencies: {done.stderr.strip()}")

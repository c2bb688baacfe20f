"""The agent's image, as far as it can be looked at without a Docker engine: each instruction, and what it makes."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_client.agent.settings import AgentSettings, variable_of
from tests.waiting import until

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "gpu_client" / "Dockerfile"
IGNORED = ROOT / "gpu_client" / "Dockerfile.dockerignore"
UV = str(Path(sysconfig.get_path("scripts"), "uv"))
INSTALL = [UV, "pip", "install", "--quiet", "--no-config", "--system-certs", "--only-binary", ":all:"]
PYTHON_OF_THE_BASE = "3.12"
"""Ubuntu 24.04's."""
PLATFORM = "x86_64-manylinux_2_28"


def instructions() -> list[tuple[str, str]]:
    """Instruction and arguments, lines joined, comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.split(maxsplit=1)[1].strip()) for line in joined.splitlines()]


def of(kind: str) -> list[str]:
    """The arguments of every instruction of a kind."""
    return [arguments for name, arguments in instructions() if name == kind]


def copied() -> list[tuple[list[str], str]]:
    """Sources and destination of each COPY from the build context, of the last stage."""
    last = max(index for index, (name, _) in enumerate(instructions()) if name == "FROM")
    found = [text.split() for name, text in instructions()[last:] if name == "COPY" and "--from" not in text]
    return [(words[:-1], words[-1]) for words in found]


def environment() -> dict[str, str]:
    """What ENV sets."""
    return dict(pair.split("=", 1) for text in of("ENV") for pair in text.split())


def exec_form(text: str) -> list[str]:
    """The words of a command that no shell touches."""
    words: list[str] = json.loads(text[text.index("[") :])
    return words


def is_ignored(path: str) -> bool:
    """As Docker decides: the last pattern that matches the path, or a folder it lies in, wins."""
    ignored = False
    parts = path.split("/")
    prefixes = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    for line in IGNORED.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.lstrip("!")
        deep = pattern.startswith("**/")
        names = [prefix.rsplit("/", 1)[-1] for prefix in prefixes] if deep else prefixes
        pattern = pattern.removeprefix("**/")
        if any(fnmatch.fnmatch(name, pattern) and (deep or name.count("/") == pattern.count("/")) for name in names):
            ignored = not line.startswith("!")
    return ignored


def client_requirements() -> list[str]:
    """What the agent needs, as pyproject.toml names it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["client"]]


def pinned() -> dict[str, str]:
    """Versions in constraints.txt by normalised name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.M)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_the_base_is_one_version_of_a_cuda_runtime() -> None:
    (image,) = [text.partition("=")[2] for text in of("ARG") if text.startswith("CUDA_IMAGE=")]
    assert re.fullmatch(r"nvidia/cuda:[0-9]+\.[0-9]+\.[0-9]+-runtime-ubuntu24\.04(@sha256:[0-9a-f]{64})?", image)
    assert of("FROM") == ["${CUDA_IMAGE} AS base", "base AS build", "base"]


def test_every_copied_file_exists_and_reaches_the_builder() -> None:
    for text in of("COPY"):
        if "--from" in text:
            continue
        for source in text.split()[:-1]:
            path = ROOT / source
            assert path.exists(), source
            files = [path] if path.is_file() else [file for file in path.rglob("*.py") if "cli" not in file.parts]
            assert files and not [file for file in files if is_ignored(file.relative_to(ROOT).as_posix())]


@pytest.mark.parametrize(
    "path",
    [".env", ".baton/local/keys.json", "store.json", ".git/config", ".venv/bin/python", "tests/leash.py",
     "functions/api/keys.py", "gpu_client/agent/__pycache__/loop.cpython-312.pyc", "gpu_client/README.md",
     "gpu_client/agent/README.md", "gpu_client/Dockerfile", "gpu_client/cli/main.py", "cdk/stage.py"],
)  # fmt: skip
def test_nothing_else_reaches_the_builder(path: str) -> None:
    assert is_ignored(path)
    assert not is_ignored("gpu_client/agent/loop.py") and not is_ignored("contract/work.py")


def test_no_secret_and_no_unknown_setting_is_built_in() -> None:
    known = {variable_of(field) for field in AgentSettings.model_fields}
    assert {name for name in environment() if name.startswith("BATON_")} <= known - {"BATON_API_KEY", "BATON_API_URL"}
    for text in [*of("ENV"), *of("ARG"), *of("RUN"), *of("LABEL")]:
        assert not re.search(r"(?i)secret|token|passw|api_?key|credential", text), text


def test_it_runs_as_nobody_in_particular_and_hears_signals() -> None:
    assert of("USER") == ["10001:10001"], "by number, or Kubernetes cannot tell that it is not root"
    assert instructions().index(("USER", "10001:10001")) > max(
        index for index, (name, _) in enumerate(instructions()) if name in ("RUN", "COPY")
    )
    assert of("STOPSIGNAL") == ["SIGTERM"]
    assert exec_form(of("ENTRYPOINT")[0]) == ["/opt/baton/bin/python", "-m", "gpu_client.agent"]
    assert of("CMD") == [], "nothing comes between the agent and its signals"


def test_every_dependency_has_a_wheel_for_the_image(tmp_path: Path) -> None:
    """The image has no compiler."""
    command = [
        *INSTALL, "--target", str(tmp_path),
        "--constraint", str(ROOT / "constraints.txt"), "--python-version", PYTHON_OF_THE_BASE,
        "--python-platform", PLATFORM, *client_requirements(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = {
        re.sub(r"[-_.]+", "-", name).lower(): version
        for name, version in (
            path.name.removesuffix(".dist-info").rsplit("-", 1) for path in tmp_path.glob("*.dist-info")
        )
    }
    assert found and found.items() <= pinned().items(), "a version that is not the pinned one"


# What it makes, without the engine: a clean environment with the client's dependencies, and the copied files


class Image:
    """The image's last stage in a folder: `run` is `docker run`, with the image's paths replaced."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.python = str(folder / "opt/baton/bin/python")
        subprocess.run(
            [UV, "venv", "--quiet", "--no-config", "--python", sys.executable, folder / "opt/baton"], check=True
        )
        install = [*INSTALL, "--python", self.python]
        constraint = ["--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([*install, *constraint, *client_requirements()], check=True)
        for sources, destination in copied():
            for source in sources:
                self._copy(source, folder / destination.lstrip("/"))

    def _copy(self, source: str, place: Path) -> None:
        def ignore(directory: str, names: list[str]) -> set[str]:
            below = Path(directory).relative_to(ROOT)
            return {name for name in names if is_ignored((below / name).as_posix())}

        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, place, ignore=ignore)
        else:
            shutil.copy(ROOT / source, place)

    def start(self, words: list[str], workspace: Path, **settings: str) -> subprocess.Popen[str]:
        """A command of the image, as the engine would start it."""
        built_in = {name: value.replace("/opt/", f"{self.root}/opt/") for name, value in environment().items()}
        own = {"BATON_WORKSPACE": str(workspace), "BATON_HEALTH_FILE": str(workspace / "health")}
        workspace.mkdir(exist_ok=True)
        return subprocess.Popen(
            [words[0].replace("/opt/", f"{self.root}/opt/"), *words[1:]],
            env={"PATH": os.defpath, **built_in, **own, **settings},
            cwd=workspace,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, words: list[str], workspace: Path, **settings: str) -> tuple[int, str]:
        """Exit code and all that it said."""
        with self.start(words, workspace, **settings) as process:
            said, _ = process.communicate(timeout=60)
        return process.returncode, said


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    yield Image(tmp_path_factory.mktemp("image"))


def entrypoint() -> list[str]:
    return exec_form(of("ENTRYPOINT")[0])


def health_check() -> list[str]:
    (text,) = of("HEALTHCHECK")
    assert re.search(r"--interval=\d+s --timeout=\d+s --start-period=\d+s --retries=\d+ CMD \[", text)
    return exec_form(text)


@pytest.mark.processes
def test_the_agent_says_in_a_line_each_what_it_needs(image: Image, tmp_path: Path) -> None:
    code, said = image.run(entrypoint(), tmp_path / "w")
    assert (code, said) == (2, "BATON_API_URL: Field required\nBATON_API_KEY: Field required\n")
    assert image.run(entrypoint(), tmp_path / "w", BATON_API_URL="https://api.example") == (
        2,
        "BATON_API_KEY: Field required\n",
    )
    code, said = image.run(health_check(), tmp_path / "w")
    assert code == 1 and "no agent has been here" in said and said.count("\n") == 1


@pytest.mark.processes
def test_an_agent_is_well_while_it_waits_and_leaves_when_told_to(image: Image, tmp_path: Path) -> None:
    """SIGTERM to the process that the engine starts, which is the agent itself."""
    workspace = tmp_path / "w"
    settings = {"BATON_API_URL": "http://127.0.0.1:9", "BATON_API_KEY": "baton_0123456789_nothing", "BATON_GPUS": "0"}
    with image.start(entrypoint(), workspace, **settings) as agent:
        try:
            until(lambda: image.run(health_check(), workspace)[0] == 0, 30, what="a pulse")
            stopped_at = time.monotonic()
            agent.send_signal(signal.SIGTERM)
            said, _ = agent.communicate(timeout=60)
        finally:
            agent.kill()
    assert agent.returncode == 0, said
    assert time.monotonic() - stopped_at < 45 and "Traceback" not in said


@pytest.mark.processes
def test_a_training_script_finds_the_session(image: Image, tmp_path: Path) -> None:
    """`import gpu_client.training` works for whatever Python the image's owner adds, and needs no torch."""
    code, said = image.run(
        ["/opt/baton/bin/python", "-c", "import gpu_client.training as t; print(t.__name__)"], tmp_path
    )
    assert (code, said) == (0, "gpu_client.training\n")

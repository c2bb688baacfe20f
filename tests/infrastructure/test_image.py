"""Test the image of the agent without a Docker engine: each instruction and its result."""

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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.version import Version

from gpu_client.agent.app.settings import AgentSettings, variable_name
from gpu_client.requirements import requirements_of
from tests.kits.waiting import until

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "gpu_client" / "Dockerfile"
IGNORED = ROOT / "gpu_client" / "Dockerfile.dockerignore"
UV = str(Path(sysconfig.get_path("scripts"), "uv"))
INSTALL = [UV, "pip", "install", "--quiet", "--no-config", "--system-certs", "--only-binary", ":all:"]
PYTHON_OF_THE_BASE = "3.12"
"""Python version of Ubuntu 24.04."""
PLATFORM = "x86_64-manylinux_2_28"


def instructions() -> list[tuple[str, str]]:
    """Parse the Dockerfile into instructions and arguments."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.split(maxsplit=1)[1].strip()) for line in joined.splitlines()]


def of(kind: str) -> list[str]:
    """Return the arguments of every instruction of a kind."""
    return [arguments for name, arguments in instructions() if name == kind]


def copied() -> list[tuple[list[str], str]]:
    """Return sources and destination of each COPY from the build context in the last stage."""
    last = max(index for index, (name, _) in enumerate(instructions()) if name == "FROM")
    found = [text.split() for name, text in instructions()[last:] if name == "COPY" and "--from" not in text]
    return [(words[:-1], words[-1]) for words in found]


def environment() -> dict[str, str]:
    """Return the variables of ENV."""
    return dict(pair.split("=", 1) for text in of("ENV") for pair in text.split())


def exec_form(text: str) -> list[str]:
    """Return the words of a command in exec form."""
    words: list[str] = json.loads(text[text.index("[") :])
    return words


def is_ignored(path: str) -> bool:
    """Return True if Docker ignores the path: the last pattern that matches the path or a parent wins."""
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


def project() -> dict[str, Any]:
    """Read the table of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def client_requirements() -> list[str]:
    """Return the requirements of the agent, without the training libraries of several GB."""
    return requirements_of(project(), ["client"])


def normalised(name: str) -> str:
    """Normalize the name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path, python: str) -> dict[str, str]:
    """Read the versions in a file of constraints for a Python on Linux, by normalized name."""
    place = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    place |= {"sys_platform": "linux", "platform_machine": "x86_64", "platform_python_implementation": "CPython"}
    found = [Requirement(line) for line in path.read_text().splitlines() if line and not line.startswith("#")]
    here = [each for each in found if each.marker is None or each.marker.evaluate(place)]
    assert all(re.fullmatch(r"==[^*,]+", str(each.specifier)) for each in here), "a version that is not one"
    return {normalised(each.name): str(each.specifier).removeprefix("==") for each in here}


def pinned() -> dict[str, str]:
    """Return the versions in the image: the common constraints, and the CUDA build of torch."""
    everybody = pins(ROOT / "constraints.txt", PYTHON_OF_THE_BASE)
    image_only = pins(ROOT / "gpu_client" / "cuda.txt", PYTHON_OF_THE_BASE)
    assert not everybody.keys() & image_only.keys()
    return everybody | image_only


def test_the_base_is_one_version_of_a_cuda_runtime() -> None:
    (image,) = [text.partition("=")[2] for text in of("ARG") if text.startswith("CUDA_IMAGE=")]
    assert re.fullmatch(r"nvidia/cuda:[0-9]+\.[0-9]+\.[0-9]+-base-ubuntu24\.04(@sha256:[0-9a-f]{64})?", image)
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
    [".env", ".baton/local/keys.json", "store.json", ".git/config", ".venv/bin/python", "tests/kits/stack/leash.py",
     "functions/api/admin/keys.py", "gpu_client/agent/__pycache__/loop.cpython-312.pyc", "gpu_client/README.md",
     "gpu_client/agent/README.md", "gpu_client/Dockerfile", "gpu_client/cli/main.py", "cdk/stage.py"],
)  # fmt: skip
def test_nothing_else_reaches_the_builder(path: str) -> None:
    assert is_ignored(path)
    assert not is_ignored("gpu_client/agent/app/worker_loop.py") and not is_ignored("baton/contract/worker/calls.py")


def test_no_secret_and_no_unknown_setting_is_built_in() -> None:
    known = {variable_name(field) for field in AgentSettings.model_fields}
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


def resolved(extra: str) -> dict[str, str]:
    """Resolve an extra for the image with pip, from wheels only and without a download of the files."""
    command = [
        UV, "pip", "compile", "--quiet", "--no-config", "--system-certs", "--only-binary", ":all:", "--no-annotate",
        "--no-header", "--python-version", PYTHON_OF_THE_BASE, "--python-platform", PLATFORM,
        "--constraint", str(ROOT / "constraints.txt"), "--constraint", str(ROOT / "gpu_client" / "cuda.txt"), "-",
    ]  # fmt: skip
    asked = "\n".join(requirements_of(project(), [extra]))
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return {normalised(name): version for name, version in re.findall(r"^([^\s=]+)==(\S+)$", done.stdout, re.M)}


def test_every_dependency_is_pinned_and_has_a_wheel_for_the_image() -> None:
    """The image has no compiler. The extra `client`, too, is resolved by this: all versions are pinned."""
    found = resolved("dreambooth")
    for extra in ("client", "dreambooth"):
        asked = {normalised(Requirement(text).name) for text in requirements_of(project(), [extra])}
        assert asked <= found.keys(), extra
    assert found.items() <= pinned().items(), "a version that is not the pinned one"


def test_the_image_is_made_of_what_the_dreambooth_recipes_train_with() -> None:
    """The test repeats the direct dependencies of the default extra, so that a lost dependency fails."""
    assert [text for text in of("ARG") if text.startswith("EXTRA")] == ["EXTRA=dreambooth"]
    (install,) = [text for text in of("RUN") if "pip install" in text]
    assert 'python3 requirements.py "${EXTRA}" > requirements.txt' in install
    assert install.endswith("--constraint constraints.txt --constraint cuda.txt --requirement requirements.txt")
    names = {normalised(Requirement(text).name) for text in requirements_of(project(), ["dreambooth"])}
    assert {"diffusers", "peft", "transformers", "accelerate", "safetensors", "torch", "pillow", "pyyaml"} <= names
    assert {normalised(Requirement(text).name) for text in client_requirements()} < names, "and the agent's own"


def test_what_is_pinned_is_what_pyproject_admits() -> None:
    versions = pinned()
    for extra in project()["optional-dependencies"]:
        for text in requirements_of(project(), [extra]):
            requirement = Requirement(text)
            name = normalised(requirement.name)
            assert name in versions, f"{name} of {extra}"
            assert requirement.specifier.contains(versions[name]), f"{text} of {extra}, and {versions[name]} is pinned"


def test_every_extra_that_trains_can_read_rules() -> None:
    """Regression: `train` alone lacked YAML and could not read rules."""
    for extra in ("train", "accelerate", "hf", "lightning", "dreambooth"):
        names = {normalised(Requirement(text).name) for text in requirements_of(project(), [extra])}
        assert {"pyyaml", "torch"} <= names, extra


def test_the_tests_run_with_the_versions_of_the_image() -> None:
    """torch has the same version, but the CUDA build, in the image only."""
    here = pins(ROOT / "constraints.txt", f"{sys.version_info.major}.{sys.version_info.minor}")
    here["torch"] = pinned()["torch"]
    for text in requirements_of(project(), ["dreambooth"]):
        name = normalised(Requirement(text).name)
        assert Version(version(name)).public == here[name], name
    cuda = pins(ROOT / "gpu_client" / "cuda.txt", PYTHON_OF_THE_BASE)
    assert [name for name in cuda if name.startswith("nvidia-")] and "+cpu" not in cuda["torch"]
    (image,) = [text.partition(":")[2] for text in of("ARG") if text.startswith("CUDA_IMAGE=")]
    assert image.split(".")[:2] == cuda["cuda-toolkit"].split(".")[:2], "one CUDA in the base and in torch"
    others = [ROOT / "Makefile", ROOT / ".ci" / "run", ROOT / "pyproject.toml"]
    assert not [path for path in others if re.search(r"constraint\S* \S*cuda\.txt", path.read_text())]


def test_requirements_follow_extras_that_extras_name() -> None:
    table = {
        "name": "it",
        "dependencies": ["base>=1"],
        "optional-dependencies": {"a": ["it[b, c]", "one>=1"], "b": ["two", "it[c]"], "c": ["three", "it[a]"]},
    }
    assert requirements_of(table, ["c"]) == ["base>=1", "three", "one>=1", "two"]
    assert requirements_of(table, []) == ["base>=1"]
    with pytest.raises(KeyError):
        requirements_of(table, ["d"])


# Content of the image, without Docker: a clean environment with the client's dependencies, and the copied files


class Image:
    """The last stage of the image in a folder; `run` acts as `docker run` with replaced paths."""

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
        """Return a command of the image in the form that the engine starts."""
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
        """Run a command; return its exit code and output."""
        with self.start(words, workspace, **settings) as process:
            said, _ = process.communicate(timeout=240)
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
    assert code == 2 and re.fullmatch(r"BATON_API_URL: is not set; .+\nBATON_API_KEY: is not set; .+\n", said)
    code, said = image.run(entrypoint(), tmp_path / "w", BATON_API_URL="https://api.example")
    assert code == 2 and re.fullmatch(r"BATON_API_KEY: is not set; .+\n", said)
    code, said = image.run(health_check(), tmp_path / "w")
    assert code == 1 and "no agent has written the file" in said and said.count("\n") == 1


@pytest.mark.processes
def test_an_agent_is_well_while_it_waits_and_leaves_when_told_to(image: Image, tmp_path: Path) -> None:
    """The engine sends SIGTERM to its process, which is the agent."""
    workspace = tmp_path / "w"
    settings = {"BATON_API_URL": "http://127.0.0.1:9", "BATON_API_KEY": "baton_0123456789_nothing", "BATON_GPUS": "0"}
    with image.start(entrypoint(), workspace, **settings) as agent:
        try:
            until(lambda: image.run(health_check(), workspace)[0] == 0, what="a pulse")
            stopped_at = time.monotonic()
            agent.send_signal(signal.SIGTERM)
            said, _ = agent.communicate(timeout=240)
        finally:
            agent.kill()
    assert agent.returncode == 0, said
    assert time.monotonic() - stopped_at < 45 and "Traceback" not in said


@pytest.mark.processes
def test_a_training_script_finds_the_session(image: Image, tmp_path: Path) -> None:
    """`import gpu_client.training` works on any Python that the owner adds to the image, and needs no torch."""
    code, said = image.run(
        ["/opt/baton/bin/python", "-c", "import gpu_client.training as t; print(t.__name__)"], tmp_path
    )
    assert (code, said) == (0, "gpu_client.training\n")

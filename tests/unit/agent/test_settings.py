"""Test the settings: the table is complete, values are checked at the start, problems name the variable."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from gpu_client.agent.app import settings as module
from gpu_client.agent.app.settings import AgentSettings, describe_problems, variable_name

NEEDED = {"BATON_API_URL": "https://api.example/stage", "BATON_API_KEY": "baton_0123_secret"}


def read(monkeypatch: pytest.MonkeyPatch, **variables: str) -> AgentSettings:
    for name, value in (NEEDED | variables).items():
        monkeypatch.setenv(name, value)
    return AgentSettings()


def problems(monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        read(monkeypatch, **variables)
    return describe_problems(caught.value)


def test_the_table_names_exactly_the_variables_that_are_read() -> None:
    table = set(re.findall(r"`((?:BATON|SALAD)_[A-Z_]+)`", module.__doc__ or ""))
    real = {variable_name(field) for field in AgentSettings.model_fields}
    assert table == real | {"SALAD_MACHINE_ID"}, "SALAD_MACHINE_ID is the other name of BATON_MACHINE_ID"


def test_every_variable_of_the_table_reaches_its_field(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values: dict[str, tuple[str, Any]] = {
        "BATON_ENROLMENT_TOKEN": ("baton_4567_secret", SecretStr("baton_4567_secret")),
        "BATON_QUEUE": ("night", "night"),
        "BATON_WORKSPACE": (str(tmp_path), tmp_path),
        "BATON_ARENA_DIR": (str(tmp_path / "memory"), tmp_path / "memory"),
        "BATON_WORKER_ID": ("w-7", "w-7"),
        "BATON_PROVIDER": ("vast", "vast"),
        "BATON_MACHINE_ID": ("m-7", "m-7"),
        "BATON_VRAM_GIB": ("23.6", 23.6),
        "BATON_GPUS": ("2", 2),
        "BATON_GPU_MODEL": ("RTX 4090", "RTX 4090"),
        "BATON_DISK_GIB": ("80", 80.0),
        "BATON_IMAGE": ("ghcr.io/acme/trainer:1", "ghcr.io/acme/trainer:1"),
        "BATON_PRICE_USD_PER_HOUR": ("0.42", 0.42),
        "BATON_POLL_MIN_S": ("2", 2.0),
        "BATON_POLL_MAX_S": ("60", 60.0),
        "BATON_EXIT_WHEN_IDLE_S": ("600", 600.0),
        "BATON_MAX_JOBS": ("3", 3),
        "BATON_TRANSFERS": ("16", 16),
        "BATON_MAX_UPLOAD_MBIT_S": ("20", 20.0),
        "BATON_MAX_DOWNLOAD_MBIT_S": ("100", 100.0),
        "BATON_STABLE_S": ("4.5", 4.5),
        "BATON_SHUTDOWN_GRACE_S": ("25", 25.0),
        "BATON_SPOT_NOTICES": ("ec2", "ec2"),
        "BATON_ELASTIC_PORT": ("47100", 47100),
        "BATON_ELASTIC_ADDRESSES": ("203.0.113.7:40112, trainer.example", "203.0.113.7:40112, trainer.example"),
        "BATON_STARTUP_GRACE_S": ("0", 0.0),
        "BATON_HEALTH_FILE": (str(tmp_path / "health"), tmp_path / "health"),
        "BATON_STATS_FILE": (str(tmp_path / "stats"), tmp_path / "stats"),
        "BATON_LOG_LEVEL": ("DEBUG", "DEBUG"),
        "SALAD_CONTAINER_GROUP_ID": ("cg-1", "cg-1"),
        "SALAD_CONTAINER_GROUP_NAME": ("trainers", "trainers"),
        "SALAD_ORGANIZATION_NAME": ("acme", "acme"),
        "SALAD_PROJECT_NAME": ("lora", "lora"),
    }
    settings = read(monkeypatch, **{name: text for name, (text, _) in values.items()})
    fields = {variable_name(field): field for field in AgentSettings.model_fields}
    assert set(fields) == set(values) | set(NEEDED), "a new setting needs a line here"
    for name, (_, value) in values.items():
        assert getattr(settings, fields[name]) == value, name
    assert settings.api_key.get_secret_value() == NEEDED["BATON_API_KEY"]
    assert not re.search("baton_.*secret", repr(settings))


def test_defaults_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read(monkeypatch)
    assert (settings.queue, settings.poll_min_s, settings.poll_max_s) == ("default", 1, 30)
    assert settings.workspace == Path("~/.cache/baton").expanduser()
    assert (settings.transfers, settings.stable_s, settings.startup_grace_s) == (8, 3, 60)
    assert (settings.shutdown_grace_s, settings.spot_notices) == (None, "auto")
    assert (settings.exit_when_idle_s, settings.max_jobs, settings.stats_file) == (None, None, None)
    assert (settings.health_file, settings.arena_dir) == (None, Path("/dev/shm"))


def test_empty_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Container platforms hand over variables that were left blank."""
    settings = read(monkeypatch, BATON_QUEUE="", BATON_MAX_JOBS="", SALAD_MACHINE_ID="")
    assert (settings.queue, settings.max_jobs, settings.machine_id) == ("default", None, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BATON_API_URL", "api.example"),
        ("BATON_API_KEY", "short"),
        ("BATON_QUEUE", "No Such"),
        ("BATON_WORKER_ID", "two words"),
        ("BATON_PROVIDER", "x" * 200),
        ("BATON_MACHINE_ID", "a b"),
        ("BATON_VRAM_GIB", "-1"),
        ("BATON_GPUS", "many"),
        ("BATON_GPU_MODEL", "x" * 65),
        ("BATON_DISK_GIB", "nan"),
        ("BATON_POLL_MIN_S", "0"),
        ("BATON_POLL_MAX_S", "inf"),
        ("BATON_EXIT_WHEN_IDLE_S", "nan"),
        ("BATON_MAX_JOBS", "0"),
        ("BATON_TRANSFERS", "65"),
        ("BATON_STABLE_S", "nan"),
        ("BATON_STARTUP_GRACE_S", "-1"),
        ("BATON_SHUTDOWN_GRACE_S", "0"),
        ("BATON_SPOT_NOTICES", "gcp"),
        ("BATON_LOG_LEVEL", "LOUD"),
        ("SALAD_CONTAINER_GROUP_ID", "a b"),
    ],
)
def test_a_bad_value_is_named_by_its_variable_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    (problem,) = problems(monkeypatch, **{name: value})
    assert problem.startswith(f"{name}: ")
    assert len(problem) > len(name) + 5
    if name == "BATON_API_KEY":
        assert value not in problem.removeprefix(f"{name}: ").split()


def test_missing_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NEEDED:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValidationError) as caught:
        AgentSettings()
    assert describe_problems(caught.value) == [
        "BATON_API_URL: is not set; set the address of the control plane, such as https://host/stage",
        "BATON_API_KEY: is not set; set a key with the scope worker: baton keys create NAME --scope worker",
    ]


def test_a_malformed_address_or_key_is_told_without_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(monkeypatch, BATON_API_URL="api.example", BATON_API_KEY="short") == [
        "BATON_API_URL: is no HTTP address; set the address of the control plane, such as https://host/stage",
        "BATON_API_KEY: is too short; set a key with the scope worker: baton keys create NAME --scope worker",
    ]


def test_an_enrolment_token_replaces_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, BATON_API_KEY="", BATON_ENROLMENT_TOKEN="baton_4567_secret").api_key is None
    (problem,) = problems(monkeypatch, BATON_API_KEY="", BATON_ENROLMENT_TOKEN="")
    assert problem.startswith("BATON_API_KEY: is not set; ")
    (problem,) = problems(monkeypatch, BATON_API_KEY="", BATON_ENROLMENT_TOKEN="short")
    assert problem.startswith("BATON_ENROLMENT_TOKEN: ")


def test_a_range_the_wrong_way_round_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = problems(monkeypatch, BATON_POLL_MIN_S="50", BATON_POLL_MAX_S="10")
    assert problem == "BATON_POLL_MIN_S must not be larger than BATON_POLL_MAX_S"


def test_salad_s_variables_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = read(
        monkeypatch,
        BATON_WORKSPACE=str(tmp_path / "not" / "yet"),
        BATON_GPUS="0",
        BATON_VRAM_GIB="0",
        SALAD_MACHINE_ID="m-salad",
        SALAD_CONTAINER_GROUP_ID="cg-1",
        SALAD_CONTAINER_GROUP_NAME="trainers",
        SALAD_ORGANIZATION_NAME="acme",
        SALAD_PROJECT_NAME="lora",
    )
    query = settings.work_query()
    assert query.provider == "salad"
    assert (query.machine_id, query.container_group_id) == ("m-salad", "cg-1")
    assert (query.organization_name, query.project_name, query.container_group_name) == ("acme", "lora", "trainers")
    assert query.disk_gib is not None
    assert query.disk_gib > 0
    monkeypatch.setenv("BATON_MACHINE_ID", "m-own")
    assert AgentSettings().identity().machine_id == "m-own"


@pytest.fixture
def fresh_gpus() -> Any:
    module._query_nvidia_gpus.cache_clear()
    yield
    module._query_nvidia_gpus.cache_clear()


def test_the_gpu_is_asked_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_gpus: None) -> None:
    """`nvidia-smi` takes a second and wakes the driver: not with every poll."""
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(
            stdout="NVIDIA GeForce RTX 4090, 24564, 570.86.15\nNVIDIA GeForce RTX 3090, 24268, 570.86.15\n"
        )

    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    settings = read(monkeypatch, BATON_WORKSPACE=str(tmp_path))
    for _ in range(3):
        query = settings.work_query()
    assert (query.gpus, query.gpu_model, query.vram_gib) == (2, "NVIDIA GeForce RTX 4090", 23.7)
    assert module.nvidia_driver() == "570.86.15"
    assert len(asked) == 1


@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("nvidia-smi", 20), FileNotFoundError("nvidia-smi")])
def test_a_broken_driver_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_gpus: None, error: Exception
) -> None:
    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    query = read(monkeypatch, BATON_WORKSPACE=str(tmp_path)).work_query()
    assert (query.gpus, query.gpu_model, query.vram_gib, module.nvidia_driver()) == (0, None, None, None)

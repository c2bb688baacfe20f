"""Read the agent's settings from environment variables, once, and check them at the start.

| variable | default | meaning |
|---|---|---|
| `BATON_API_URL` | required | address of the control plane |
| `BATON_API_KEY` | required without `BATON_ENROLMENT_TOKEN` | a key with the scope `worker`; the agent never passes the key to the training command |
| `BATON_ENROLMENT_TOKEN` | none | single-use token of a machine that a fleet rents; without `BATON_API_KEY` the agent exchanges the token for the key, the identity, the queues and the price of the machine |
| `BATON_QUEUE` | `default` | queue that the worker claims jobs of |
| `BATON_WORKSPACE` | `~/.cache/baton` | directory of data, outputs and staged checkpoints; several agents may share the directory |
| `BATON_ARENA_DIR` | `/dev/shm` | directory in memory for staged checkpoints; without the directory, or without room in it, checkpoints go to disk |
| `BATON_WORKER_ID` | host name | name of this worker in attempts and logs |
| `BATON_PROVIDER` | `salad` on Salad | provider of the machine |
| `BATON_MACHINE_ID` | `SALAD_MACHINE_ID`, else the host name | name of the machine; jobs avoid a machine after failures |
| `BATON_VRAM_GIB`, `BATON_GPUS`, `BATON_GPU_MODEL` | from `nvidia-smi` | resources that a job's requirements are compared with |
| `BATON_DISK_GIB` | free space of the workspace | disk space that a job's requirements are compared with |
| `BATON_IMAGE` | unknown | container image of the agent; a job may require an image |
| `BATON_PRICE_USD_PER_HOUR` | unknown | price of this machine; rules may use a job's `cost` |
| `BATON_POLL_MIN_S`, `BATON_POLL_MAX_S` | 1, 30 | pause between claims without a job; full jitter |
| `BATON_EXIT_WHEN_IDLE_S` | never | seconds without a job after which the agent exits |
| `BATON_MAX_JOBS` | no limit | number of jobs after which the agent exits |
| `BATON_TRANSFERS` | 8 | upper limit of connections in each direction; the agent adapts their number to the network |
| `BATON_MAX_UPLOAD_MBIT_S`, `BATON_MAX_DOWNLOAD_MBIT_S` | no limit | bandwidth of all transfers together |
| `BATON_STABLE_S` | 3 | seconds without a change after which a foreign script's checkpoint directory counts as complete |
| `BATON_SHUTDOWN_GRACE_S` | unknown | seconds from SIGTERM until the platform kills the container; the agent skips a last checkpoint that takes longer |
| `BATON_SPOT_NOTICES` | `auto` | `ec2`: poll the instance metadata for a preemption notice; `off`; `auto`: poll on EC2 machines only |
| `BATON_ELASTIC_PORT` | any free port; 47100 if Vast.ai or RunPod maps it | port of this machine for the peers of elastic trainings; set the port that a firewall or a NAT lets through |
| `BATON_ELASTIC_ADDRESSES` | the address that Vast.ai or RunPod maps to port 47100, else the address from which the control plane is reached | `host` or `host:port` under which peers reach this machine, comma-separated, best first |
| `BATON_STARTUP_GRACE_S` | 60 | seconds for which an idle agent reports an unreachable control plane as INFO only |
| `BATON_HEALTH_FILE` | none | file that the agent updates for `python -m gpu_client.agent.health` |
| `BATON_STATS_FILE` | none | JSON file of calls and bytes, written with every heartbeat |
| `BATON_LOG_LEVEL` | `INFO` | `DEBUG` also echoes the training's output |
| `SALAD_MACHINE_ID`, `SALAD_CONTAINER_GROUP_ID`, `SALAD_CONTAINER_GROUP_NAME`, `SALAD_ORGANIZATION_NAME`, `SALAD_PROJECT_NAME` | set by Salad | reported with every call |
"""  # noqa: E501 - a table row is one line

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import (
    AliasChoices,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from baton.contract.base import Identity, QueueName
from baton.contract.worker.calls import SaladIdentity, WorkQuery

_GIB = 2**30
_REMEDIES = {
    "api_url": "set the address of the control plane, such as https://host/stage",
    "api_key": "set a key with the scope worker: baton keys create NAME --scope worker",
}
_PROBLEM_TEXTS = {
    ("api_url", "missing"): "is not set",
    ("api_url", "string_pattern_mismatch"): "is no HTTP address",
    ("api_key", "too_short"): "is too short",
}
_GPU = re.compile(r"(.+), *(\d+), *(\d+(?:\.\d+)*)")


class AgentSettings(BaseSettings):
    """Settings of the agent; the table at the top of this module describes each field."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_", env_ignore_empty=True, frozen=True, extra="ignore", populate_by_name=True
    )

    api_url: Annotated[str, Field(pattern=r"^https?://[^\s]+$")]
    enrolment_token: Annotated[SecretStr, Field(min_length=8)] | None = None
    api_key: Annotated[SecretStr | None, Field(min_length=8, validate_default=True)] = None
    queue: QueueName = "default"
    workspace: Path = Path("~/.cache/baton")
    arena_dir: Path = Path("/dev/shm")  # noqa: S108 - a private directory is made in it
    worker_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")] = platform.node() or "worker"
    provider: Identity | None = None
    machine_id: Annotated[
        Identity | None, Field(validation_alias=AliasChoices("BATON_MACHINE_ID", "SALAD_MACHINE_ID", "machine_id"))
    ] = None
    vram_gib: Annotated[float, Field(ge=0, le=4096)] | None = None
    gpus: Annotated[int, Field(ge=0, le=64)] | None = None
    gpu_model: Annotated[str, Field(max_length=64)] | None = None
    disk_gib: Annotated[float, Field(ge=0, le=10**6)] | None = None
    image: Annotated[str, Field(max_length=256, pattern=r"^[\x21-\x7e]+$")] | None = None
    price_usd_per_hour: Annotated[float, Field(ge=0, le=10**6, allow_inf_nan=False)] | None = None
    poll_min_s: Annotated[float, Field(gt=0, le=86_400)] = 1.0
    poll_max_s: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    exit_when_idle_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    max_jobs: Annotated[int, Field(ge=1)] | None = None
    transfers: Annotated[int, Field(ge=1, le=64)] = 8
    max_upload_mbit_s: Annotated[float, Field(ge=0.1, le=10**6)] | None = None
    max_download_mbit_s: Annotated[float, Field(ge=0.1, le=10**6)] | None = None
    stable_s: Annotated[float, Field(gt=0, le=86_400)] = 3.0
    shutdown_grace_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    spot_notices: Literal["auto", "ec2", "off"] = "auto"
    elastic_port: Annotated[int, Field(ge=0, le=65535)] = 0
    elastic_addresses: Annotated[str, Field(max_length=1024, pattern=r"^[A-Za-z0-9.\-\[\]:, ]*$")] = ""
    startup_grace_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    health_file: Path | None = None
    stats_file: Path | None = None
    log_level: Annotated[str, Field(pattern=r"^(DEBUG|INFO|WARNING|ERROR)$")] = "INFO"
    salad_container_group_id: Annotated[Identity | None, Field(validation_alias="SALAD_CONTAINER_GROUP_ID")] = None
    salad_container_group_name: Annotated[Identity | None, Field(validation_alias="SALAD_CONTAINER_GROUP_NAME")] = None
    salad_organization_name: Annotated[Identity | None, Field(validation_alias="SALAD_ORGANIZATION_NAME")] = None
    salad_project_name: Annotated[Identity | None, Field(validation_alias="SALAD_PROJECT_NAME")] = None

    @field_validator("api_key")
    @classmethod
    def _has_a_key(cls, api_key: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if api_key is None and info.data.get("enrolment_token", "invalid") is None:
            raise ValueError("is not set")
        return api_key

    @field_validator("workspace")
    @classmethod
    def _expanded(cls, workspace: Path) -> Path:
        try:
            return workspace.expanduser().absolute()
        except RuntimeError as error:
            raise ValueError(f"'~' has no meaning here ({error}): name a directory") from error

    @model_validator(mode="after")
    def _poll_range(self) -> Self:
        if self.poll_min_s > self.poll_max_s:
            raise ValueError("BATON_POLL_MIN_S must not be larger than BATON_POLL_MAX_S")
        return self

    @property
    def key(self) -> str:
        """Return the API key, or the enrolment token until the machine has a key."""
        found = self.api_key or self.enrolment_token
        return found.get_secret_value() if found else ""

    def identity(self) -> SaladIdentity:
        """Return the worker's identity on Salad, as every call reports it."""
        return SaladIdentity(
            organization_name=self.salad_organization_name,
            project_name=self.salad_project_name,
            container_group_name=self.salad_container_group_name,
            container_group_id=self.salad_container_group_id,
            machine_id=self.machine_id or platform.node() or None,
        )

    def work_query(self, queue: str | None = None) -> WorkQuery:
        """Return the worker's resources for a claim of `queue`; None for the queue of the settings.

        Without a variable, `nvidia-smi` describes the GPUs.
        """
        found = _query_nvidia_gpus() if self.gpus is None or self.vram_gib is None else []
        free_bytes = shutil.disk_usage(_find_existing_parent(self.workspace)).free
        on_salad = self.salad_container_group_id is not None
        return WorkQuery(
            **self.identity().model_dump(),
            queue=queue or self.queue,
            provider=self.provider or ("salad" if on_salad else None),
            worker_id=self.worker_id,
            vram_gib=self.vram_gib if self.vram_gib is not None else min((gpu.gib for gpu in found), default=None),
            gpus=self.gpus if self.gpus is not None else len(found),
            gpu_model=self.gpu_model or (found[0].name if found else None),
            image=self.image,
            price_usd_per_hour=self.price_usd_per_hour,
            runs_plans=True,
            runs_nodes=True,
            disk_gib=self.disk_gib if self.disk_gib is not None else round(free_bytes / _GIB, 1),
        )


def variable_name(field: str) -> str:
    """Return the environment variable that sets a field of AgentSettings."""
    alias = AgentSettings.model_fields[field].validation_alias
    if isinstance(alias, AliasChoices):
        return str(alias.choices[0])
    return alias if isinstance(alias, str) else f"BATON_{field.upper()}"


def bytes_per_s(mbit_s: float | None) -> float | None:
    """Convert Mbit/s to bytes/s."""
    return None if mbit_s is None else mbit_s * 1e6 / 8


def describe_problems(error: ValidationError) -> list[str]:
    """Return one line for each bad variable. The lines contain no values, because one value is the API key."""
    lines = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        place = str(problem["loc"][0]) if problem["loc"] else ""
        text = _PROBLEM_TEXTS.get((place, problem["type"])) or problem["msg"].removeprefix("Value error, ")
        text = f"{text}; {_REMEDIES[place]}" if place in _REMEDIES else text
        variable = variable_name(place) if place in AgentSettings.model_fields else place
        lines.append(f"{variable}: {text}" if variable else text)
    return lines


def nvidia_driver() -> str | None:
    """Return the version of the NVIDIA driver; None without a driver that answers."""
    return next((gpu.driver for gpu in _query_nvidia_gpus()), None)


class NvidiaGpu(NamedTuple):
    """GPU as `nvidia-smi` describes it."""

    name: str
    gib: float
    driver: str


@cache
def _query_nvidia_gpus() -> list[NvidiaGpu]:
    """Return the GPUs that `nvidia-smi` lists; [] if the program is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return []
    found = [_GPU.fullmatch(line) for line in output.splitlines()]
    return [NvidiaGpu(one[1].strip()[:64], round(int(one[2]) / 1024, 1), one[3]) for one in found if one]


def _find_existing_parent(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path

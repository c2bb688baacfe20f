"""Build the environment and the arguments of the training command."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.contract.jobs.command_variables import substituted, substituted_arguments
from baton.contract.names import RING_TOKEN_VARIABLE, ring_token
from baton.contract.worker.calls import WorkItem
from gpu_client.agent.app.own_machine import OWN_MACHINE_APIS
from gpu_client.agent.workspace.slots import JobDirectories

_OWN_MACHINE_KEYS = frozenset(one.key for one in OWN_MACHINE_APIS)


def build_environment(
    item: WorkItem,
    directories: JobDirectories,
    channel: str,
    resume_from: str,
    base: Mapping[str, str] = os.environ,
    *,
    step_variables: Mapping[str, str] | None = None,
    use_arena: bool = True,
    api_url: str = "",
    world: str = "",
) -> dict[str, str]:
    """Merge the agent's environment, `step_variables`, the job's variables and the BATON_ variables.

    The result omits the agent's settings and secrets, among them the provider's key to the machine. A job that names
    rings also gets `api_url` and a token for exactly these rings. `world`: BATON_WORLD of a node of an elastic
    training. The agent's interpreter comes first in PATH, so that `python` in a command finds Baton's packages.
    """
    inherited = {
        name: value for name, value in base.items() if not name.startswith("BATON_") and name not in _OWN_MACHINE_KEYS
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)])
    ours = {
        "BATON_JOB_ID": item.id,
        "BATON_EPOCH": str(item.epoch),
        "BATON_RECIPE": item.recipe or "",
        "BATON_DATA_DIR": str(directories.data),
        "BATON_OUTPUT_DIR": str(directories.output),
        "BATON_RESUME_FROM": resume_from,
        "BATON_PARAMS": str(directories.params),
        "BATON_CONTROL": str(directories.control) if channel else "",
        "BATON_CHANNEL": channel,
        "BATON_ARENA": str(directories.arena or "") if use_arena else "",
    }
    if item.rings and api_url:
        ours |= {"BATON_API_URL": api_url, RING_TOKEN_VARIABLE: ring_token(item.id, item.lease_token)}
    if world:
        ours["BATON_WORLD"] = world
    shown = _without_secrets(ours)
    filled = {name: substituted(value, shown) for name, value in (step_variables or {}).items()}
    return {
        **inherited,
        "PATH": path,
        "PYTHONUNBUFFERED": "1",
        "WANDB_RUN_ID": item.id,
        "WANDB_RESUME": "allow",
        **filled,
        **item.environment,
        **ours,
    }


def expand_command(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Replace the `BATON_` variables in a command (`baton.contract.jobs.command_variables`).

    The function does not replace the ring token, because every user of a machine can read arguments.
    """
    return substituted_arguments(command, _without_secrets(environment))


def _without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != RING_TOKEN_VARIABLE}

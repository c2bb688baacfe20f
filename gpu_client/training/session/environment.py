"""Read and check the agent's environment variables for a training process (BATON_*)."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.contract.rules.document.loader import load
from baton.contract.rules.document.rule_placement import split
from gpu_client.training.checkpoint import checkpoint_directory
from gpu_client.training.errors import CheckpointMismatchError, SessionError

log = logging.getLogger("baton.rules")


def read_output_dir(environment: Mapping[str, str], given: str | Path | None) -> Path:
    """Return BATON_OUTPUT_DIR, else the script's choice."""
    output = environment.get("BATON_OUTPUT_DIR") or given
    if output is None:
        raise SessionError("no output directory is known", "Pass Session.start(output_dir=...) or set BATON_OUTPUT_DIR")
    return Path(output).absolute()


def read_data_dir(environment: Mapping[str, str], given: str | Path | None) -> Path | None:
    """Return BATON_DATA_DIR, else the script's choice, else None."""
    data = environment.get("BATON_DATA_DIR") or given
    return None if data is None else Path(data).absolute()


def read_params(environment: Mapping[str, str], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Read the JSON object in the file BATON_PARAMS, else the script's parameters."""
    path = environment.get("BATON_PARAMS")
    if not path:
        return dict(given or {})
    try:
        params = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SessionError(f"BATON_PARAMS cannot be read ({error})", "Name a JSON file with the parameters") from error
    if not isinstance(params, dict):
        raise SessionError(f"BATON_PARAMS holds a JSON {type(params).__name__}", "Name a file with one JSON object")
    return params


def read_control(environment: Mapping[str, str], rules: str | Path | None) -> dict[str, Any]:
    """Read BATON_CONTROL: rules, commands, rollbacks (baton.contract.worker.control.Control); else the script's rules.

    Raises SessionError for an unreadable file or faulty rules.
    """
    path = environment.get("BATON_CONTROL")
    if path:
        try:
            control = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SessionError(f"BATON_CONTROL cannot be read ({error})", "The agent writes that file") from error
        if not isinstance(control, dict):
            raise SessionError(f"BATON_CONTROL holds a JSON {type(control).__name__}", "The agent writes that file")
        return dict(control)
    if rules is None:
        return {}
    try:
        text = Path(rules).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SessionError(f"the rules in {rules} cannot be read ({error})", "Name a file of rules") from error
    found, faults, _ = load(text)
    if faults:
        listed = "; ".join(f"line {one.line}: {one.field}: {one.reason}" for one in faults[:5])
        raise SessionError(f"the rules in {rules} cannot be used: {listed}", faults[0].remedy)
    elsewhere = [rule.name for rule in split(found).control_plane.rules] if found else []
    if elsewhere:
        log.warning("not evaluated: %s; only a control plane can, and this run has none", ", ".join(elsewhere))
    return {"rules": {"revision": 1, "text": text}}


def read_epoch(environment: Mapping[str, str]) -> int:
    """Read BATON_EPOCH; 0 without Baton."""
    text = environment.get("BATON_EPOCH") or "0"
    try:
        return int(text)
    except ValueError as error:
        raise SessionError(f"BATON_EPOCH is {text!r}", "Pass a whole number, as the agent does") from error


def find_resume(environment: Mapping[str, str], output: Path, resume: bool) -> Path | None:
    """Find the checkpoint to resume: the agent's; without Baton the newest complete checkpoint, if `resume`.

    Raises SessionError if a fresh run would mix its checkpoints with an earlier run's.
    """
    named = environment.get("BATON_RESUME_FROM")
    if named:
        directory = Path(named).absolute()
        if not directory.is_dir():
            raise CheckpointMismatchError(
                f"BATON_RESUME_FROM names {directory}, which is not a directory", "Unset it to start afresh"
            )
        return directory
    if environment.get("BATON_JOB_ID"):
        return None
    existing = checkpoint_directory.list_checkpoints(output)
    if existing and not resume:
        raise SessionError(
            f"{output} already holds {existing[-1][1].name} of an earlier run",
            "Pass Session.start(resume=True) to continue it, or choose an empty output directory",
        )
    return existing[-1][1] if existing else None


def read_arena(environment: Mapping[str, str]) -> Path | None:
    """Read BATON_ARENA, the agent's shared memory for staging checkpoints; None without shared memory."""
    named = environment.get("BATON_ARENA")
    return Path(named) if named else None


def is_node(environment: Mapping[str, str]) -> bool:
    """Return True in a node of an elastic job."""
    return bool(environment.get("BATON_WORLD"))

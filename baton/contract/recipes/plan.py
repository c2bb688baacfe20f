"""The plan of a job: the rendered recipe, as programs with arguments in order. Workers run plans without recipes."""

from __future__ import annotations

from typing import Literal

from baton.contract.base import AnswerModel


class OutputCheck(AnswerModel):
    """File that must be in the output directory. Example: `{"path": "model.safetensors", "min_bytes": 1024}`"""

    path: str
    min_bytes: int = 0
    min_files: int = 0
    format: str | None = None
    """Format of a recipe's `Output`; a worker does not check an unknown format."""


class SharedFile(AnswerModel):
    """An output that later jobs with the same key are given. Example: `{"path": "words.bin", "key": "6a0f..."}`"""

    path: str
    key: str


class CommandOrder(AnswerModel):
    """Program to run. `$BATON_...` and `${BATON_...}` are replaced in the arguments and in the environment.

    Example: `{"command": ["nvidia-smi"], "timeout_s": 20}`
    """

    command: list[str]
    environment: dict[str, str] = {}
    timeout_s: int | None = None


class StepOrder(CommandOrder):
    """Step of a recipe. Example: `{"name": "train", "command": ["python", "train.py"], "retries": 1}`"""

    name: str
    retries: int = 0
    retry_wait_s: int = 10
    outputs: list[OutputCheck] = []
    optional_outputs: list[OutputCheck] = []
    """Outputs that the worker checks only if they exist. Workers that do not know this field ignore them."""
    keeps: list[str] | None = None
    checkpoints: Literal["directories", "session", "none"] = "directories"


class RunPlan(AnswerModel):
    """All of a job's steps. Example: `{"steps": [{"name": "train", "command": ["python", "train.py"]}]}`"""

    steps: list[StepOrder]
    outputs: list[OutputCheck] = []
    optional_outputs: list[OutputCheck] = []
    """Outputs that the worker checks and uploads only if they exist."""
    check: CommandOrder | None = None
    cleanup: list[CommandOrder] = []
    shared: list[SharedFile] = []
    """Shared files, which the worker uploads if they exist."""

    @property
    def needs_plan(self) -> bool:
        """Return True if the job's `command` alone does not describe the whole plan."""
        environments = [value for step in self.steps for value in step.environment.values()]
        return (
            len(self.steps) > 1
            or self.check is not None
            or bool(self.cleanup)
            or any("$BATON_" in value or "${BATON_" in value for value in environments)
        )

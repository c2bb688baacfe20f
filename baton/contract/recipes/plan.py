"""What a recipe has become for one job: programs with their arguments, in order. Workers need no recipe to run it."""

from __future__ import annotations

from typing import Literal

from baton.contract.base import AnswerModel


class OutputCheck(AnswerModel):
    """What must be in the output directory. Example: `{"path": "model.safetensors", "min_bytes": 1024}`"""

    path: str
    min_bytes: int = 0
    min_files: int = 0
    format: str | None = None
    """See recipes' `Output`; a worker passes over a format that it does not know."""


class SharedFile(AnswerModel):
    """An output that later jobs with the same key are given. Example: `{"path": "words.bin", "key": "6a0f..."}`"""

    path: str
    key: str


class CommandOrder(AnswerModel):
    """One program to run. `$BATON_...` and `${BATON_...}` are replaced in the arguments and in the environment.

    Example: `{"command": ["nvidia-smi"], "timeout_s": 20}`
    """

    command: list[str]
    environment: dict[str, str] = {}
    timeout_s: int | None = None


class StepOrder(CommandOrder):
    """One step. Example: `{"name": "train", "command": ["python", "train.py"], "retries": 1}`"""

    name: str
    retries: int = 0
    retry_wait_s: int = 10
    outputs: list[OutputCheck] = []
    optional_outputs: list[OutputCheck] = []
    """Looked at where they are there. A list of its own: workers that do not know it need not find them."""
    keeps: list[str] | None = None
    checkpoints: Literal["directories", "session", "none"] = "directories"


class RunPlan(AnswerModel):
    """All of a job's steps. Example: `{"steps": [{"name": "train", "command": ["python", "train.py"]}]}`"""

    steps: list[StepOrder]
    outputs: list[OutputCheck] = []
    optional_outputs: list[OutputCheck] = []
    """Uploaded where they are there; see StepOrder."""
    check: CommandOrder | None = None
    cleanup: list[CommandOrder] = []
    shared: list[SharedFile] = []
    """To be uploaded too, where they are there."""

    @property
    def needs_plan(self) -> bool:
        """True if a worker that runs nothing but the job's command would do something else."""
        environments = [value for step in self.steps for value in step.environment.values()]
        return (
            len(self.steps) > 1
            or self.check is not None
            or bool(self.cleanup)
            or any("$BATON_" in value or "${BATON_" in value for value in environments)
        )

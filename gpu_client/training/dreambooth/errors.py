"""Define the errors of a Dreambooth job before its training."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_client.training.errors import SessionError


class DreamboothError(SessionError):
    """Error of a job that cannot be trained as submitted, raised before the training."""


class ConfigError(DreamboothError):
    """Error of a wrong configuration. `problems` lists every fault as "field: reason"."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("the configuration is wrong: " + "; ".join(problems), "Correct it and submit the job again")
        self.problems = list(problems)


class DataError(DreamboothError):
    """Error of missing or unusable images, captions or masks."""


class ModelError(DreamboothError):
    """Error of a missing base model or VAE, or of a kind that this script does not train."""


class HubError(SessionError):
    """Error of an unreachable hub. The job is correct, and another attempt may succeed."""

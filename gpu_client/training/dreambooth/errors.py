"""Faults of a Dreambooth job that are found before training."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_client.training.errors import SessionError


class DreamboothError(SessionError):
    """The job cannot be trained as submitted; nothing has been trained yet."""


class ConfigError(DreamboothError):
    """The configuration is wrong. `problems` lists every fault as "field: reason"."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("the configuration is wrong: " + "; ".join(problems), "Correct it and submit the job again")
        self.problems = list(problems)


class DataError(DreamboothError):
    """The images, captions or masks are missing or unusable."""


class ModelError(DreamboothError):
    """The base model or VAE is missing or of a kind that this script does not train."""


class HubError(SessionError):
    """The hub with the base model is unreachable; the job is correct, and another attempt may succeed."""

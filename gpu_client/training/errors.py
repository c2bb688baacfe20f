"""Errors of the training session. Every message names the problem and the remedy."""

from __future__ import annotations


class SessionError(Exception):
    """The session cannot fulfill a call; `remedy` names a correct call."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}. {remedy}")
        self.problem = problem
        self.remedy = remedy


class CheckpointDamagedError(SessionError):
    """A checkpoint directory is incomplete, altered or unreadable. Training never silently starts from 0."""


class CheckpointMismatchError(SessionError):
    """The checkpoint is sound but belongs to another script, model, data set or setting."""


class CheckpointWriteError(SessionError):
    """A checkpoint could not be written; nothing of it remains, and older checkpoints are untouched."""

"""Errors of the training session. Every message says what is wrong and what to do about it."""

from __future__ import annotations


class SessionError(Exception):
    """The session cannot do what was asked; `remedy` says what would be right."""

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

"""Define the errors of the training session. Every message names the problem and the remedy."""

from __future__ import annotations


class SessionError(Exception):
    """Error of a call that the session cannot fulfill; `remedy` names a correct call."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}. {remedy}")
        self.problem = problem
        self.remedy = remedy


class CheckpointDamagedError(SessionError):
    """Error of an incomplete, altered or unreadable checkpoint. A training never silently starts from step 0."""


class CheckpointMismatchError(SessionError):
    """Error of a sound checkpoint that belongs to another script, model, data set or setting."""


class CheckpointWriteError(SessionError):
    """Error of a failed write. No file of the checkpoint remains, and older checkpoints are untouched."""

"""What an error in the middle of an attempt means: a failure class and a sentence. Pure."""

from __future__ import annotations

import errno

from baton.contract.jobs import FailureClass
from gpu_client.agent.failures import Failure
from gpu_client.agent.inputs import InputsDiffer
from gpu_client.agent.workspace import DiskFullError
from gpu_client.checkpoints.errors import BadDirectory, MissingOutput, RestoreFailed
from gpu_client.transport.errors import (
    ApiError,
    BatonError,
    DiskFull,
    ObjectMissing,
    TransferError,
    UnexpectedAnswer,
    Unreachable,
    UnsafePath,
)

MAX_REASON_CHARS = 1024

# The first that fits. Whose fault it is decides which budget pays: transfers, disks and the agent itself are the
# machine's, everything that would happen anywhere is the job's.
_CLASSES: tuple[tuple[tuple[type[BaseException], ...], FailureClass], ...] = (
    ((MissingOutput, BadDirectory), FailureClass.MISSING_OUTPUT),
    ((DiskFull, DiskFullError), FailureClass.DISK_FULL),
    ((ObjectMissing, UnsafePath, InputsDiffer), FailureClass.BAD_INPUT),
    ((RestoreFailed,), FailureClass.RESTORE_FAILED),
    ((TransferError, Unreachable, UnexpectedAnswer), FailureClass.TRANSFER_FAILED),
    ((ApiError,), FailureClass.BAD_INPUT),
)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def failure_of(error: Exception) -> Failure:
    """The failure that `error`, raised between claim and report, stands for."""
    if isinstance(error, ApiError) and error.foreign:
        return Failure(FailureClass.TRANSFER_FAILED, f"not the control plane's answer: {error}"[:MAX_REASON_CHARS])
    for kinds, failure_class in _CLASSES:
        if isinstance(error, kinds):
            return Failure(failure_class, str(error)[:MAX_REASON_CHARS])
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return Failure(FailureClass.DISK_FULL, str(error)[:MAX_REASON_CHARS])
    return Failure(FailureClass.NODE_FAULT, f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS])


def expected(error: Exception) -> bool:
    """True for what is part of life out there; anything else deserves a traceback in the agent's log."""
    return isinstance(error, BatonError | DiskFullError | OSError)


def start_failure(error: OSError | ValueError) -> Failure:
    """Why a command could not even be handed to the machine."""
    if isinstance(error, ValueError) or error.errno == errno.E2BIG:
        return Failure(FailureClass.COMMAND_NOT_FOUND, f"the command could not be started: {error}")
    return failure_of(error)

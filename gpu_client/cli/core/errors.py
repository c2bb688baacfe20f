"""How the command line fails: exit codes, and one line for every error, or for each thing that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import typer.exceptions

from baton.contract.errors import ErrorCode, Fault
from gpu_client.transport.errors import (
    ApiError,
    BatonError,
    DiskFull,
    FalseDigest,
    TransferCanceled,
    UnexpectedAnswer,
    Unreachable,
    UnsafePath,
)


class ExitCode(IntEnum):
    """What a shell script can branch on; README.md says the same."""

    OK = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    UNREACHABLE = 4
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141
    """Whoever read our output went away (`| head`): 128 + SIGPIPE, as other programs end."""


class CliError(Exception):
    """Something that the command line itself has to say: what is wrong, and what to do.

    `problems`: each of several things that are wrong; the message says how many there are.
    """

    def __init__(
        self, message: str, remedy: str = "", *, problems: Sequence[str] = (), exit_code: ExitCode = ExitCode.USAGE
    ) -> None:
        self.exit_code = exit_code
        self.problems = list(problems)
        super().__init__(f"{message.removesuffix('.')}. {remedy}".strip() if remedy else message)


_NEW_KEY = "Ask an admin for a new one (baton keys create) and store it with: baton login"
_FOR_USERS = {
    ErrorCode.UNAUTHORIZED: "Store one with: baton login",
    ErrorCode.KEY_UNKNOWN: f"Is it the key of this address? {_NEW_KEY}",
    ErrorCode.KEY_REVOKED: _NEW_KEY,
    ErrorCode.KEY_EXPIRED: _NEW_KEY,
    ErrorCode.WRONG_SCOPE: "Use a profile whose key has it (baton --profile NAME ...), or ask an admin for one.",
    ErrorCode.JOB_CANCELED: "To run it again: baton retry ID",
    ErrorCode.JOB_FINISHED: "To run it again: baton retry ID",
    ErrorCode.JOB_NOT_FOUND: "Check the id with: baton jobs. Jobs of other tenants are not visible.",
    ErrorCode.CHECKPOINT_NOT_FOUND: "See which it has with: baton show ID",
    ErrorCode.KEY_NOT_FOUND: "See which there are with: baton keys list",
    ErrorCode.WEBHOOK_NOT_FOUND: "See which there are with: baton webhooks list",
    ErrorCode.UNKNOWN_RECIPE: "See: baton recipes list",
    ErrorCode.RECIPE_NOT_FOUND: "See: baton recipes list",
    ErrorCode.INVALID_RECIPE: "All of it: baton recipes lint FILE",
    ErrorCode.ILLEGAL_TRANSITION: "See where it stands with: baton explain ID",
    ErrorCode.NOT_FOUND: "Is the address right, with its stage? See: baton doctor",
}
"""Remedies in the words of this program, where the API's own are written for other programs."""


def describe(error: BaseException) -> tuple[ExitCode, str]:
    """The exit code and the line for an error; "" if all was said. Anything unknown is a defect, and is called one.

    `problems_of` has what else is to be said.
    """
    if isinstance(error, CliError):
        return error.exit_code, str(error)
    if isinstance(error, typer.exceptions.TyperException):
        said = getattr(error, "format_message", None)
        message = said() if said else str(error)
        # without a message it was help that was shown
        return ExitCode.USAGE, f"{message} (--help shows what is allowed)" if message else ""
    if isinstance(error, (KeyboardInterrupt, TransferCanceled, typer.Abort)):
        return ExitCode.INTERRUPTED, "interrupted"
    if isinstance(error, BatonError):
        return _of_the_network(error)
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return ExitCode.FAILED, f"{place}{error.strerror or error}"
    return ExitCode.FAILED, f"a defect of this program ({type(error).__name__}: {error}). BATON_DEBUG=1 shows where."


def problems_of(error: BaseException) -> list[str]:
    """What stands below the line of `describe`: a line for each thing that is wrong, where there are several."""
    if isinstance(error, CliError):
        return error.problems
    if isinstance(error, ApiError) and not error.foreign and len(error.problems) > 1:
        return [_problem(fault) for fault in error.problems]
    return []


def _problem(fault: Fault) -> str:
    place = f"line {fault.line}, column {fault.column}: " if fault.line is not None else ""
    field = f"{fault.field}: " if fault.field else ""
    return f"{place}{field}{fault.reason}. {fault.remedy}".strip()


def _of_the_network(error: BatonError) -> tuple[ExitCode, str]:
    if isinstance(error, ApiError):
        return ExitCode.REFUSED, _refusal(error)
    if isinstance(error, Unreachable):
        return ExitCode.UNREACHABLE, f"{error}. Check address and network (baton doctor), then repeat the command."
    if isinstance(error, UnexpectedAnswer):
        return (
            ExitCode.UNREACHABLE,
            f"{error}. Is the address right, and this program as new as the API? (baton doctor)",
        )
    if isinstance(error, DiskFull):
        return ExitCode.FAILED, f"{error}. Make room, then repeat the command: it goes on where it stopped."
    if isinstance(error, FalseDigest):
        return ExitCode.FAILED, (
            f"{error.code}: {error}. The file is stored as it was uploaded, but its worker declared the digest of "
            "other bytes: it was not kept. The other files are here; for this one run the job again: baton retry ID"
        )
    if isinstance(error, UnsafePath) or isinstance(error.__cause__, OSError):
        return ExitCode.FAILED, f"{error}. Put that right, then repeat the command: what is done stays done."
    return ExitCode.FAILED, f"{error}. What is done stays done; repeat the command for the rest."


def _refusal(error: ApiError) -> str:
    if error.foreign:
        return (
            f"{error.code}: {error.message}. This answer is not Baton's: "
            "is the address right, and no proxy in the way? (baton doctor)"
        )
    message = error.message
    if error.code in _FOR_USERS:
        code = ErrorCode(error.code)
        message = f"{message.removesuffix(code.remedy).strip()} {_FOR_USERS[code]}"
    if len(error.problems) > 1:
        return f"{error.code}: {len(error.problems)} things are wrong"
    if error.problems and error.code == ErrorCode.INVALID_VALUE:
        return f"{error.code}: {_problem(error.problems[0])}"
    field = f" (field {error.field})" if error.field else ""
    reference = f" [request {error.request_id}]" if error.code == ErrorCode.INTERNAL and error.request_id else ""
    return f"{error.code}: {message}{field}{reference}"

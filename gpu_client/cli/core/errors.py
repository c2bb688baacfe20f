"""Map errors to the exit codes and error lines of the command line."""

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
    """Exit codes for shell scripts; README.md documents them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    UNREACHABLE = 4
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141
    """Exit code after the reader closed the pipe (`| head`): by convention 128 + SIGPIPE."""


class CliError(Exception):
    """Error of the command line itself, with a remedy.

    `problems`: one line for each of several problems; the message states their number.
    """

    def __init__(
        self, message: str, remedy: str = "", *, problems: Sequence[str] = (), exit_code: ExitCode = ExitCode.USAGE
    ) -> None:
        self.exit_code = exit_code
        self.problems = list(problems)
        super().__init__(f"{message.removesuffix('.')}. {remedy}".strip() if remedy else message)


_NEW_KEY = "Ask an admin for a new key (baton keys create) and store the key with: baton login"
_FOR_USERS = {
    ErrorCode.UNAUTHORIZED: "Store a key with: baton login",
    ErrorCode.KEY_UNKNOWN: f"Check that the key belongs to this address. {_NEW_KEY}",
    ErrorCode.KEY_REVOKED: _NEW_KEY,
    ErrorCode.KEY_EXPIRED: _NEW_KEY,
    ErrorCode.WRONG_SCOPE: "Use a profile whose key has the scope (baton --profile NAME), or ask for such a key.",
    ErrorCode.JOB_CANCELED: "To run it again: baton retry ID",
    ErrorCode.JOB_FINISHED: "To run it again: baton retry ID",
    ErrorCode.JOB_NOT_FOUND: "Check the id with: baton jobs. Jobs of other tenants are not visible.",
    ErrorCode.CHECKPOINT_NOT_FOUND: "List the checkpoints of the job with: baton show ID",
    ErrorCode.KEY_NOT_FOUND: "List the keys with: baton keys list",
    ErrorCode.WEBHOOK_NOT_FOUND: "List the webhooks with: baton webhooks list",
    ErrorCode.UNKNOWN_RECIPE: "List the recipes with: baton recipes list",
    ErrorCode.RECIPE_NOT_FOUND: "List the recipes with: baton recipes list",
    ErrorCode.INVALID_RECIPE: "List all faults with: baton recipes lint FILE",
    ErrorCode.ILLEGAL_TRANSITION: "Show the state of the job with: baton explain ID",
    ErrorCode.MACHINE_NOT_FOUND: "List the machines with: baton fleet show NAME, or baton fleet receipts NAME",
    ErrorCode.MACHINE_HAS_NO_SHELL: "Read its output with: baton fleet logs MACHINE",
    ErrorCode.PROVIDER_NOT_FOUND: "List the accounts with: baton fleet providers",
    ErrorCode.REGISTRY_NOT_FOUND: "List the logins with: baton fleet registries",
    ErrorCode.FLEET_NOT_FOUND: "List the fleets with: baton fleet ls",
    ErrorCode.NOT_FOUND: "Check the address, including its stage, with: baton doctor",
}
"""Remedies that name commands; they replace the API's remedies, which address HTTP clients."""


def describe(error: BaseException) -> tuple[ExitCode, str]:
    """Return the exit code and the line for an error; "" if the output is complete without a line.

    An unknown exception is a defect of this program, and the line says so. `problems_of` returns the further lines.
    """
    if isinstance(error, CliError):
        return error.exit_code, str(error)
    if isinstance(error, typer.exceptions.TyperException):
        format_message = getattr(error, "format_message", None)
        message = format_message() if format_message else str(error)
        # An empty message means that typer has shown the help page.
        return ExitCode.USAGE, f"{message} (see --help)" if message else ""
    if isinstance(error, (KeyboardInterrupt, TransferCanceled, typer.Abort)):
        return ExitCode.INTERRUPTED, "interrupted"
    if isinstance(error, BatonError):
        return _describe_baton_error(error)
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return ExitCode.FAILED, f"{place}{error.strerror or error}"
    return (
        ExitCode.FAILED,
        f"a defect of this program ({type(error).__name__}: {error}). Set BATON_DEBUG=1 for a traceback.",
    )


def problems_of(error: BaseException) -> list[str]:
    """Return one line for each of several problems of an error, to print below the line of `describe`."""
    if isinstance(error, CliError):
        return error.problems
    if isinstance(error, ApiError) and not error.foreign and len(error.problems) > 1:
        return [_format_problem(fault) for fault in error.problems]
    return []


def _format_problem(fault: Fault) -> str:
    place = f"line {fault.line}, column {fault.column}: " if fault.line is not None else ""
    field = f"{fault.field}: " if fault.field else ""
    return f"{place}{field}{fault.reason}. {fault.remedy}".strip()


def _describe_baton_error(error: BatonError) -> tuple[ExitCode, str]:
    if isinstance(error, ApiError):
        return ExitCode.REFUSED, _describe_refusal(error)
    if isinstance(error, Unreachable):
        return (
            ExitCode.UNREACHABLE,
            f"{error}. Check the address and the network (baton doctor), then repeat the command.",
        )
    if isinstance(error, UnexpectedAnswer):
        return (
            ExitCode.UNREACHABLE,
            f"{error}. Check the address, and the versions of this program and the API (baton doctor).",
        )
    if isinstance(error, DiskFull):
        return ExitCode.FAILED, f"{error}. Free disk space, then repeat the command; the transfer resumes."
    if isinstance(error, FalseDigest):
        return ExitCode.FAILED, (
            f"{error.code}: {error}. The worker declared the digest of other bytes than it uploaded, so the file was "
            "discarded. All other files were fetched. To produce the file again: baton retry ID"
        )
    if isinstance(error, UnsafePath) or isinstance(error.__cause__, OSError):
        return ExitCode.FAILED, f"{error}. Correct this, then repeat the command; finished work is kept."
    return ExitCode.FAILED, f"{error}. Repeat the command; finished work is kept."


def _describe_refusal(error: ApiError) -> str:
    if error.foreign:
        return (
            f"{error.code}: {error.message}. The answer does not come from Baton: "
            "check the address and any proxy (baton doctor)."
        )
    message = error.message
    if error.code in _FOR_USERS:
        code = ErrorCode(error.code)
        message = f"{message.removesuffix(code.remedy).strip()} {_FOR_USERS[code]}"
    if len(error.problems) > 1:
        return f"{error.code}: {len(error.problems)} problems"
    if error.problems and error.code == ErrorCode.INVALID_VALUE:
        return f"{error.code}: {_format_problem(error.problems[0])}"
    field = f" (field {error.field})" if error.field else ""
    reference = f" [request {error.request_id}]" if error.code == ErrorCode.INTERNAL and error.request_id else ""
    return f"{error.code}: {message}{field}{reference}"

"""Each error maps to an exit code and one line with a remedy."""

from __future__ import annotations

import pytest
import typer

from baton.contract.errors import ErrorCode, Fault
from gpu_client.cli.core.errors import CliError, ExitCode, describe, problems_of
from gpu_client.transport.errors import (
    ApiError,
    ChecksumMismatch,
    DiskFull,
    FalseDigest,
    TransferCanceled,
    TransferError,
    UnexpectedAnswer,
    Unreachable,
    UnsafePath,
    api_error_class,
)
from gpu_client.transport.net.files import local_errors


def refusal(code: str, status: int = 403, **more: object) -> ApiError:
    message = f"It is so. {ErrorCode(code).remedy}" if code in set(ErrorCode) else "It is so."
    return api_error_class(code, status)(code=code, status=status, message=message, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (CliError("wrong", "Do right."), ExitCode.USAGE, "wrong. Do right."),
        (CliError("wrong", exit_code=ExitCode.FAILED), ExitCode.FAILED, "wrong"),
        (typer.BadParameter("no number"), ExitCode.USAGE, "--help"),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, "interrupted"),
        (TransferCanceled("x"), ExitCode.INTERRUPTED, "interrupted"),
        (typer.Abort(), ExitCode.INTERRUPTED, "interrupted"),
        (Unreachable("no answer"), ExitCode.UNREACHABLE, "baton doctor"),
        (UnexpectedAnswer("what?"), ExitCode.UNREACHABLE, "baton doctor"),
        (DiskFull("no space left"), ExitCode.FAILED, "Free disk space, then repeat"),
        (UnsafePath("a is a directory already"), ExitCode.FAILED, "already. Correct this, then repeat the command"),
        (ChecksumMismatch("a.bin: other"), ExitCode.FAILED, "a.bin: other. Repeat the command; finished work is kept"),
        (
            FalseDigest("a.bin: BLAKE3 is 1"),
            ExitCode.FAILED,
            "digest_mismatch: a.bin: BLAKE3 is 1. The worker declared",
        ),
        (PermissionError(13, "Permission denied", "/x/y"), ExitCode.FAILED, "/x/y: Permission denied"),
        (RuntimeError("oops"), ExitCode.FAILED, "a defect of this program (RuntimeError: oops)"),
    ],
)
def test_lines(error: BaseException, code: ExitCode, said: str) -> None:
    found_code, line = describe(error)
    assert found_code is code
    assert said in line


def test_trouble_with_files_of_this_machine() -> None:
    try:
        with local_errors("creating a/b"):
            raise PermissionError(13, "Permission denied")
    except TransferError as error:
        line = describe(error)[1]
    assert line == "creating a/b: Permission denied. Correct this, then repeat the command; finished work is kept."


@pytest.mark.parametrize("code", [ErrorCode.KEY_UNKNOWN, ErrorCode.KEY_EXPIRED, ErrorCode.KEY_REVOKED])
def test_a_key_that_will_not_do(code: ErrorCode) -> None:
    found, line = describe(refusal(code))
    assert found is ExitCode.REFUSED
    assert line.startswith(f"{code.value}: It is so. ")
    assert "baton login" in line


@pytest.mark.parametrize("code", [code for code in ErrorCode if code.status < 500])
def test_every_refusal_has_its_code_and_one_remedy(code: ErrorCode) -> None:
    found, line = describe(refusal(code, code.status, field="steps"))
    assert found is ExitCode.REFUSED
    assert line.startswith(f"{code.value}: It is so. ")
    assert line.endswith("(field steps)")
    assert "ask for work" not in line or code.value.startswith(("lease", "job_not_running")), "that is for workers"


def test_each_of_several_things_that_are_wrong_has_a_line() -> None:
    faults = [
        Fault("parameters.a", "must be true or false", "Give true or false."),
        Fault("", "is no job"),
        Fault("steps.0.run", "is missing", "Add it.", line=3, column=5),
    ]
    error = refusal(ErrorCode.INVALID_VALUE, 422, field="parameters.a", problems=faults)
    assert describe(error) == (ExitCode.REFUSED, "invalid_value: 3 problems")
    assert problems_of(error) == [
        "parameters.a: must be true or false. Give true or false.",
        "is no job.",
        "line 3, column 5: steps.0.run: is missing. Add it.",
    ]
    one = refusal(ErrorCode.INVALID_VALUE, 422, field="parameters.a", problems=faults[:1])
    assert problems_of(one) == []
    assert describe(one)[1] == "invalid_value: parameters.a: must be true or false. Give true or false."
    assert problems_of(refusal("http_403", foreign=True, problems=faults)) == []
    assert problems_of(RuntimeError("oops")) == []
    assert problems_of(CliError("2 problems", problems=["a", "b"])) == ["a", "b"]


def test_an_answer_that_is_not_ours() -> None:
    line = describe(refusal("http_403", foreign=True))[1]
    assert "The answer does not come from Baton" in line

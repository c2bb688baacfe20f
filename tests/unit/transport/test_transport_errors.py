"""Test the error class of each answer, and the content of messages."""

from __future__ import annotations

import errno

import pytest

from baton.contract.errors import ERRORS, ErrorCode
from gpu_client.transport import errors
from gpu_client.transport.api.http import parse_error

LEASE_LOST = {"lease_lost", "job_canceled", "job_finished", "lease_required", "job_not_running"}


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_a_class_that_fits_its_meaning(code: ErrorCode) -> None:
    found = errors.api_error_class(code.value, ERRORS[code].status)
    assert issubclass(found, errors.ApiError)
    assert (found is errors.LeaseLost) == (code.value in LEASE_LOST)
    assert (found is errors.LeaseExpired) == (code is ErrorCode.LEASE_EXPIRED)
    assert (found is errors.NotStoredYet) == (code is ErrorCode.NOT_STORED_YET)
    if ERRORS[code].status == 404:
        assert found is errors.NotFound
    if ERRORS[code].status in (400, 413, 422) and code is not ErrorCode.JOB_NOT_RUNNING:
        assert found is errors.InvalidRequest


def test_our_error_body() -> None:
    body = b'{"error": {"code": "lease_lost", "message": "gone", "field": "x-lease-token", "request_id": "r-1"}}'
    error = parse_error(409, body)
    assert isinstance(error, errors.LeaseLost)
    assert (error.code, error.status, error.message, error.field, error.request_id) == (
        "lease_lost",
        409,
        "gone",
        "x-lease-token",
        "r-1",
    )
    assert str(error) == "lease_lost: gone (field x-lease-token) [request r-1]"


@pytest.mark.parametrize(
    ("status", "body", "kind", "code", "message"),
    [
        (401, b'{"message":"Unauthorized"}', errors.Unauthorized, "unauthorized", "Unauthorized"),
        (403, b'{"message":"Forbidden"}', errors.Unauthorized, "http_403", "Forbidden"),
        (404, b'{"message":"Not Found"}', errors.NotFound, "not_found", "Not Found"),
        (400, b'{"error":"Bad","message":"Job not running"}', errors.InvalidRequest, "http_400", "Job not running"),
        (413, b"", errors.InvalidRequest, "payload_too_large", "no explanation"),
        (418, b"[1]", errors.ApiError, "http_418", "[1]"),
        (403, b"\xff\xfe\x00", errors.Unauthorized, "http_403", "\ufffd\ufffd\x00"),
        (
            404,
            b"<html><head><title>Oops</title><style>b{}</style></head><body><h1>Not here</h1>\n</body>",
            errors.NotFound,
            "not_found",
            "Oops Not here",
        ),
    ],
)
def test_foreign_error_bodies(status: int, body: bytes, kind: type[errors.ApiError], code: str, message: str) -> None:
    error = parse_error(status, body)
    assert type(error) is kind
    assert (error.code, error.message) == (code, message)


def test_a_long_page_becomes_a_short_message() -> None:
    assert len(parse_error(404, b"x" * 100_000).message) == 200


def test_only_a_full_disk_is_a_full_disk() -> None:
    assert isinstance(errors.disk_full(OSError(errno.ENOSPC, "no"), "f"), errors.DiskFull)
    assert isinstance(errors.disk_full(OSError(errno.EDQUOT, "no"), "f"), errors.DiskFull)
    assert errors.disk_full(OSError(errno.EACCES, "no"), "f") is None


def test_a_presigned_url_is_shown_without_its_signature() -> None:
    assert errors.without_query("https://s3/b/k?X-Amz-Signature=abc") == "https://s3/b/k"

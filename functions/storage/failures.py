"""Convert botocore's exceptions to the storage errors of the domain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from botocore.exceptions import ClientError, ConnectionError, HTTPClientError, IncompleteReadError
from botocore.parsers import ResponseParserError

from functions.domain.errors import StorageUnavailable

RETRYABLE_CODES = frozenset(
    (
        "InternalError",
        "InternalServerError",
        "LimitExceededException",
        "ProvisionedThroughputExceeded",
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingError",
        "ThrottlingException",
        "TransactionInProgressException",
    )
)
"""Codes of transient errors, in answers and in the reasons of a canceled transaction."""


def error_code(error: ClientError) -> str:
    """Return the service's code, `ConditionalCheckFailedException`, `NoSuchKey`, ...; for HEAD the HTTP status."""
    return str(error.response.get("Error", {}).get("Code", ""))


def http_status(error: ClientError) -> int:
    """Return the HTTP status of the answer; 0 for an unknown status."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@contextmanager
def failures_translated() -> Iterator[None]:
    """Raise StorageUnavailable instead of a transient error: no connection, timeout, throttling, 5xx.

    Other errors (missing permission, unknown table, invalid request) are faults of Baton or its deployment and pass
    unchanged.
    """
    try:
        yield
    except ClientError as error:
        if error_code(error) in RETRYABLE_CODES or http_status(error) >= 500 or http_status(error) == 429:
            raise StorageUnavailable(f"{error.operation_name}: {error_code(error) or http_status(error)}") from error
        raise
    except (ConnectionError, HTTPClientError, IncompleteReadError, ResponseParserError) as error:
        raise StorageUnavailable(str(error)) from error

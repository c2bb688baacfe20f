"""Define the exceptions of calls to the control plane and of transfers.

    BatonError
    ├── ApiError                  the control plane refused; an unchanged retry fails again
    │   ├── Unauthorized          the API key is unknown, revoked, expired or lacks the scope
    │   ├── TokenRefused          a one-time transfer token is used up, expired or for another object: request a new one
    │   ├── InvalidRequest        a malformed request or a value out of bounds; `field` names the place
    │   ├── NotFound              a missing job, checkpoint, object or route
    │   ├── LeaseLost             the attempt may no longer write: stop the trainer, claim again
    │   ├── LeaseExpired          renew the lease with a heartbeat, then repeat
    │   ├── NotStoredYet          a declared object is not stored: upload it, then repeat
    │   ├── DigestMismatch        a stored object has other bytes than declared
    │   ├── StepNotNewer          this step or a later step is already committed
    │   ├── RollbackRefused       the rollback budget is spent, or retention has deleted the checkpoint
    │   └── Conflict              any other conflict with the state of the job
    ├── Unreachable               no usable answer after all retries: connection, timeout, 429, 5xx
    ├── UnexpectedAnswer          an answer that does not match the models of this version
    ├── TransferError             the transfer of one object failed for good
    │   ├── ObjectMissing         404: the object is not in the store
    │   ├── ChecksumMismatch      the bytes differ from the declaration, also after a second transfer
    │   │   └── FalseDigest       the stored bytes arrived intact, and the declared BLAKE3 is false
    │   ├── UrlExpired            the presigned URL has expired: request a new one
    │   ├── FileChanged           a local file changed during the transfer
    │   └── UnsafePath            a destination would lie outside its directory
    ├── DiskFull                  no space (or quota) left on this machine
    └── TransferCanceled          the caller's cancel event was set

Messages never contain the API key, a token, or the query of a presigned URL.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from urllib.parse import urlsplit

from baton.contract.errors import ErrorCode, Fault

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


class BatonError(Exception):
    """Base class of the transport's exceptions."""


class ApiError(BatonError):
    """Refusal of a call. `code` is an `ErrorCode` of `baton.contract`, or `http_<status>` for other bodies.

    `after_retry` is true if an earlier try of the call got no answer, which the server may have executed. `foreign` is
    true if a proxy, a firewall or a gateway refused instead of the API; a retry after such a refusal may succeed.
    `problems`: all faults of the request, if the answer lists several.
    """

    def __init__(
        self,
        *,
        code: str,
        status: int,
        message: str,
        field: str | None = None,
        request_id: str = "",
        after_retry: bool = False,
        foreign: bool = False,
        problems: Sequence[Fault] = (),
    ) -> None:
        self.problems = tuple(problems)
        self.code = code
        self.status = status
        self.message = message
        self.field = field
        self.request_id = request_id
        self.after_retry = after_retry
        self.foreign = foreign
        place = f" (field {field})" if field else ""
        reference = f" [request {request_id}]" if request_id else ""
        super().__init__(f"{code}: {message}{place}{reference}")


class Unauthorized(ApiError):  # noqa: N818 - named after what the caller branches on
    """Error of an API key that does not permit the call."""


class TokenRefused(ApiError):  # noqa: N818
    """Error of a one-time transfer token that is used up, expired or for another object."""


class InvalidRequest(ApiError):  # noqa: N818
    """Error of a malformed request, or of a value out of bounds."""


class NotFound(ApiError):  # noqa: N818
    """Error of a job, object or route that does not exist or belongs to another tenant."""


class LeaseLost(ApiError):  # noqa: N818
    """Error of an attempt that may no longer write: reassigned, canceled, finished, or without a lease."""


class LeaseExpired(ApiError):  # noqa: N818
    """Error of an expired lease that a heartbeat may still renew."""


class NotStoredYet(ApiError):  # noqa: N818
    """Error of a declared object that the store lacks."""


class RollbackRefused(ApiError):  # noqa: N818
    """Error of a refused rollback: the rule's budget is spent, or retention has deleted the checkpoint."""


class DigestMismatch(ApiError):  # noqa: N818
    """Error of a stored object whose size or checksum differs from the declaration."""


class StepNotNewer(ApiError):  # noqa: N818
    """Error of a commit whose step is not above the newest committed step."""


class Conflict(ApiError):  # noqa: N818
    """Error of another conflict between the call and the job's state."""


class Unreachable(BatonError):  # noqa: N818
    """Error of a call without a usable answer within its tries and time."""


class UnexpectedAnswer(BatonError):  # noqa: N818
    """Error of a well-formed answer that does not match the models of this version."""


class TransferError(BatonError):
    """Error of a failed transfer that an unchanged retry would not repair."""


class ObjectMissing(TransferError):  # noqa: N818
    """Error of a missing object."""


class ChecksumMismatch(TransferError):  # noqa: N818
    """Error of bytes that differ from the declaration."""


class FalseDigest(ChecksumMismatch):
    """Error of a false declared BLAKE3: the bytes have the declared size and CRC-64/NVME but another BLAKE3.

    Another fetch of the bytes does not help.
    """

    code = ErrorCode.DIGEST_MISMATCH


class UrlExpired(TransferError):  # noqa: N818
    """Error of an expired presigned URL."""


class FileChanged(TransferError):  # noqa: N818
    """Error of a local file that changed during its hashing or upload, which makes its declared digest false."""


class UnsafePath(TransferError):  # noqa: N818
    """Error of a destination outside its directory."""


class DiskFull(BatonError):  # noqa: N818
    """Error of a full disk or an exhausted quota."""


class TransferCanceled(BatonError):  # noqa: N818
    """Error of a canceled transfer, which sends and writes no more bytes."""


_BY_CODE: dict[str, type[ApiError]] = {
    ErrorCode.UNAUTHORIZED: Unauthorized,
    ErrorCode.KEY_UNKNOWN: Unauthorized,
    ErrorCode.KEY_REVOKED: Unauthorized,
    ErrorCode.KEY_EXPIRED: Unauthorized,
    ErrorCode.WRONG_SCOPE: Unauthorized,
    ErrorCode.OPERATOR_ONLY: Unauthorized,
    ErrorCode.TOKEN_INVALID: TokenRefused,
    ErrorCode.TOKEN_WRONG_KEY: TokenRefused,
    ErrorCode.JOB_NOT_RUNNING: LeaseLost,
    ErrorCode.JOB_CANCELED: LeaseLost,
    ErrorCode.JOB_FINISHED: LeaseLost,
    ErrorCode.LEASE_LOST: LeaseLost,
    ErrorCode.LEASE_REQUIRED: LeaseLost,
    ErrorCode.LEASE_EXPIRED: LeaseExpired,
    ErrorCode.NOT_STORED_YET: NotStoredYet,
    ErrorCode.DIGEST_MISMATCH: DigestMismatch,
    ErrorCode.STEP_NOT_NEWER: StepNotNewer,
    ErrorCode.ROLLBACK_BUDGET_SPENT: RollbackRefused,
    ErrorCode.ROLLBACK_NOT_KEPT: RollbackRefused,
}
_BY_STATUS: dict[int, type[ApiError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    409: Conflict,
    413: InvalidRequest,
    422: InvalidRequest,
}


def api_error_class(code: str, status: int) -> type[ApiError]:
    """Return the exception class for an answer: by its code if known, else by its status."""
    return _BY_CODE.get(code) or _BY_STATUS.get(status, ApiError)


def disk_full(error: OSError, operation: str) -> DiskFull | None:
    """Return DiskFull if `error` means a full disk, else None."""
    if error.errno in _NO_SPACE:
        return DiskFull(f"no space left on this machine: {operation}")
    return None


def without_query(url: str) -> str:
    """Return a URL without its query for messages, because the query of a presigned URL is a signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{':' + str(parts.port) if parts.port else ''}{parts.path}"

"""The exceptions of calls to the control plane and of transfers.

    BatonError
    ├── ApiError                  the control plane refused; repeating the call unchanged will not help
    │   ├── Unauthorized          the API key is unknown, revoked, expired or lacks the scope
    │   ├── TokenRefused          a one-time transfer token is used up, expired or for another object: request a new one
    │   ├── InvalidRequest        malformed or out of bounds: `field` names the place
    │   ├── NotFound              no such job, checkpoint, object or route
    │   ├── LeaseLost             the attempt may no longer write: stop the trainer, claim again
    │   ├── LeaseExpired          renew the lease with a heartbeat, then repeat
    │   ├── NotStoredYet          a declared object is not stored: upload it, then repeat
    │   ├── DigestMismatch        a stored object has other bytes than declared
    │   ├── StepNotNewer          this step or a later one is committed already
    │   ├── RollbackRefused       the rollback budget is spent, or the checkpoint is no longer kept
    │   └── Conflict              any other conflict with the state of the job
    ├── Unreachable               no usable answer after all retries: connection, timeout, 429, 5xx
    ├── UnexpectedAnswer          an answer that does not match the models of this version
    ├── TransferError             the transfer of one object failed for good
    │   ├── ObjectMissing         404: the object is not in the store
    │   ├── ChecksumMismatch      the bytes differ from the declared ones, also after a second transfer
    │   │   └── FalseDigest       the stored bytes arrived intact, and the declared BLAKE3 is not theirs
    │   ├── UrlExpired            the presigned URL has expired: request a new one
    │   ├── FileChanged           a local file changed during the transfer
    │   └── UnsafePath            a destination would lie outside its directory
    ├── DiskFull                  no space (or quota) left on this machine
    └── TransferCanceled          the caller's cancel event was set

Messages never carry the API key, a token, or the query of a presigned URL.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from urllib.parse import urlsplit

from baton.contract.errors import ErrorCode, Fault

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


class BatonError(Exception):
    """Root of the exceptions that the transport raises on purpose."""


class ApiError(BatonError):
    """The control plane refused. `code` is an `ErrorCode` of `baton.contract`, or `http_<status>` for other bodies.

    `after_retry` is true if an earlier try of the same call went unanswered, which the server may have carried out.
    `foreign` is true if a proxy, a firewall or a gateway refused instead of our API; such a refusal may pass and is not
    about the request. `problems`: all faults of the request, if the answer lists more than one.
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
    """The API key does not permit this call."""


class TokenRefused(ApiError):  # noqa: N818
    """The one-time transfer token was used up, has expired or is for another object."""


class InvalidRequest(ApiError):  # noqa: N818
    """The request is malformed or a value is out of bounds."""


class NotFound(ApiError):  # noqa: N818
    """The job, object or route does not exist, or belongs to another tenant."""


class LeaseLost(ApiError):  # noqa: N818
    """The attempt may no longer write: reassigned, canceled, finished, or the call had no lease."""


class LeaseExpired(ApiError):  # noqa: N818
    """The lease has expired, but a heartbeat may still renew it."""


class NotStoredYet(ApiError):  # noqa: N818
    """A declared object is not stored with the declared size and checksum."""


class RollbackRefused(ApiError):  # noqa: N818
    """The rule's rollback budget is spent, or the checkpoint to roll back to is no longer kept."""


class DigestMismatch(ApiError):  # noqa: N818
    """A stored object has another size or checksum than declared."""


class StepNotNewer(ApiError):  # noqa: N818
    """The newest committed checkpoint has this step or a later one."""


class Conflict(ApiError):  # noqa: N818
    """The call conflicts with the state of the job in another way."""


class Unreachable(BatonError):  # noqa: N818
    """No usable answer within the tries and the time allowed."""


class UnexpectedAnswer(BatonError):  # noqa: N818
    """The answer is well-formed, but does not match the models of this version."""


class TransferError(BatonError):
    """The transfer of one object failed, and repeating it unchanged will not help."""


class ObjectMissing(TransferError):  # noqa: N818
    """The store has no such object."""


class ChecksumMismatch(TransferError):  # noqa: N818
    """The bytes differ from the declared ones."""


class FalseDigest(ChecksumMismatch):
    """The bytes have the declared size and CRC-64/NVME, but another BLAKE3: the declared digest is false.

    Fetching the bytes again does not help.
    """

    code = ErrorCode.DIGEST_MISMATCH


class UrlExpired(TransferError):  # noqa: N818
    """The presigned URL has expired."""


class FileChanged(TransferError):  # noqa: N818
    """A local file changed while it was hashed or uploaded, so that its declared digest is no longer valid."""


class UnsafePath(TransferError):  # noqa: N818
    """A destination lies outside of its directory."""


class DiskFull(BatonError):  # noqa: N818
    """No space left on this machine."""


class TransferCanceled(BatonError):  # noqa: N818
    """The caller's cancel event is set; the transfer sends and writes nothing more."""


_BY_CODE: dict[str, type[ApiError]] = {
    ErrorCode.UNAUTHORIZED: Unauthorized,
    ErrorCode.KEY_UNKNOWN: Unauthorized,
    ErrorCode.KEY_REVOKED: Unauthorized,
    ErrorCode.KEY_EXPIRED: Unauthorized,
    ErrorCode.WRONG_SCOPE: Unauthorized,
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
    """Return a URL for messages, without its query, because the query of a presigned URL is a signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{':' + str(parts.port) if parts.port else ''}{parts.path}"

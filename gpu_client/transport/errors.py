"""Everything that can go wrong between a client and the control plane or the object store.

    BatonError
    ├── ApiError                  the control plane refused; repeating the call unchanged will not help
    │   ├── Unauthorized          the API key will not do: unknown, revoked, expired, wrong scope
    │   ├── TokenRefused          a one-time transfer token is used up or for another object; ask for a new one
    │   ├── InvalidRequest        malformed or out of bounds: `field` says where
    │   ├── NotFound              no such job, checkpoint, object or route
    │   ├── LeaseLost             the attempt may change nothing more: stop the trainer, ask for work again
    │   ├── LeaseExpired          prove the lease again with a heartbeat, then repeat
    │   ├── NotStoredYet          a declared object is not stored: upload it, then repeat
    │   ├── DigestMismatch        a stored object has other bytes than declared
    │   ├── StepNotNewer          this or a later step is committed already
    │   ├── RollbackRefused       as often as it may already, or further than checkpoints are kept
    │   └── Conflict              any other clash with the state of the job
    ├── Unreachable               no usable answer after all retries: connection, timeout, 429, 5xx. Try again later
    ├── UnexpectedAnswer          an answer that this version does not understand
    ├── TransferError             moving one object failed for good
    │   ├── ObjectMissing         404: the object is not in the store
    │   ├── ChecksumMismatch      the bytes are not those that were promised, also when fetched again
    │   │   └── FalseDigest       the stored bytes arrived, and the promised BLAKE3 was never theirs
    │   ├── UrlExpired            the presigned URL has run out: ask for a new one
    │   ├── FileChanged           a local file changed while it was read
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
    """Root of everything this package raises on purpose."""


class ApiError(BatonError):
    """The control plane refused. `code` is an `ErrorCode` of `baton.contract`, or `http_<status>` for other bodies.

    `after_retry` is true if an earlier try of the same call went unanswered: it may have been carried out then.
    `foreign` is true if it was not our API that refused but something in between: a proxy, a firewall, a gateway being
    deployed. That may pass, and says nothing about the request. `problems`: everything that is wrong, where the answer
    says more than one thing.
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
    """The API key will not do for this call."""


class TokenRefused(ApiError):  # noqa: N818
    """The one-time transfer token was used up, has expired or is for another object."""


class InvalidRequest(ApiError):  # noqa: N818
    """The request is malformed or a value is out of bounds."""


class NotFound(ApiError):  # noqa: N818
    """What was asked for does not exist, or belongs to another tenant."""


class LeaseLost(ApiError):  # noqa: N818
    """The attempt may change nothing more: reassigned, canceled, finished, or no lease was sent."""


class LeaseExpired(ApiError):  # noqa: N818
    """The lease has run out but may still be proved again by a heartbeat."""


class NotStoredYet(ApiError):  # noqa: N818
    """A declared object is not stored with the declared size and checksum."""


class RollbackRefused(ApiError):  # noqa: N818
    """A rule has rolled the job back as often as it may, or further back than checkpoints are kept."""


class DigestMismatch(ApiError):  # noqa: N818
    """A stored object has another size or checksum than declared."""


class StepNotNewer(ApiError):  # noqa: N818
    """The newest committed checkpoint has this step or a later one."""


class Conflict(ApiError):  # noqa: N818
    """Another clash with the state of the job."""


class Unreachable(BatonError):  # noqa: N818
    """No usable answer within the tries and the time allowed."""


class UnexpectedAnswer(BatonError):  # noqa: N818
    """The answer is well-formed but not one that this version understands."""


class TransferError(BatonError):
    """Moving one object failed, and repeating it unchanged will not help."""


class ObjectMissing(TransferError):  # noqa: N818
    """The store has no such object."""


class ChecksumMismatch(TransferError):  # noqa: N818
    """The bytes are not the promised ones."""


class FalseDigest(ChecksumMismatch):
    """The bytes have the promised size and CRC-64/NVME and another BLAKE3: whoever declared the digest lied or erred.

    To fetch them again does not help.
    """

    code = ErrorCode.DIGEST_MISMATCH


class UrlExpired(TransferError):  # noqa: N818
    """The presigned URL has run out."""


class FileChanged(TransferError):  # noqa: N818
    """A local file changed while it was hashed or uploaded, so what was promised does not hold."""


class UnsafePath(TransferError):  # noqa: N818
    """A destination would lie outside the directory it belongs to."""


class DiskFull(BatonError):  # noqa: N818
    """No space left on this machine."""


class TransferCanceled(BatonError):  # noqa: N818
    """The caller's cancel event was set; nothing more is sent or written."""


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
    """The class for an answer: by its code where we know it, else by its status."""
    return _BY_CODE.get(code) or _BY_STATUS.get(status, ApiError)


def disk_full(error: OSError, what: str) -> DiskFull | None:
    """`error` as DiskFull if that is what it means, else None."""
    if error.errno in _NO_SPACE:
        return DiskFull(f"no space left on this machine: {what}")
    return None


def without_query(url: str) -> str:
    """A URL as it may be shown: the query of a presigned one is its signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{':' + str(parts.port) if parts.port else ''}{parts.path}"

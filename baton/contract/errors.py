"""Every error of the API: a stable code with its HTTP status, meaning and remedy.

The module imports the standard library only, because every cold call waits for the authorizer, which answers with these
codes. error_body.py defines the body that carries a code.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class ErrorInfo(NamedTuple):
    """Status, meaning and remedy of a code. `remedy` addresses the reader of the answer."""

    status: int
    meaning: str
    remedy: str


class Fault(NamedTuple):
    """Fault of a request or document. A request or document may have several faults."""

    field: str
    """Dotted path, as in `parameters.steps`."""
    reason: str
    remedy: str = ""
    line: int | None = None
    """Line in a document, from 1."""
    column: int | None = None
    code: str = ""
    """Stable name of the kind of fault; empty if the document's language has no such names."""


class ErrorCode(StrEnum):
    """Stable error codes. Clients may branch on these; messages may change."""

    # The request itself
    MALFORMED_JSON = "malformed_json"
    MISSING_FIELD = "missing_field"
    UNKNOWN_FIELD = "unknown_field"
    INVALID_VALUE = "invalid_value"
    INVALID_KEY = "invalid_key"
    INVALID_CURSOR = "invalid_cursor"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    UNKNOWN_RECIPE = "unknown_recipe"
    INVALID_RECIPE = "invalid_recipe"
    INVALID_RULES = "invalid_rules"
    IDEMPOTENCY_MISMATCH = "idempotency_mismatch"
    # Authentication and scopes
    UNAUTHORIZED = "unauthorized"
    KEY_UNKNOWN = "key_unknown"
    KEY_REVOKED = "key_revoked"
    KEY_EXPIRED = "key_expired"
    ENROLMENT_EXPIRED = "enrolment_expired"
    IDENTITY_REFUSED = "identity_refused"
    WRONG_SCOPE = "wrong_scope"
    OPERATOR_ONLY = "operator_only"
    SESSION_CODE_INVALID = "session_code_invalid"
    SESSION_OVER = "session_over"
    ORIGIN_REFUSED = "origin_refused"
    TOKEN_INVALID = "token_invalid"
    TOKEN_WRONG_KEY = "token_wrong_key"
    # The requested thing
    NOT_FOUND = "not_found"
    JOB_NOT_FOUND = "job_not_found"
    CHECKPOINT_NOT_FOUND = "checkpoint_not_found"
    OBJECT_NOT_FOUND = "object_not_found"
    OBJECT_TOO_LARGE = "object_too_large"
    KEY_NOT_FOUND = "key_not_found"
    WEBHOOK_NOT_FOUND = "webhook_not_found"
    RECIPE_NOT_FOUND = "recipe_not_found"
    RING_NOT_FOUND = "ring_not_found"
    FLEET_NOT_FOUND = "fleet_not_found"
    MACHINE_UNKNOWN = "machine_unknown"
    MACHINE_NOT_FOUND = "machine_not_found"
    MACHINE_HAS_NO_SHELL = "machine_has_no_shell"
    PROVIDER_NOT_FOUND = "provider_not_found"
    REGISTRY_NOT_FOUND = "registry_not_found"
    UNKNOWN_BUCKET = "unknown_bucket"
    CONSOLE_NOT_BUILT = "console_not_built"
    # The state of the job
    JOB_NOT_RUNNING = "job_not_running"
    JOB_CANCELED = "job_canceled"
    JOB_FINISHED = "job_finished"
    ILLEGAL_TRANSITION = "illegal_transition"
    LEASE_LOST = "lease_lost"
    LEASE_EXPIRED = "lease_expired"
    LEASE_REQUIRED = "lease_required"
    NOT_STORED_YET = "not_stored_yet"
    DIGEST_MISMATCH = "digest_mismatch"
    STEP_NOT_NEWER = "step_not_newer"
    CHECKPOINT_CONFLICT = "checkpoint_conflict"
    UPLOAD_NOT_FOUND = "upload_not_found"
    RECIPE_EXISTS = "recipe_exists"
    ROLLBACK_BUDGET_SPENT = "rollback_budget_spent"
    ROLLBACK_NOT_KEPT = "rollback_not_kept"
    ENROLMENT_USED = "enrolment_used"
    PREFLIGHT_FAILED = "preflight_failed"
    HOST_QUARANTINED = "host_quarantined"
    # The world of an elastic job
    NOT_ELASTIC = "not_elastic"
    NOT_FOR_ELASTIC = "not_for_elastic"
    WORLD_CHANGED = "world_changed"
    WORLD_MISMATCH = "world_mismatch"
    DATA_MISMATCH = "data_mismatch"
    NO_MAJORITY = "no_majority"
    NOT_A_MEMBER = "not_a_member"
    # The account at a provider of machines
    PROVIDER_KEY_REFUSED = "provider_key_refused"
    PROVIDER_PERMISSION_MISSING = "provider_permission_missing"
    PROVIDER_CREDIT_EXHAUSTED = "provider_credit_exhausted"
    PROVIDER_QUOTA_REACHED = "provider_quota_reached"
    PROVIDER_IMAGE_REFUSED = "provider_image_refused"
    PROVIDER_REQUEST_REFUSED = "provider_request_refused"
    PROVIDER_UNAVAILABLE = "provider_unavailable"
    CONFLICT = "conflict"
    # The service
    TOO_MANY_REQUESTS = "too_many_requests"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"

    @property
    def status(self) -> int:
        """Return the HTTP status of answers with this code."""
        return ERRORS[self].status

    @property
    def meaning(self) -> str:
        """Return the error in one sentence."""
        return ERRORS[self].meaning

    @property
    def remedy(self) -> str:
        """Return the correction in one sentence."""
        return ERRORS[self].remedy


ERRORS: dict[ErrorCode, ErrorInfo] = {
    ErrorCode.MALFORMED_JSON: ErrorInfo(400, "The body is not valid JSON.", "Send one JSON document encoded as UTF-8."),
    ErrorCode.MISSING_FIELD: ErrorInfo(422, "A required field is missing.", "Add the named field."),
    ErrorCode.UNKNOWN_FIELD: ErrorInfo(
        422, "A field is not known here.", "Remove it or correct its spelling; nothing is ignored silently."
    ),
    ErrorCode.INVALID_VALUE: ErrorInfo(422, "A value is outside what is allowed.", "Change it as the message says."),
    ErrorCode.INVALID_KEY: ErrorInfo(
        422,
        "An object key or path cannot be used.",
        "Use another one: up to 900 bytes of UTF-8 (a path inside a directory 800), '/'-separated, without empty, "
        "'.' or '..' parts, backslashes or control characters.",
    ),
    ErrorCode.INVALID_CURSOR: ErrorInfo(
        422, "The cursor was not issued for this list.", "Start again without a cursor."
    ),
    ErrorCode.PAYLOAD_TOO_LARGE: ErrorInfo(
        413,
        "The request is larger than allowed.",
        "Send large data as objects through an upload, not in the body.",
    ),
    ErrorCode.UNKNOWN_RECIPE: ErrorInfo(
        422, "No recipe has this name and version.", "Use one of those named in the message."
    ),
    ErrorCode.INVALID_RECIPE: ErrorInfo(
        422, "The document is no recipe.", "Change what `problems` names; `baton recipes lint` finds it beforehand."
    ),
    ErrorCode.INVALID_RULES: ErrorInfo(
        422, "The rules cannot be used.", "Change what `problems` names; nothing of them is in force."
    ),
    ErrorCode.IDEMPOTENCY_MISMATCH: ErrorInfo(
        409,
        "This Idempotency-Key was used with another body.",
        "Use a new key for another body, or repeat the first one unchanged.",
    ),
    ErrorCode.UNAUTHORIZED: ErrorInfo(401, "No API key was sent.", "Send the header x-api-key."),
    ErrorCode.KEY_UNKNOWN: ErrorInfo(403, "This API key is not known.", "Check it, or ask an admin for a new one."),
    ErrorCode.KEY_REVOKED: ErrorInfo(403, "This API key was revoked.", "Ask an admin for a new one."),
    ErrorCode.KEY_EXPIRED: ErrorInfo(403, "This API key has expired.", "Ask an admin for a new one."),
    ErrorCode.ENROLMENT_EXPIRED: ErrorInfo(
        403,
        "The machine did not enrol in time.",
        "End the worker; the control plane gives the machine back and rents another one.",
    ),
    ErrorCode.IDENTITY_REFUSED: ErrorInfo(
        403,
        "The proof of identity that the provider signs for the machine is missing or not valid.",
        "Read a new proof from the provider's metadata service; a copied token enrols no other container.",
    ),
    ErrorCode.WRONG_SCOPE: ErrorInfo(
        403, "This API key may not make this call.", "Use a key that has the scope named in the message."
    ),
    ErrorCode.OPERATOR_ONLY: ErrorInfo(
        403,
        "The call concerns all tenants of the deployment.",
        "Use an admin key of the tenant `default`, which operates the deployment.",
    ),
    ErrorCode.SESSION_CODE_INVALID: ErrorInfo(
        401,
        "The one-time link is unknown, used or expired.",
        "Run baton console again; a link is valid once and for a minute.",
    ),
    ErrorCode.SESSION_OVER: ErrorInfo(
        401,
        "The session is unknown, over or revoked, or the key that opened the session is not valid any more.",
        "Sign in again; baton console prints a link.",
    ),
    ErrorCode.ORIGIN_REFUSED: ErrorInfo(
        403, "The request comes from a page of another origin.", "Open the console at the address of the API."
    ),
    ErrorCode.TOKEN_INVALID: ErrorInfo(
        401,
        "The transfer token is unknown, used up or expired.",
        "Ask for a new token and use it within its life.",
    ),
    ErrorCode.TOKEN_WRONG_KEY: ErrorInfo(
        403, "The transfer token is for another object.", "Ask for a token for this bucket and key."
    ),
    ErrorCode.NOT_FOUND: ErrorInfo(404, "No such route.", "See the OpenAPI description for the routes."),
    ErrorCode.JOB_NOT_FOUND: ErrorInfo(404, "No such job.", "Check the id; jobs of other tenants are not visible."),
    ErrorCode.CHECKPOINT_NOT_FOUND: ErrorInfo(
        404, "The job has no such checkpoint.", "List its checkpoints and choose one of them."
    ),
    ErrorCode.OBJECT_NOT_FOUND: ErrorInfo(404, "No such object.", "Check bucket and key."),
    ErrorCode.OBJECT_TOO_LARGE: ErrorInfo(
        422,
        "The object is larger than an answer may be.",
        "Ask with as=url and download from that URL; workers of the original orchestrator do so by "
        "python -m gpu_client.original_relay.",
    ),
    ErrorCode.KEY_NOT_FOUND: ErrorInfo(404, "No such API key.", "List those of your tenant with GET /keys."),
    ErrorCode.WEBHOOK_NOT_FOUND: ErrorInfo(404, "No such webhook.", "List those of your tenant with GET /webhooks."),
    ErrorCode.RECIPE_NOT_FOUND: ErrorInfo(
        404, "No such recipe.", "List those that your tenant may use with GET /recipes."
    ),
    ErrorCode.RING_NOT_FOUND: ErrorInfo(
        404, "No such ring.", "List those of your tenant with GET /rings; baton ring make makes one."
    ),
    ErrorCode.FLEET_NOT_FOUND: ErrorInfo(404, "No such fleet.", "List those of your tenant with GET /fleets."),
    ErrorCode.MACHINE_UNKNOWN: ErrorInfo(
        404,
        "The API key belongs to no machine that is rented now.",
        "End the worker; only machines that a fleet rents make this call.",
    ),
    ErrorCode.MACHINE_NOT_FOUND: ErrorInfo(
        404,
        "The fleet has no such machine.",
        "List its machines with GET /fleets/{fleet}, the ended ones with GET /fleets/{fleet}/machines.",
    ),
    ErrorCode.MACHINE_HAS_NO_SHELL: ErrorInfo(
        409, "The machine has no shell that SSH reaches.", "Read the machine's output, or the log of its job."
    ),
    ErrorCode.PROVIDER_NOT_FOUND: ErrorInfo(
        404,
        "The deployment holds no account at this provider.",
        "List the accounts with GET /providers; baton fleet login stores one.",
    ),
    ErrorCode.REGISTRY_NOT_FOUND: ErrorInfo(
        404,
        "The tenant has no login at this registry.",
        "List the logins with GET /registries; baton fleet login stores one.",
    ),
    ErrorCode.UNKNOWN_BUCKET: ErrorInfo(404, "No such bucket.", "Use 'training-data' or 'training-checkpoints'."),
    ErrorCode.CONSOLE_NOT_BUILT: ErrorInfo(
        404, "The control plane has no built console.", "Run make setup in the checkout, then load the page again."
    ),
    ErrorCode.JOB_NOT_RUNNING: ErrorInfo(400, "The job is not running.", "Stop working on it; ask for work again."),
    ErrorCode.JOB_CANCELED: ErrorInfo(409, "The job was canceled.", "Stop working on it; ask for work again."),
    ErrorCode.JOB_FINISHED: ErrorInfo(
        409, "The job has already ended.", "Nothing more can change it; retry it to run it again."
    ),
    ErrorCode.ILLEGAL_TRANSITION: ErrorInfo(
        409,
        "The job's state does not allow this.",
        "See the state in the message; wait or choose another call.",
    ),
    ErrorCode.LEASE_LOST: ErrorInfo(
        409,
        "Another attempt owns the job now, or the lease token is wrong.",
        "Stop the trainer at once and discard its uploads; ask for work again.",
    ),
    ErrorCode.LEASE_EXPIRED: ErrorInfo(
        409, "The lease has run out.", "Prove it again with a heartbeat; if that is refused too, stop."
    ),
    ErrorCode.LEASE_REQUIRED: ErrorInfo(
        409,
        "This attempt was claimed with a lease, and no x-lease-token was sent.",
        "Send the x-lease-token that the claim answered with.",
    ),
    ErrorCode.NOT_STORED_YET: ErrorInfo(
        409,
        "A declared object is not in storage with the declared size and checksum.",
        "Upload the named objects, then repeat the call.",
    ),
    ErrorCode.DIGEST_MISMATCH: ErrorInfo(
        409,
        "A stored object has another size or checksum than declared.",
        "Hash the file again, upload it under its own digest, then repeat the call.",
    ),
    ErrorCode.STEP_NOT_NEWER: ErrorInfo(
        409,
        "The newest committed checkpoint has this step or a later one.",
        "Commit only steps beyond the one named in the message.",
    ),
    ErrorCode.CHECKPOINT_CONFLICT: ErrorInfo(
        409,
        "This step is already committed by this attempt with other contents.",
        "Commit a later step; a committed checkpoint never changes.",
    ),
    ErrorCode.UPLOAD_NOT_FOUND: ErrorInfo(
        404,
        "No such multipart upload.",
        "Create one with action=mpu-create; it may have been completed or aborted.",
    ),
    ErrorCode.RECIPE_EXISTS: ErrorInfo(
        409,
        "This name and version mean something else already.",
        "A version never changes: push it as the next one, or a built-in one's changed copy under another name.",
    ),
    ErrorCode.ROLLBACK_BUDGET_SPENT: ErrorInfo(
        409,
        "The rule has rolled this job back as often as it may.",
        "Look at what it fires on, or give its rollback a larger 'budget'.",
    ),
    ErrorCode.ROLLBACK_NOT_KEPT: ErrorInfo(
        409,
        "The checkpoints from before the rule's trouble are not kept any more.",
        "Keep more of them ('keep_last' of the retention), or let the rule wait for less ('for').",
    ),
    ErrorCode.ENROLMENT_USED: ErrorInfo(
        409,
        "The machine has enrolled already; an enrolment token is valid once.",
        "End the worker; if no other worker of this machine exists, stop the fleet, because the token was copied.",
    ),
    ErrorCode.PREFLIGHT_FAILED: ErrorInfo(
        409,
        "The machine has other hardware than its provider offered, or is slower than its fleet permits.",
        "End the worker; the control plane gives the machine back.",
    ),
    ErrorCode.HOST_QUARANTINED: ErrorInfo(
        409,
        "The machine is on a host that failed lately and is not rented now.",
        "End the worker; the provider moves its container to another host, or the fleet gives the machine back.",
    ),
    ErrorCode.NOT_ELASTIC: ErrorInfo(
        409, "The job is trained by one machine and has no world.", "Submit the job with nodes: {min, max}."
    ),
    ErrorCode.NOT_FOR_ELASTIC: ErrorInfo(
        409,
        "Jobs with nodes do not support this yet.",
        "Submit the job without nodes, or without the field or call that the message names.",
    ),
    ErrorCode.WORLD_CHANGED: ErrorInfo(
        409,
        "Another node has changed the world.",
        "Read the world again, then decide again.",
    ),
    ErrorCode.WORLD_MISMATCH: ErrorInfo(
        409,
        "The node's program differs from the program of the nodes that train the job.",
        "Run the same script with the same versions and settings on all machines.",
    ),
    ErrorCode.DATA_MISMATCH: ErrorInfo(
        409,
        "The node's data differs from the data of the nodes that train the job.",
        "Give the same files, ratios, seed and passes to session.shards on all machines.",
    ),
    ErrorCode.NO_MAJORITY: ErrorInfo(
        409,
        "Too few members would go on.",
        "Wait for the other members or for the end of their leases, then propose again.",
    ),
    ErrorCode.NOT_A_MEMBER: ErrorInfo(
        409, "The node is no member of the epoch.", "Join the world, and wait until a member admits the node."
    ),
    ErrorCode.PROVIDER_KEY_REFUSED: ErrorInfo(
        422, "The provider refuses the key of the account.", "Log in with a valid key from the provider's console."
    ),
    ErrorCode.PROVIDER_PERMISSION_MISSING: ErrorInfo(
        422,
        "The key of the account lacks a permission at the provider.",
        "Log in with a key that has the permissions on the provider's page in docs/providers.",
    ),
    ErrorCode.PROVIDER_CREDIT_EXHAUSTED: ErrorInfo(
        409, "The account at the provider has no credit.", "Add credit at the provider, then repeat the call."
    ),
    ErrorCode.PROVIDER_QUOTA_REACHED: ErrorInfo(
        409,
        "The account has reached a quota of the provider.",
        "End machines, or ask the provider for a higher quota, then repeat the call.",
    ),
    ErrorCode.PROVIDER_IMAGE_REFUSED: ErrorInfo(
        422,
        "The provider cannot use the image.",
        "Name an image that exists, and that the account may read.",
    ),
    ErrorCode.PROVIDER_REQUEST_REFUSED: ErrorInfo(
        422, "The provider refuses the account's settings.", "Change the setting that the message names."
    ),
    ErrorCode.PROVIDER_UNAVAILABLE: ErrorInfo(
        # No 5xx: the control plane did answer, and repeated calls within a minute would not reach the provider either.
        424,
        "The provider cannot be reached from the control plane, therefore nothing is known or stored.",
        "Nothing was stored. Repeat the call later; repeating is safe.",
    ),
    ErrorCode.CONFLICT: ErrorInfo(
        409, "Somebody else changed this at the same moment.", "Repeat the call; it is safe to do so."
    ),
    ErrorCode.TOO_MANY_REQUESTS: ErrorInfo(429, "Too many requests.", "Wait as Retry-After says, then repeat."),
    ErrorCode.INTERNAL: ErrorInfo(
        500, "The service failed.", "Repeat the call; if it fails again, report the request_id."
    ),
    ErrorCode.UNAVAILABLE: ErrorInfo(
        503,
        "Storage is not reachable at the moment.",
        "Wait as Retry-After says, then repeat; repeating is safe.",
    ),
}

"""What one deployment decides: its name, what protects its data, and what limits its bill."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, Self

from functions.api.http.settings import MAX_READY_SHARDS

LOG_RETENTION_DAYS = (1, 7, 14, 30, 90, 180, 365)
Target = Literal["lambda", "host"]
"""`lambda`: Amazon's arm64. `host`: the machine that deploys, for an emulated cloud that runs functions itself."""

DEFAULT_STORE_REGION = "auto"
READY_SHARDS_TAG = "baton-ready-shards"
"""Of the jobs table: into how many partitions jobs have been spread. Absent means one. The tag outlives the stack with
the table, so that a later deployment cannot leave jobs behind."""


class StageError(Exception):
    """A setting of the stage is wrong; the message says which, and what would be right."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One deployment beside others in the same account. Each field is a context value: `-c name=value`.

    The physical names of all that belongs to it begin with `baton-<name>-`.
    """

    name: str = "dev"
    """Lower-case letters, digits and dashes, at most 16."""
    disposable: bool = False
    """True deletes tables and buckets with the stack; otherwise nothing deletes them but a person."""
    log_retention_days: int = 30
    alarm_email: str = ""
    """Where alarms go. Amazon asks that address for confirmation. Without one the alarms only show."""
    ring_sample_days: int = 0
    """S3 deletes samples of rings after so many days, whoever still lists them; 0 leaves that to the rings."""
    original_progress_s: int = 6 * 3600
    """So long an original client keeps its job without `/progress`; before its first one twice as long."""
    max_requests_per_s: int = 500
    """The whole API answers 429 beyond it: the limit of a surprise bill."""
    ready_shards: int = 1
    """Partitions of each queue's waiting jobs. A live stage may only get more: jobs stay in the partition they have."""
    target: Target = "lambda"
    s3_endpoint: str = ""
    """Any S3-compatible store for data and checkpoints, instead of buckets in this account: `https://host`."""
    s3_region: str = ""
    """What requests to that store are signed for; `auto` unless said."""
    s3_secret: str = ""
    """Name of the secret in Secrets Manager, in this account and region, that holds its credentials."""
    s3_multipart: bool = True
    """False for a store that cannot take uploads in parts as they are needed: each large file is then one upload."""
    data_bucket: str = ""
    checkpoints_bucket: str = ""
    """Two buckets that exist in that store."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,15}", self.name):
            raise StageError(
                f"stage: {self.name!r} is no stage name."
                " Use a lower-case letter, then up to 15 of them, digits and dashes."
            )
        if self.target not in ("lambda", "host"):
            raise StageError(f"target: {self.target!r} is unknown. Use 'lambda' or 'host'.")
        if self.log_retention_days not in LOG_RETENTION_DAYS:
            allowed = ", ".join(map(str, LOG_RETENTION_DAYS))
            raise StageError(f"log_retention_days: {self.log_retention_days} is not one of {allowed}.")
        if not 1 <= self.max_requests_per_s <= 10_000:
            raise StageError(f"max_requests_per_s: {self.max_requests_per_s} is not within 1 to 10000.")
        if not 1 <= self.ready_shards <= MAX_READY_SHARDS:
            raise StageError(f"ready_shards: {self.ready_shards} is not within 1 to {MAX_READY_SHARDS}.")
        if not 60 <= self.original_progress_s <= 30 * 86_400:
            raise StageError(f"original_progress_s: {self.original_progress_s} is not within 60 to 2592000.")
        if self.ring_sample_days > 3650:
            raise StageError(f"ring_sample_days: {self.ring_sample_days} is not within 0 to 3650.")
        if self.ring_sample_days and self.has_own_store:
            raise StageError("ring_sample_days: is for buckets made here. Give your own store's bucket such a rule.")
        if self.alarm_email and "@" not in self.alarm_email:
            raise StageError(f"alarm_email: {self.alarm_email!r} is no address.")
        _check_store(self)

    @classmethod
    def from_context(cls, context: Mapping[str, object]) -> Self:
        """Read `-c` values: `stage` for the name, the other fields by their own names. Raises StageError."""
        given: dict[str, object] = {}
        for field in fields(cls):
            value = context.get("stage" if field.name == "name" else field.name)
            if value is not None and value != "":
                given[field.name] = _parsed(field.name, str(value), field.default)
        return cls(**given)  # type: ignore[arg-type]

    @property
    def prefix(self) -> str:
        """Begins every physical name."""
        return f"baton-{self.name}-"

    @property
    def bus(self) -> str:
        """Name of the event bus."""
        return f"baton-{self.name}"

    @property
    def has_own_store(self) -> bool:
        """True if objects are kept in a store that is not made here."""
        return bool(self.s3_endpoint)


_STORE = ("s3_endpoint", "s3_secret", "data_bucket", "checkpoints_bucket")
"""Needed together."""


def _check_store(stage: Stage) -> None:
    """Raises StageError unless an object store of one's own is named wholly, or not at all."""
    given = [name for name in (*_STORE, "s3_region") if getattr(stage, name)]
    missing = [name for name in _STORE if not getattr(stage, name)]
    if not given:
        return
    if missing:
        raise StageError(f"{missing[0]}: is needed with {given[0]}. An object store has {', '.join(_STORE)}.")
    if not re.fullmatch(r"https?://[a-zA-Z0-9.-]+(:[0-9]{1,5})?", stage.s3_endpoint):
        raise StageError(f"s3_endpoint: {stage.s3_endpoint!r} is no address of a store. Use https://host and no path.")
    if stage.target == "lambda" and not stage.s3_endpoint.startswith("https:"):
        raise StageError(f"s3_endpoint: {stage.s3_endpoint!r} is not encrypted. Use https://host.")
    if stage.s3_region and not re.fullmatch(r"[a-z0-9-]{1,32}", stage.s3_region):
        raise StageError(f"s3_region: {stage.s3_region!r} is no region. Use 'auto', or what the store's provider says.")
    if not re.fullmatch(r"[A-Za-z0-9/_+=.@-]{1,512}", stage.s3_secret):
        raise StageError(f"s3_secret: {stage.s3_secret!r} is no name of a secret. Use its name, not its ARN.")
    for name in ("data_bucket", "checkpoints_bucket"):
        bucket = getattr(stage, name)
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
            raise StageError(f"{name}: {bucket!r} is no bucket name. Use 3 to 63 lower-case letters, digits, dashes.")
    if stage.data_bucket == stage.checkpoints_bucket:
        raise StageError("checkpoints_bucket: is the data_bucket too. Use two buckets.")


def _parsed(name: str, text: str, default: object) -> object:
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise StageError(f"{name}: {text!r} is neither 'true' nor 'false'.")
        return text.lower() == "true"
    if isinstance(default, int):
        if not text.isdecimal():
            raise StageError(f"{name}: {text!r} is no number.")
        return int(text)
    return text

"""Settings of one deployment: name, data protection, cost limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, Self

from pydantic import ValidationError

from baton.contract.fleets.money import Budget
from functions.settings import MAX_READY_SHARDS

LOG_RETENTION_DAYS = (1, 7, 14, 30, 90, 180, 365)
Target = Literal["lambda", "host"]
"""Platform of the functions. `lambda`: AWS on arm64. `host`: this machine, for an emulated cloud."""

DEFAULT_STORE_REGION = "auto"
READY_SHARDS_TAG = "baton-ready-shards"
"""Tag of the jobs table: number of partitions of waiting jobs; a missing tag means 1. The tag outlives the stack with
the table, so that a later deployment with fewer partitions cannot strand jobs."""


class StageSettingsError(Exception):
    """A setting is invalid; the message names the setting and the valid values."""


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """Settings of one deployment; an account can have several. Each field is a context value: `-c name=value`.

    The physical names of its resources begin with `baton-<name>-`.
    """

    name: str = "dev"
    """Lower-case letters, digits and dashes, at most 16."""
    disposable: bool = False
    """True deletes tables and buckets with the stack; else they stay."""
    log_retention_days: int = 30
    alarm_email: str = ""
    """E-mail address for alarms; AWS asks the address for confirmation. Empty: no mail."""
    ring_sample_days: int = 0
    """Age in days at which S3 deletes ring samples, including listed samples; 0 disables the deletion."""
    original_progress_s: int = 6 * 3600
    """Seconds that a client of the original keeps its job without `/progress`; twice as long before its first call."""
    max_requests_per_s: int = 500
    """Request rate above which the API answers 429, to limit the bill."""
    ready_shards: int = 1
    """Partitions of each queue's waiting jobs. On a live stage the number only grows: jobs stay in their partition."""
    fleet_budget: str = ""
    """Budget of all fleets of all tenants together as JSON, for example `{"per_month_usd": 500}`. Empty: no bound."""
    target: Target = "lambda"
    s3_endpoint: str = ""
    """URL `https://host` of an S3-compatible store for data and checkpoints, instead of buckets in this account."""
    s3_region: str = ""
    """Region in the signatures of requests to that store; empty means `auto`."""
    s3_secret: str = ""
    """Name of the secret in Secrets Manager with the credentials, in the same account and region."""
    s3_multipart: bool = True
    """False for a store without the required multipart uploads: each large file is then one upload."""
    data_bucket: str = ""
    checkpoints_bucket: str = ""
    """Names of existing buckets in that store."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,15}", self.name):
            raise StageSettingsError(
                f"stage: {self.name!r} is no valid stage name."
                " Use a lower-case letter, then up to 15 lower-case letters, digits and dashes."
            )
        if self.target not in ("lambda", "host"):
            raise StageSettingsError(f"target: {self.target!r} is unknown. Use 'lambda' or 'host'.")
        if self.log_retention_days not in LOG_RETENTION_DAYS:
            allowed = ", ".join(map(str, LOG_RETENTION_DAYS))
            raise StageSettingsError(f"log_retention_days: {self.log_retention_days} is not one of {allowed}.")
        if not 1 <= self.max_requests_per_s <= 10_000:
            raise StageSettingsError(f"max_requests_per_s: {self.max_requests_per_s} is not within 1 to 10000.")
        if not 1 <= self.ready_shards <= MAX_READY_SHARDS:
            raise StageSettingsError(f"ready_shards: {self.ready_shards} is not within 1 to {MAX_READY_SHARDS}.")
        if not 60 <= self.original_progress_s <= 30 * 86_400:
            raise StageSettingsError(f"original_progress_s: {self.original_progress_s} is not within 60 to 2592000.")
        if self.ring_sample_days > 3650:
            raise StageSettingsError(f"ring_sample_days: {self.ring_sample_days} is not within 0 to 3650.")
        if self.ring_sample_days and self.has_own_store:
            raise StageSettingsError(
                "ring_sample_days: requires the buckets of the stack. Set a lifecycle rule in your own store instead."
            )
        if self.alarm_email and "@" not in self.alarm_email:
            raise StageSettingsError(f"alarm_email: {self.alarm_email!r} is no address.")
        if self.fleet_budget:
            try:
                Budget.model_validate_json(self.fleet_budget)
            except ValidationError as error:
                problem = error.errors(include_url=False)[0]["msg"]
                raise StageSettingsError(
                    f'fleet_budget: {problem}. Use JSON such as {{"per_month_usd": 500, "per_day_usd": 50}}.'
                ) from error
        _check_store(self)

    @classmethod
    def from_context(cls, context: Mapping[str, object]) -> Self:
        """Read `-c` values: `stage` gives the name, every other field has its own name. Raises StageSettingsError."""
        given: dict[str, object] = {}
        for field in fields(cls):
            value = context.get("stage" if field.name == "name" else field.name)
            if value is not None and value != "":
                given[field.name] = _parsed(field.name, str(value), field.default)
        return cls(**given)  # type: ignore[arg-type]

    @property
    def prefix(self) -> str:
        """Prefix of every physical name."""
        return f"baton-{self.name}-"

    @property
    def bus(self) -> str:
        """Name of the event bus."""
        return f"baton-{self.name}"

    @property
    def provider_secret(self) -> str:
        """Name of the secret with the accounts at providers, which `baton fleet login` creates."""
        return f"{self.prefix}providers"

    @property
    def has_own_store(self) -> bool:
        """True if an external store keeps the objects."""
        return bool(self.s3_endpoint)


SETTINGS = tuple(field.name for field in fields(StageSettings) if field.name != "name")
"""Names of the context values, without `stage`."""

_STORE = ("s3_endpoint", "s3_secret", "data_bucket", "checkpoints_bucket")
"""Settings that are required together."""


def _check_store(stage: StageSettings) -> None:
    """Raise StageSettingsError for an incomplete or invalid object store."""
    given = [name for name in (*_STORE, "s3_region") if getattr(stage, name)]
    missing = [name for name in _STORE if not getattr(stage, name)]
    if not given:
        return
    if missing:
        raise StageSettingsError(
            f"{missing[0]}: is required with {given[0]}. An object store requires {', '.join(_STORE)}."
        )
    if not re.fullmatch(r"https?://[a-zA-Z0-9.-]+(:[0-9]{1,5})?", stage.s3_endpoint):
        raise StageSettingsError(
            f"s3_endpoint: {stage.s3_endpoint!r} is no address of a store. Use https://host and no path."
        )
    if stage.target == "lambda" and not stage.s3_endpoint.startswith("https:"):
        raise StageSettingsError(f"s3_endpoint: {stage.s3_endpoint!r} is not encrypted. Use https://host.")
    if stage.s3_region and not re.fullmatch(r"[a-z0-9-]{1,32}", stage.s3_region):
        raise StageSettingsError(
            f"s3_region: {stage.s3_region!r} is no region. Use 'auto', or the region that the provider names."
        )
    if not re.fullmatch(r"[A-Za-z0-9/_+=.@-]{1,512}", stage.s3_secret):
        raise StageSettingsError(f"s3_secret: {stage.s3_secret!r} is no name of a secret. Use its name, not its ARN.")
    for name in ("data_bucket", "checkpoints_bucket"):
        bucket = getattr(stage, name)
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
            raise StageSettingsError(
                f"{name}: {bucket!r} is no bucket name. Use 3 to 63 lower-case letters, digits, dashes."
            )
    if stage.data_bucket == stage.checkpoints_bucket:
        raise StageSettingsError("checkpoints_bucket: equals data_bucket. Use two buckets.")


def _parsed(name: str, text: str, default: object) -> object:
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise StageSettingsError(f"{name}: {text!r} is neither 'true' nor 'false'.")
        return text.lower() == "true"
    if isinstance(default, int):
        if not text.isdecimal():
            raise StageSettingsError(f"{name}: {text!r} is no number.")
        return int(text)
    return text

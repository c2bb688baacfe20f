"""The shapes of the original Dreambooth orchestrator, for the original's clients.

These clients know neither leases nor manifests: they send empty heartbeats, upload zipped checkpoints through
`/upload` and register them with `/progress`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from baton.contract.base import JsonObject
from baton.contract.jobs.dreambooth import DreamboothSubmit
from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import Artifact, InputRef, JobState, JobSubmit
from baton.contract.jobs.policy import Requirements
from baton.contract.names import CHECKPOINTS_BUCKET, DATA_BUCKET
from baton.contract.objects.dataset_manifest import is_manifest
from functions.api.http.context import ApiCall, Context
from functions.api.http.paging import count_sent_bytes, iterate_items
from functions.domain.checkpoints.object_keys import attempt_prefix
from functions.domain.records import Job, Lease

RECIPE = "dreambooth-lora-sdxl@1"
_FIXED_COLUMNS = {
    "pretrained_model_name_or_path": "stabilityai/stable-diffusion-xl-base-1.0",
    "pretrained_vae_model_name_or_path": "madebyollin/sdxl-vae-fp16-fix",
    "training_script": "train_dreambooth_lora_sdxl.py",
}
_EVENT_NAMES = {
    EventType.SUBMITTED: "created",
    EventType.STARTED: "started",
    EventType.COMPLETED: "complete",
    EventType.FAILED: "failed",
    EventType.CANCELED: "canceled",
}


def convert_job(body: DreamboothSubmit, job_id: str) -> tuple[JobSubmit, JsonObject]:
    """Convert the original's job body; return the job and the columns that the original's clients read back."""
    columns = body.model_dump()
    if body.class_prompt and not body.class_data_prefix:
        columns["class_data_prefix"] = f"loras/{job_id}-class/"
    inputs = [InputRef(prefix=body.instance_data_prefix, into="instance")]
    if columns["class_data_prefix"]:
        inputs.append(InputRef(prefix=columns["class_data_prefix"], into="class"))
    not_parameters = {"instance_data_prefix", "class_data_prefix"}
    # The original's clients send null or "" for a missing prompt.
    parameters = {
        name: value for name, value in columns.items() if name not in not_parameters and value not in (None, "")
    }
    if not (body.class_prompt or "").strip():
        # The original accepts prior preservation without a class, and its workers receive the columns unchanged.
        # Baton's agent has no class to preserve, therefore the agent trains without prior preservation.
        parameters["with_prior_preservation"] = False
    if body.num_train_epochs > 1:
        parameters.pop("max_train_steps")
    else:
        parameters.pop("num_train_epochs")
    # The original's workers declare no properties, therefore the job has none of the recipe's requirements.
    none = Requirements(**Requirements().model_dump())
    return JobSubmit(recipe=RECIPE, parameters=parameters, inputs=inputs, requirements=none), columns


def build_columns(job: Job, lease: Lease | None = None) -> dict[str, Any]:
    """Return the original's columns of a job submitted in the original's form; empty for other jobs.

    `lease`: the lease of a running job.
    """
    if job.spec.dreambooth is None:
        return {}
    model = _find_model(job)
    return {
        **_FIXED_COLUMNS,
        **job.spec.dreambooth,
        "data_bucket": DATA_BUCKET,
        "model_bucket": model.bucket if model else None,
        "model_key": model.key if model else None,
        "num_failures": job.counters.failures,
        "last_heartbeat": format_timestamp(lease.expires_at - lease.duration_s) if lease else None,
        # As in the original, only the answer of `GET /work` has a value.
        "resume_from": None,
    }


def build_work_item(
    job: Job, lease: Lease | None, keys: dict[str, list[str]], resume_from: str | None
) -> dict[str, Any]:
    """Return the answer of `GET /work` for an original client: every column, the key lists, the newest zip."""
    started = job.state is JobState.RUNNING
    return {
        **build_columns(job, lease if started else None),
        "id": job.id,
        "status": job.state.value,
        "created_at": format_timestamp(job.created_at),
        "started_at": format_timestamp(job.started_at),
        "completed_at": None,
        "canceled_at": None,
        "failed_at": None,
        "checkpoint_bucket": CHECKPOINTS_BUCKET,
        "checkpoint_prefix": attempt_prefix(job.id, job.epoch if started else job.epoch + 1),
        "resume_from": resume_from,
        "instance_data_keys": keys.get("instance", []),
        "class_data_keys": keys.get("class", []),
    }


def _find_model(job: Job) -> Artifact | None:
    """Return the job's model for the original's one output column: the recipe's first output."""
    wanted = job.spec.outputs[:1]
    named = (artifact for artifact in job.artifacts if artifact.path in wanted)
    return next(named, job.artifacts[0] if job.artifacts else None)


def name_event(type_: EventType) -> str:
    """Return the original's name of an event, or Baton's name if the original has none."""
    return _EVENT_NAMES.get(type_, type_.value)


def format_timestamp(instant: int | None) -> str | None:
    """Return an instant as the original's text, in UTC."""
    return None if instant is None else datetime.fromtimestamp(instant, UTC).strftime("%Y-%m-%d %H:%M:%S")


MAX_KEYS_BYTES = 5_000_000
"""Limit of all names in bytes after Lambda's escaping: an answer ends at 6 MB, and the job's other columns take less
than the rest."""


class InputListTooLarge(Exception):  # noqa: N818 - a property of the job, not an error of the control plane
    """No answer can contain all names of the job's inputs. A client would train on a partial list as on the whole."""

    def __init__(self, prefix: str) -> None:
        super().__init__(
            f"the names of its inputs, as below {prefix[:200]}, take more than the {MAX_KEYS_BYTES:,} bytes that an "
            "answer to a client of the original orchestrator can contain: run this job with Baton's agent "
            "(python -m gpu_client.agent), or split the data"
        )


def list_input_keys(context: Context, call: ApiCall, job: Job) -> dict[str, list[str]]:
    """List the keys of each input by the input's name, `instance` or `class`. Raises InputListTooLarge."""
    keys: dict[str, list[str]] = {}
    room_bytes = MAX_KEYS_BYTES
    for ref in job.spec.inputs:
        known = keys.setdefault(ref.into, [])
        for key in _list_keys(context, call, ref.prefix):
            room_bytes -= count_sent_bytes(json.dumps(key)) + 2  # a comma and a space
            if room_bytes < 0:
                raise InputListTooLarge(ref.prefix)
            known.append(key)
    return keys


def _list_keys(context: Context, call: ApiCall, prefix: str) -> Iterator[str]:
    pages = iterate_items(
        lambda cursor: context.objects.list(call.tenant, DATA_BUCKET, prefix, limit=1000, cursor=cursor)
    )
    # An original client would read a dataset manifest as an image.
    return (entry.key for entry in pages if not is_manifest(entry.key))

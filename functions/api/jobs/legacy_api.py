"""The original Dreambooth orchestrator's shapes, for its clients.

They know neither leases nor manifests: they send empty heartbeats, upload zipped checkpoints through
`/upload` and name them with `/progress`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from baton.contract.base import JsonObject
from baton.contract.datasets import is_manifest
from baton.contract.dreambooth import DreamboothSubmit
from baton.contract.history import EventType
from baton.contract.jobs import Artifact, InputRef, JobState, JobSubmit, Requirements
from baton.contract.names import CHECKPOINTS_BUCKET, DATA_BUCKET
from functions.api.http.context import Call, Context
from functions.api.http.paging import every_item, sent_bytes
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


def as_job(body: DreamboothSubmit, job_id: str) -> tuple[JobSubmit, JsonObject]:
    """The original's job body as a job of ours, and the columns its clients expect to read back."""
    columns = body.model_dump()
    if body.class_prompt and not body.class_data_prefix:
        columns["class_data_prefix"] = f"loras/{job_id}-class/"
    inputs = [InputRef(prefix=body.instance_data_prefix, into="instance")]
    if columns["class_data_prefix"]:
        inputs.append(InputRef(prefix=columns["class_data_prefix"], into="class"))
    not_parameters = {"instance_data_prefix", "class_data_prefix"}
    # Its clients say null or "" where there is no prompt.
    parameters = {
        name: value for name, value in columns.items() if name not in not_parameters and value not in (None, "")
    }
    if not (body.class_prompt or "").strip():
        # The original accepts prior preservation without a class, and its workers receive the columns as they are.
        # Baton's agent has no class to preserve, therefore it trains without prior preservation.
        parameters["with_prior_preservation"] = False
    if body.num_train_epochs > 1:
        parameters.pop("max_train_steps")
    else:
        parameters.pop("num_train_epochs")
    # Its workers declare nothing of themselves, so none of the recipe's requirements can be asked of them.
    none = Requirements(**Requirements().model_dump())
    return JobSubmit(recipe=RECIPE, parameters=parameters, inputs=inputs, requirements=none), columns


def job_columns(job: Job, lease: Lease | None = None) -> dict[str, Any]:
    """The original's columns of a job submitted in its form; none for other jobs. `lease`: that of a running one."""
    if job.spec.dreambooth is None:
        return {}
    model = _model_of(job)
    return {
        **_FIXED_COLUMNS,
        **job.spec.dreambooth,
        "data_bucket": DATA_BUCKET,
        "model_bucket": model.bucket if model else None,
        "model_key": model.key if model else None,
        "num_failures": job.counters.failures,
        "last_heartbeat": timestamp(lease.expires_at - lease.duration_s) if lease else None,
        # As in the original, only what `GET /work` answers says it.
        "resume_from": None,
    }


def work_item(job: Job, lease: Lease | None, keys: dict[str, list[str]], resume_from: str | None) -> dict[str, Any]:
    """What `GET /work` gives a client of the original: every column, the key lists, the newest zip."""
    started = job.state is JobState.RUNNING
    return {
        **job_columns(job, lease if started else None),
        "id": job.id,
        "status": job.state.value,
        "created_at": timestamp(job.created_at),
        "started_at": timestamp(job.started_at),
        "completed_at": None,
        "canceled_at": None,
        "failed_at": None,
        "checkpoint_bucket": CHECKPOINTS_BUCKET,
        "checkpoint_prefix": attempt_prefix(job.id, job.epoch if started else job.epoch + 1),
        "resume_from": resume_from,
        "instance_data_keys": keys.get("instance", []),
        "class_data_keys": keys.get("class", []),
    }


def _model_of(job: Job) -> Artifact | None:
    """The original knew one output. It is the recipe's first, whatever pictures lie beside it."""
    wanted = job.spec.outputs[:1]
    named = (artifact for artifact in job.artifacts if artifact.path in wanted)
    return next(named, job.artifacts[0] if job.artifacts else None)


def event_name(type_: EventType) -> str:
    """The original's name of an event; ours where it had none."""
    return _EVENT_NAMES.get(type_, type_.value)


def timestamp(instant: int | None) -> str | None:
    return None if instant is None else datetime.fromtimestamp(instant, UTC).strftime("%Y-%m-%d %H:%M:%S")


MAX_KEYS_BYTES = 5_000_000
"""Of all names as Lambda sends them, whose answers end at 6 MB; the job's other columns take less than the rest."""


class TooManyNames(Exception):  # noqa: N818 - no error of ours: the job is none for this client
    """No answer could hold the names of this job's inputs. Half a list would be trained on as if it were the whole."""

    def __init__(self, prefix: str) -> None:
        super().__init__(
            f"the names of its inputs, as below {prefix[:200]}, take more than the {MAX_KEYS_BYTES:,} bytes that a "
            "client of the original orchestrator can be told at once: let Baton's agent (python -m gpu_client.agent) "
            "take this job, or split the data"
        )


def input_keys(context: Context, call: Call, job: Job) -> dict[str, list[str]]:
    """The keys of each input by the name it is known under, `instance` and `class`. Raises TooManyNames."""
    keys: dict[str, list[str]] = {}
    room_bytes = MAX_KEYS_BYTES
    for ref in job.spec.inputs:
        known = keys.setdefault(ref.into, [])
        for key in _below(context, call, ref.prefix):
            room_bytes -= sent_bytes(json.dumps(key)) + 2  # a comma and a space
            if room_bytes < 0:
                raise TooManyNames(ref.prefix)
            known.append(key)
    return keys


def _below(context: Context, call: Call, prefix: str) -> Iterator[str]:
    pages = every_item(lambda cursor: context.objects.list(call.tenant, DATA_BUCKET, prefix, limit=1000, cursor=cursor))
    # A manifest they would take for an image.
    return (entry.key for entry in pages if not is_manifest(entry.key))

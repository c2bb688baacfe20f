"""Documents lose nothing."""

from __future__ import annotations

import types
import typing
from typing import Any

import pytest
from pydantic import BaseModel

from baton.contract.errors import ErrorCode
from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import Progress
from functions.domain.checkpoints.shared_outputs import SharedRecord
from functions.domain.errors import Refusal
from functions.domain.records import (
    Attempt,
    CheckpointRecord,
    CommandRecord,
    ControlRecord,
    Event,
    Job,
    RulesRecord,
    RuleStateRecord,
    ScalingRecord,
    Spec,
    TransferGrant,
)
from functions.domain.worlds.data_pool import DataRecord
from functions.domain.worlds.world_record import WorldRecord, WorldTensors
from functions.fleet.ledger import DeploymentLedger, Ledger
from functions.fleet.records import FleetEvent, Machine, OrphanMachine, Quarantine, Reputation, StoredFleet
from functions.storage.dynamodb.items.documents import MAX_DOCUMENT_BYTES, dump, load


def models_within(annotation: Any) -> set[type[BaseModel]]:
    """The models that a type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {model for part in typing.get_args(annotation) for model in models_within(part)}


def all_models() -> set[type[BaseModel]]:
    found: set[type[BaseModel]] = set()
    pending: set[type[BaseModel]] = {Attempt, CheckpointRecord, Event, Job, SharedRecord, TransferGrant, Progress}
    pending |= {RulesRecord, CommandRecord, ControlRecord, RuleStateRecord, ScalingRecord}
    pending |= {DataRecord, WorldRecord, WorldTensors}
    pending |= {StoredFleet, Machine, Ledger, DeploymentLedger, FleetEvent, Quarantine, OrphanMachine, Reputation}
    while pending:
        model = pending.pop()
        found.add(model)
        for field in model.model_fields.values():
            pending |= models_within(field.annotation) - found
    return found


def nullable(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType) and type(None) in typing.get_args(
        annotation
    )


def test_a_field_that_is_left_out_comes_back_as_none() -> None:
    models = all_models()
    assert len(models) > 10
    for model in models:
        for name, field in model.model_fields.items():
            if nullable(field.annotation):
                assert field.default is None, f"{model.__name__}.{name} would come back as {field.default!r}"


STORED_DEFAULTS: dict[str, dict[str, Any]] = {
    "Attempt": {"log_tail": []},
    "CheckpointRecord": {
        "new_bytes": 0,
        "metrics": {},
        "branches": [],
        "pinned": False,
        "damaged": False,
        "protected_until": 0,
        "tag": "",
    },
    "Event": {"data": {}},
    "FleetEvent": {"reason": "", "usd": 0},
    "FleetSpec": {
        "choose": "price",
        "gpu_models": [],
        "min_vram_gib": 0,
        "disk_gib": 40,
        "min_disk_write_mb_s": 20,
        "min_download_mbit_s": 20,
        "market": "either",
        "regions": [],
        "queues": ["default"],
        "tags": {},
        "min": 0,
        "max": 1,
        "idle_timeout_s": 300,
        "max_hours": 24,
    },
    "Goodput": {
        "productive_s": 0.0,
        "repeated_s": 0.0,
        "stalled_s": 0.0,
        "transferring_s": 0.0,
        "idle_s": 0.0,
        "checkpoints_committed": 0,
        "checkpoints_skipped": 0,
        "raw_bytes": 0,
        "reused_bytes": 0,
        "encoded_bytes": 0,
        "uploaded_bytes": 0,
    },
    "InputRef": {"into": ""},
    "Job": {
        "rev": 0,
        "state": "pending",
        "queue": "default",
        "shard": 0,
        "priority": 50,
        "epoch": 0,
        "event_seq": 0,
        "counters": {},
        "fruitless_interruptions": 0,
        "fruitless_failures": 0,
        "fruitless_node_faults": 0,
        "stale": False,
        "pause_requested": False,
        "avoid": {},
        "branches": [],
        "artifacts": [],
        "rules_revision": 0,
        "commands_seq": 0,
        "commands_void": 0,
        "decided": 0,
        "rollbacks": [],
        "watched": False,
        "leaving": False,
        "cost_usd": 0.0,
        "priced_s": 0,
        "ends": 0,
        "generation": 0,
        "keeps_counters": False,
        "seats": [],
        "settled": False,
    },
    "Breaker": {"failures": 0, "failed_at": 0, "reason": "", "machine": "", "pause_s": 0, "paused_until": 0},
    "Ledger": {
        "version": 0,
        "spent_usd": 0,
        "day": "",
        "day_usd": 0,
        "month": "",
        "month_usd": 0,
        "warned": [],
        "waits": "",
        "exhausted": "",
        "breakers": {},
        "forming": {},
    },
    "Machine": {
        "version": 0,
        "state": "planned",
        "reason": "",
        "duplicates": [],
        "reallocated": [],
        "spent_usd": 0,
        "reserved_usd": 0,
        "absences": [],
        "charged_before_usd": 0,
        "watch_over": False,
    },
    "Offer": {
        "repeatable": False,
        "gpus": 1,
        "vram_gib": 0,
        "disk_gib": 0,
        "spot": False,
        "regions": [],
        "usd_per_gb": 0,
        "interruptions_per_hour": 0,
        "boot_s": 180,
    },
    "Quarantine": {"failures": 1, "reason": ""},
    "DeploymentLedger": {
        "version": 0,
        "spent_usd": 0,
        "day": "",
        "day_usd": 0,
        "month": "",
        "month_usd": 0,
        "warned": [],
        "waits": "",
        "exhausted": "",
        "breakers": {},
        "forming": {},
        "reserved_usd": 0,
        "watch_until": 0,
    },
    "Terms": {"tags": {}},
    "StoredFleet": {"version": 0, "stopped": False, "stop_reason": "", "retired": False},
    "RuleStateRecord": {"revision": 0, "epoch": 0, "step": 0, "seen_at": 0, "errors": 0, "member": {}, "orders": []},
    "ScaleOrder": {"copies": 0, "leaving": []},
    "ScalingRecord": {"copies": [], "leaving": [], "expires_at": 0},
    "MemberRecord": {"values": [], "expires_at": 0},
    "CommandRecord": {"arguments": {}, "status": "waiting", "epoch": 0, "message": "", "revision": 0},
    "ControlRecord": {"reason": "", "statuses": []},
    "RuleStatus": {"said": "", "fires": 0},
    "RolledBack": {"skip": 0, "lr_factor": 1.0, "commands_seq": 0},
    "EndedBy": {"revision": 0, "message": ""},
    "JobCounters": {
        "attempts": 0,
        "failures": 0,
        "interruptions": 0,
        "node_faults": 0,
        "releases": 0,
        "runtime_s": 0,
    },
    "Policy": {
        "max_failures": 3,
        "max_interruptions": 100,
        "max_fruitless_interruptions": 10,
        "max_node_faults": 10,
        "backoff_s": 15,
        "avoid_machine_s": 86_400,
        "heartbeat_interval_s": 30,
        "stop_grace_s": 30,
        "retention": {},
    },
    "Progress": {"metrics": {}, "nonfinite": {}},
    "OutputCheck": {"min_bytes": 0, "min_files": 0},
    "CommandOrder": {"environment": {}},
    "Reason": {"message": ""},
    "Reputation": {"starts": 0, "hours": 0, "losses": 0, "registered": 0, "register_s": 0},
    "Requirements": {"gpu_models": []},
    "Retention": {"keep_last": 3, "keep_best_mode": "min"},
    "RunPlan": {"outputs": [], "optional_outputs": [], "cleanup": [], "shared": []},
    "StepOrder": {
        "environment": {},
        "retries": 0,
        "retry_wait_s": 10,
        "outputs": [],
        "optional_outputs": [],
        "checkpoints": "directories",
    },
    "Spec": {
        "parameters": {},
        "environment": {},
        "inputs": [],
        "outputs": [],
        "requirements": {},
        "policy": {},
        "tags": {},
        "rings": [],
    },
    "NodesSpec": {"min": 1},
    "SeatMark": {"epoch": 0, "running": False, "world_epoch": 0},
    "NodeProgram": {"tensors": [], "settings": {}},
    "RoundReport": {"tokens": 0, "round_s": 0.0, "reduce_s": 0.0, "sent_bytes": 0, "repaired": 0},
    "WorldNode": {
        "addresses": [],
        "certificate": "",
        "round": 0,
        "ready": True,
        "state": "",
        "tokens": 0,
        "relay": False,
        "recent_tokens": [],
    },
    "DataProgress": {"finished": [], "offsets": []},
    "DataRecord": {"epoch": 0, "round": 0, "trained": {}, "leases": {}},
    "WorldRecord": {"epoch": 0, "formed_epoch": 0, "round": 0, "members": [], "joining": [], "rounds": []},
}
"""Defaults of the fields that stored documents leave out. `{}` stands for a model with its own defaults."""


def test_a_default_that_stored_documents_rely_on_does_not_change() -> None:
    """A job keeps the values of its submission. A changed default belongs into the submission of jobs."""
    found: dict[str, dict[str, Any]] = {}
    for model in all_models():
        for name, field in model.model_fields.items():
            value = field.get_default(call_default_factory=True)
            if field.is_required() or value is None:
                continue
            shown = value.model_dump(exclude_defaults=True) if isinstance(value, BaseModel) else value
            found.setdefault(model.__name__, {})[name] = shown
    assert found == STORED_DEFAULTS


def test_documents_written_in_full_are_read_alike() -> None:
    job = Job(id="j", tenant="t", spec=Spec(command=["x"]), created_at=1, updated_at=1)
    for full in (job.model_dump_json(), job.model_dump_json(exclude_none=True)):
        assert load(Job, full) == job == load(Job, dump(job))
    assert dump(job) == '{"id":"j","tenant":"t","spec":{"command":["x"]},"created_at":1,"updated_at":1}'


def test_none_within_free_form_values_stays() -> None:
    data = {"a": None, "b": [None, {"c": None}], "d": {"": None}, "f": 5e-324, "g": 2**70, "h": -0.0, "i": 1.0}
    event = Event(seq=1, type=EventType.SUBMITTED, at=1, epoch=0, data=data)
    assert load(Event, dump(event)) == event
    assert str(load(Event, dump(event)).data) == str(data)
    job = Job(
        id="j", tenant="t", spec=Spec(command=["\u00fc\U0001f600\x00"], parameters=data), created_at=1, updated_at=1
    )
    assert load(Job, dump(job)) == job


def test_the_size_is_counted_in_bytes() -> None:
    fits = Spec(command=["x" * (MAX_DOCUMENT_BYTES - 1000)])
    assert load(Spec, dump(fits)) == fits
    with pytest.raises(Refusal) as refused:
        dump(Spec(command=["\u00fc" * (MAX_DOCUMENT_BYTES // 2)]))
    assert refused.value.code is ErrorCode.PAYLOAD_TOO_LARGE

"""Every field of every request is bounded: text, numbers, lists, maps."""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from baton.contract.admin.keys import KeyCreate
from baton.contract.base import (
    MAX_OBJECT_BYTES,
    MAX_PARAMETERS_BYTES,
    MAX_PARAMETERS_DEPTH,
    MAX_STEP,
    WireModel,
    depth_of,
)
from baton.contract.checkpoints.calls import BlobUrlsRequest, DamagedRequest
from baton.contract.checkpoints.manifest import (
    MAX_CHUNK_BYTES,
    MAX_MANIFEST_CHUNKS,
    MAX_MANIFEST_PACKS,
    Chunk,
    ChunkedFile,
    Pack,
)
from baton.contract.jobs.dreambooth import DreamboothSubmit
from baton.contract.jobs.job import FailureClass, InputRef, JobState, JobSubmit, ReasonCode, RetryRequest, StopRequest
from baton.contract.jobs.policy import Policy, Requirements, Retention
from baton.contract.objects.transfers import MultipartComplete, ObjectQuery, TokenQuery, UploadFile
from baton.contract.worker.calls import (
    MAX_ARTIFACT_PATHS_BYTES,
    MAX_ARTIFACTS,
    ArtifactsRequest,
    CompleteRequest,
    FailRequest,
    HeartbeatRequest,
    ReleaseRequest,
    WorkQuery,
)
from baton.contract.worker.output import LogChunk
from functions.api.http.route import all_routes
from tests.kits.api.factories import CRC64, JOB_ID, digest

REQUEST_MODULES = (
    "admin.keys",
    "admin.sessions",
    "admin.shares",
    "checkpoints.calls",
    "elastic.nodes",
    "elastic.data",
    "elastic.relay",
    "elastic.world",
    "fleets.registries",
    "jobs.curves",
    "jobs.job",
    "jobs.policy",
    "objects.transfers",
    "recipes.calls",
    "recipes.model",
    "worker.calls",
)
EXEMPT = {
    # Bounded as a whole, by size and depth: see the tests below.
    ("JobSubmit", "parameters"),
    # Any finite number; how many is bounded.
    ("Manifest", "metrics"),
    ("HeartbeatRequest", "metrics"),
    ("CompleteRequest", "metrics"),
    # A document's size is bounded as a whole, and a default by the parameter's own bounds.
    ("Parameter", "default"),
}


def request_models() -> list[type[WireModel]]:
    """Return every model of a request, with the nested ones."""
    return [
        member
        for name in REQUEST_MODULES
        for member in vars(import_module(f"baton.contract.{name}")).values()
        if inspect.isclass(member) and issubclass(member, WireModel) and member.__module__ == f"baton.contract.{name}"
    ]


def unbounded(schema: dict[str, Any], path: str) -> list[str]:
    """Places below `schema` where a value of any size would pass."""
    if "$ref" in schema or "enum" in schema or "const" in schema or schema.get("type") in ("boolean", "null"):
        return []
    if "anyOf" in schema:
        return [place for option in schema["anyOf"] for place in unbounded(option, path)]
    match schema.get("type"):
        case "string":
            return [] if "maxLength" in schema or "pattern" in schema else [path]
        case "integer" | "number":
            low, high = "minimum" in schema or "exclusiveMinimum" in schema, "maximum" in schema
            return [] if low and high else [path]
        case "array":
            return ([] if "maxItems" in schema else [path]) + unbounded(schema["items"], f"{path}[]")
        case "object":
            inner = schema.get("additionalProperties")
            below = unbounded(inner, f"{path}{{}}") if isinstance(inner, dict) else []
            return ([] if "maxProperties" in schema else [path]) + below
    return [path]


def query_models() -> list[type[BaseModel]]:
    """Queries that only one call has stand beside it, not in the contract."""
    queries = {route.query for route in all_routes() if route.query is not None} - set(request_models())
    return sorted(queries, key=lambda model: model.__name__)


@pytest.mark.parametrize("model", [*request_models(), *query_models()], ids=lambda model: model.__name__)
def test_every_field_is_bounded(model: type[BaseModel]) -> None:
    properties = model.model_json_schema()["properties"]
    checked = {name: field for name, field in properties.items() if (model.__name__, name) not in EXEMPT}
    assert {name: places for name, field in checked.items() if (places := unbounded(field, name))} == {}


VALID: dict[type[WireModel], dict[str, Any]] = {
    JobSubmit: {"command": ["train"]},
    DreamboothSubmit: {"instance_prompt": "timberdog", "instance_data_prefix": "timber/"},
    Policy: {},
    Requirements: {},
    Retention: {},
    RetryRequest: {},
    StopRequest: {},
    InputRef: {"prefix": "digits/"},
    KeyCreate: {"name": "laptop", "scopes": ["submit"]},
    Pack: {"blake3": "a" * 64, "size_bytes": 1, "crc64nvme": CRC64},
    Chunk: {"blake3": "a" * 64, "size_bytes": 8, "pack": 0},
    ChunkedFile: {"path": "a", "size_bytes": 1, "chunks": [0]},
    UploadFile: {"key": "a", "size_bytes": 1, "crc64nvme": CRC64},
    BlobUrlsRequest: {},
    DamagedRequest: {"epoch": 1},
    HeartbeatRequest: {},
    WorkQuery: {},
    FailRequest: {"job_id": JOB_ID},
    ReleaseRequest: {"job_id": JOB_ID},
    CompleteRequest: {"job_id": JOB_ID},
    LogChunk: {"first_line": 0, "lines": ["x"]},
    ObjectQuery: {},
    MultipartComplete: {},
    TokenQuery: {"bucket": "training-data", "key": "a"},
}

REFUSED: list[tuple[type[WireModel], str, Any]] = [
    (JobSubmit, "priority", -1),
    (JobSubmit, "priority", 101),
    (JobSubmit, "queue", "Upper"),
    (JobSubmit, "queue", ""),
    (JobSubmit, "queue", "a" * 64),
    (JobSubmit, "queue", "default\n"),
    (JobSubmit, "command", []),
    (JobSubmit, "command", [" "]),
    (JobSubmit, "command", ["a\0b"]),
    (JobSubmit, "command", ["a"] * 257),
    (JobSubmit, "name", "a" * 129),
    (JobSubmit, "recipe", "digits@0"),
    (JobSubmit, "environment", {"1A": "x"}),
    (JobSubmit, "environment", {"A=B": "x"}),
    (JobSubmit, "environment", {"A": "x\0y"}),
    (JobSubmit, "environment", {f"A{n}": "" for n in range(65)}),
    (JobSubmit, "outputs", ["../model"]),
    (JobSubmit, "outputs", ["/etc/passwd"]),
    (JobSubmit, "inputs", [{"prefix": "a/"}] * 33),
    (JobSubmit, "tags", {"": "x"}),
    (JobSubmit, "tags", {str(n): "x" for n in range(51)}),
    (DreamboothSubmit, "instance_prompt", ""),
    (DreamboothSubmit, "instance_data_prefix", ""),
    (DreamboothSubmit, "max_train_steps", -1),
    (DreamboothSubmit, "max_train_steps", 0),
    (DreamboothSubmit, "learning_rate", 0),
    (DreamboothSubmit, "learning_rate", float("nan")),
    (DreamboothSubmit, "mixed_precision", "fp8"),
    (DreamboothSubmit, "lr_scheduler", "magic"),
    (Policy, "max_failures", 0),
    (Policy, "max_failures", 1001),
    (Policy, "heartbeat_interval_s", 0),
    (Policy, "heartbeat_interval_s", 601),
    (Policy, "backoff_s", -1),
    (Policy, "max_runtime_s", 0),
    (Policy, "deadline_at", -1),
    (Policy, "stop_grace_s", 3601),
    (Policy, "retention", {"keep_last": 0}),
    (Requirements, "min_vram_gib", float("inf")),
    (Requirements, "min_vram_gib", -0.1),
    (Requirements, "gpu_models", [""]),
    (Retention, "keep_every_steps", 0),
    (Retention, "keep_best_metric", "no spaces"),
    (RetryRequest, "from_step", -1),
    (RetryRequest, "from_step", MAX_STEP + 1),
    (StopRequest, "message", "a" * 513),
    (InputRef, "into", ".."),
    (InputRef, "into", "/abs"),
    (InputRef, "prefix", "../"),
    (KeyCreate, "name", ""),
    (KeyCreate, "scopes", []),
    (KeyCreate, "scopes", ["root"]),
    (KeyCreate, "expires_in_s", 59),
    (Pack, "size_bytes", MAX_OBJECT_BYTES + 1),
    (Pack, "crc64nvme", ""),
    (Chunk, "size_bytes", 0),
    (Chunk, "size_bytes", MAX_CHUNK_BYTES + 1),
    (Chunk, "pack", MAX_MANIFEST_PACKS),
    (Chunk, "pack", -1),
    (Chunk, "offset", -1),
    (Chunk, "length_bytes", 0),
    (Chunk, "codec", "gzip"),
    (Chunk, "width", 3),
    (ChunkedFile, "chunks", [MAX_MANIFEST_CHUNKS]),
    (ChunkedFile, "chunks", [-1]),
    (ChunkedFile, "path", "../a"),
    (BlobUrlsRequest, "blake3", ["a" * 64] * 1001),
    (DamagedRequest, "message", "a" * 513),
    (HeartbeatRequest, "step", -1),
    (HeartbeatRequest, "step", 1e300),
    (HeartbeatRequest, "metrics", {"loss": float("nan")}),
    (HeartbeatRequest, "metrics", {"loss": "high"}),
    (HeartbeatRequest, "metrics", {f"m{n}": 0.0 for n in range(65)}),
    (HeartbeatRequest, "phase", "Training!"),
    (HeartbeatRequest, "machine_id", "has space"),
    (HeartbeatRequest, "machine_id", "a" * 129),
    (WorkQuery, "vram_gib", -1),
    (WorkQuery, "gpus", 65),
    (FailRequest, "job_id", "not-a-uuid"),
    (FailRequest, "job_id", JOB_ID.upper()),
    (FailRequest, "job_id", JOB_ID + "\n"),
    (FailRequest, "failure_class", "bad_luck"),
    (FailRequest, "signal", 65),
    (FailRequest, "log_tail", ["x"] * 101),
    (ReleaseRequest, "reason", "Because I say so"),
    (LogChunk, "first_line", -1),
    (LogChunk, "lines", []),
    (LogChunk, "points", [{"step": 1, "at": 1.0}] * 1001),
    (LogChunk, "points", [{"step": 1, "at": 1.0, "metrics": {"loss": "infinite"}}]),
    (LogChunk, "points", [{"step": 1, "at": 1.0, "metrics": {"a b": 1.0}}]),
    (LogChunk, "points", [{"step": -1, "at": 1.0}]),
    (LogChunk, "lines", ["a" * 4001]),
    (ObjectQuery, "limit", 0),
    (ObjectQuery, "limit", 1001),
    (ObjectQuery, "cursor", ""),
    (MultipartComplete, "parts", [{"etag": "x", "partNumber": 0}]),
    (MultipartComplete, "parts", [{"etag": "x", "partNumber": 10_001}]),
    (TokenQuery, "bucket", ""),
]


@pytest.mark.parametrize("model", VALID, ids=lambda model: model.__name__)
def test_the_base_of_each_case_is_valid(model: type[WireModel]) -> None:
    model.model_validate(VALID[model])


@pytest.mark.parametrize(("model", "field", "value"), REFUSED)
def test_out_of_bounds_is_refused_and_named(model: type[WireModel], field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({**VALID[model], field: value})
    assert {problem["loc"][0] for problem in caught.value.errors()} == {field}


def test_exactly_one_way_to_run() -> None:
    for fields in ({}, {"recipe": "digits@1", "command": ["train"]}):
        with pytest.raises(ValidationError, match="exactly one of 'recipe' and 'command'"):
            JobSubmit.model_validate(fields)


def test_parameters_of_a_megabyte_are_refused_with_both_sizes() -> None:
    with pytest.raises(ValidationError, match=rf"10000\d\d bytes; at most {MAX_PARAMETERS_BYTES}"):
        JobSubmit(command=["train"], parameters={"prompt": "x" * 1_000_000})


def test_parameters_may_have_exactly_the_allowed_size() -> None:
    room = MAX_PARAMETERS_BYTES - len(json.dumps({"p": ""}))
    JobSubmit(command=["train"], parameters={"p": "x" * room})
    with pytest.raises(ValidationError):
        JobSubmit(command=["train"], parameters={"p": "x" * (room + 1)})


def test_parameters_are_measured_as_they_are_stored() -> None:
    room = MAX_PARAMETERS_BYTES - len(json.dumps({"p": ""}))
    JobSubmit(command=["train"], parameters={"p": "é" * (room // 2)})
    with pytest.raises(ValidationError):
        JobSubmit(command=["train"], parameters={"p": "é" * (room // 2 + 1)})


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_parameters_are_finite(number: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        JobSubmit(command=["train"], parameters={"a": [{"b": number}]})


def test_parameters_that_no_utf8_can_spell_are_refused() -> None:
    """JSON can: "\\ud800". Such a job could be accepted and never be stored."""
    for parameters in (json.loads('{"a": "\\ud800"}'), json.loads('{"\\ud800": 1}')):
        with pytest.raises(ValidationError):
            JobSubmit.model_validate({"command": ["train"], "parameters": parameters})


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(("value", "depth"), [(1, 0), ({}, 1), ([[]], 2), ({"a": [{"b": 1}]}, 3), (nested(900), 900)])
def test_depth(value: Any, depth: int) -> None:
    assert depth_of(value) == depth


def test_deep_parameters_are_refused() -> None:
    """JSON readers stop at some depth: a job nested 200 deep could be stored, and never be read again."""
    JobSubmit(command=["train"], parameters={"a": nested(MAX_PARAMETERS_DEPTH - 1)})
    with pytest.raises(ValidationError, match="nested too deeply"):
        JobSubmit(command=["train"], parameters={"a": nested(MAX_PARAMETERS_DEPTH)})


def artifact(path: str) -> dict[str, Any]:
    return {"path": path, "size_bytes": 1, "crc64nvme": CRC64, "blake3": digest(path)}


@pytest.mark.parametrize("model", [ArtifactsRequest, CompleteRequest])
def test_artifacts_fit_into_the_finished_job(model: type[ArtifactsRequest] | type[CompleteRequest]) -> None:
    rest = {"job_id": JOB_ID} if model is CompleteRequest else {}
    model.model_validate({"artifacts": [artifact(f"model/{n}") for n in range(MAX_ARTIFACTS)], **rest})
    long = "x" * 790
    for paths, said in (
        ([f"model/{n}" for n in range(MAX_ARTIFACTS + 1)], "at most 500"),
        ([f"{long}{n}" for n in range(MAX_ARTIFACT_PATHS_BYTES // 790 + 1)], "bytes in total"),
        (["same", "same"], "twice"),
    ):
        with pytest.raises(ValidationError, match=said):
            model.model_validate({"artifacts": [artifact(path) for path in paths], **rest})


def test_every_state_and_failure_class_is_placed() -> None:
    assert {state for state in JobState if state.terminal} == {"complete", "failed", "canceled"}
    assert {c for c in FailureClass if c.node_fault} == {"disk_full", "node_fault", "transfer_failed"}
    assert not {*ReasonCode} & {*FailureClass}, "a reason's code tells which of the two it is"

"""Output lines and metric points of a training: the chunks that a worker sends, and the pages that a user reads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from baton.contract.base import AnswerModel, Epoch, EpochSeconds, MetricName, Step, WireModel

MetricReading = Annotated[float, Field(allow_inf_nan=False)] | Literal["nan", "inf", "-inf"]
"""Value of a metric; JSON has no number for NaN and the infinities."""
MAX_POINTS = 1000
"""Points of one chunk. The worker thins out points that a training reports faster than the worker sends chunks."""
Readings = Annotated[dict[MetricName, MetricReading], Field(max_length=64)]
PointAt = Annotated[float, Field(ge=0, le=10**11, allow_inf_nan=False, description="Seconds since 1970, server clock")]


class ReportedPoint(WireModel):
    """Metrics that the training reported at a step.

    Example: `{"step": 120, "at": 1790000000.25, "metrics": {"loss": 0.31, "grad_norm": "nan"}}`
    """

    step: Step
    at: PointAt
    metrics: Readings = {}


class LogChunk(WireModel):
    """Body of `POST /job/{id}/logs`: lines of the training's output, and points that it reported meanwhile.

    Both are numbered from 0 within the attempt; a chunk may have only lines, or only points.

    Example: `{"first_line": 0, "lines": ["step 1 loss 2.3"], "first_point": 0,
    "points": [{"step": 1, "at": 1790000000.25, "metrics": {"loss": 2.3}}]}`
    """

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"lines": {"minItems": 1}}},
                {"properties": {"points": {"minItems": 1}}, "required": ["points"]},
            ]
        }
    )

    first_line: Annotated[int, Field(ge=0, le=10**12)]
    first_point: Annotated[int, Field(ge=0, le=10**12)] = 0
    points: Annotated[list[ReportedPoint], Field(max_length=MAX_POINTS)] = []
    lines: Annotated[list[Annotated[str, Field(max_length=4000)]], Field(max_length=500)]
    dropped_bytes: Annotated[int, Field(ge=0, le=10**15)] = 0
    """Bytes that the worker dropped before this chunk because the training wrote faster than the worker could send."""

    @field_validator("lines")
    @classmethod
    def _holds_something(cls, lines: list[str], info: ValidationInfo) -> list[str]:
        if not lines and info.data.get("points") == []:
            raise ValueError("a chunk has lines, or points, or both")
        return lines


LONGEST_LOG_WAIT_S = 300.0


def log_wait_s(age_s: float) -> float:
    """Return the seconds for which the worker may delay a chunk that is not full, in an attempt of age `age_s`.

    A user may be watching the beginning of an attempt, so its first output is sent at once; later hours need few calls.
    """
    return min(max(age_s, 0.0) / 20, LONGEST_LOG_WAIT_S)


class LogLine(AnswerModel):
    """Line of output. Example: `{"epoch": 1, "line": 0, "text": "step 1 loss 2.3", "at": 1790000000}`"""

    epoch: Epoch
    line: int
    text: str
    at: EpochSeconds
    seat: int | None = None
    """Node of an elastic job."""


class LogPage(AnswerModel):
    """Page of a job's output, oldest first. Poll with `next_cursor` to follow.

    Without `seat`, the lines of an elastic job come node by node; to follow, name a node.

    Example: `{"lines": [], "next_cursor": null}`
    """

    lines: list[LogLine]
    next_cursor: str | None = None


class MetricPoint(AnswerModel):
    """Metrics that one attempt reported at a step; several points of a step have different metrics.

    Example: `{"epoch": 1, "step": 120, "at": 1790000000.25, "metrics": {"loss": 0.31, "grad_norm": "nan"}}`
    """

    epoch: Epoch
    step: Step
    at: PointAt
    metrics: Readings
    seat: int | None = None
    """Node of an elastic job."""

    def numbers(self) -> dict[str, float]:
        """Return the metrics as floats, including NaN and infinity."""
        return {name: float(value) for name, value in self.metrics.items()}


class MetricPage(AnswerModel):
    """Page of the metrics that a job reported, oldest first, attempt after attempt.

    Steps that an attempt repeats are there twice. Poll with `next_cursor` to follow. Without `seat`, the points of an
    elastic job come node by node; to follow, name a node.

    Example: `{"points": [], "next_cursor": null}`
    """

    points: list[MetricPoint]
    next_cursor: str | None = None

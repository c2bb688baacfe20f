"""Curves of a job's metrics, thinned to the width of a screen."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton.contract.base import AnswerModel, Epoch, EpochSeconds, MetricName, Step, WireModel
from baton.contract.elastic.nodes import MAX_NODES

MAX_CURVE_NAMES = 16
_NAME = r"[A-Za-z_][A-Za-z0-9_./-]{0,63}"


class CurvesQuery(WireModel):
    """Query of `GET /job/{id}/curves`. Example: `?names=loss,eval.loss&width=800&from_step=1000&to_step=2000`"""

    names: (
        Annotated[
            str,
            Field(
                max_length=MAX_CURVE_NAMES * 65,
                pattern=rf"^{_NAME}(,{_NAME}){{0,{MAX_CURVE_NAMES - 1}}}$",
                description="Metrics, separated by commas",
            ),
        ]
        | None
    ) = None
    """Unset: the first metric of `names` in the answer."""
    width: Annotated[int, Field(ge=16, le=4096, description="Buckets of the range of steps, for example pixels")] = 1000
    from_step: Step = 0
    to_step: Step | None = None
    """Unset: the newest step."""
    seat: Annotated[int, Field(ge=0, le=MAX_NODES - 1)] | None = None
    """Node of an elastic job; unset: node 0."""


class MetricCurve(AnswerModel):
    """Curve of one metric in one attempt, in the order of the reports. Each entry covers the steps up to its step.

    Example: `{"epoch": 1, "name": "loss", "steps": [10, 20], "means": [2.3, 2.1], "lows": [2.2, 2.0], ...}`
    """

    epoch: Epoch
    name: MetricName
    steps: list[Step]
    means: list[float | None]
    """Mean of the finite readings; null without one."""
    lows: list[float | None] | None = None
    highs: list[float | None] | None = None
    """Both are null if each entry is one reading."""
    not_finite: list[Step] = []
    """Entries that contain NaN or an infinity."""


class CurvesView(AnswerModel):
    """Curves of a job, attempt by attempt. Steps that an attempt repeats are in the curves of both attempts.

    The metrics `names` are those that the job reported: the loss first, then evaluations, then the others. The answer
    covers the points of the first 32 chunks that no call has read before; `complete` is false while more are stored,
    and the next call continues. A range of steps lets the call read the finer summaries, and at last the points, within
    the range; at most 128 objects more. The answer has at most 40,000 entries: with many attempts they are wider than
    requested. With `If-None-Match` an unchanged answer is 304.

    Example: `{"names": ["loss"], "first_step": 1, "last_step": 1000000, "curves": [], "complete": true}`
    """

    names: list[MetricName]
    seat: int | None = None
    """Node of an elastic job."""
    first_step: Step | None = None
    last_step: Step | None = None
    """Range of steps of all points that were read; null without points."""
    curves: list[MetricCurve]
    complete: bool
    next_at: EpochSeconds | None = None
    """Time before which a running job that reports seldom stores no further points."""

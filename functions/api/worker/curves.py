"""A job's curves: read, thinned, from the chunks of its output and from summaries of these chunks.

A summary replaces 16 neighboring chunks, or 16 summaries, by about 1,024 buckets of each curve. The first call that
needs a summary stores the summary, so that a later call reads few objects however many points a job has reported.

A chunk is never stored behind a summary, where no call would read the chunk: an agent sends one chunk after the other,
and a chunk of a later attempt is summarized only `_SETTLED_S` after the first chunk of this attempt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from baton.contract.errors import ErrorCode
from baton.contract.jobs.curves import CurvesQuery, CurvesView, MetricCurve
from baton.contract.jobs.job import JobState
from baton.contract.names import CHECKPOINTS_BUCKET
from baton.contract.worker.output import log_wait_s
from functions.api.http.context import ApiCall, Context, NotModified, WithHeaders, require_job
from functions.api.worker.logs import POINT_LETTERS, choose_owners
from functions.domain.checkpoints.object_keys import curves_prefix, logs_prefix
from functions.domain.checkpoints.packs import FUNCTION_TIMEOUT_S
from functions.domain.curve_thinning import (
    CurveBucket,
    CurveKey,
    Curves,
    cut,
    is_coarse,
    join_curves,
    read_points,
    thin_evenly,
    thin_to_width,
)
from functions.domain.errors import Refusal

_FANOUT = 16
_SUMMARY_BUCKETS = 1024
_NEW_CHUNKS = 32
_NEW_BYTES = 16_000_000
"""Limit of the chunks that a call reads for new summaries, except for the first summary."""
_FINER_OBJECTS = 128
_MAX_BUCKETS = 40_000
"""Limit of an answer, which then has at most 4 MB."""
_SETTLED_S = FUNCTION_TIMEOUT_S + 30
"""Seconds after the first chunk of an attempt, in which a call of the attempt before may still store a chunk."""
_NAMES_PER_PAGE = 1000
_MAX_PAGES = 50
_FIRST_ATTEMPT = f"{1:010d}"
_SUMMARY = re.compile(r"([1-9])/([0-9a-z-]{24,40})_([0-9a-z-]{24,40})")


class _Part(NamedTuple):
    """Chunk (level 0) or summary. `first`, `last`: names of the chunks in the part."""

    level: int
    first: str
    last: str


@dataclass(frozen=True)
class _Content:
    """Content of a part. `parts` and their ranges of steps: the parts that a summary replaces."""

    first_step: int
    last_step: int
    curves: Curves
    parts: Sequence[tuple[_Part, int, int]] = ()
    stored_at: int = 0
    """Time at which the control plane received a chunk; 0 for a summary."""


@dataclass(frozen=True)
class _Plan:
    """Parts that a call reads, oldest first: summaries, then chunks."""

    summaries: list[_Part]
    chunks: list[_Part]
    complete: bool


def read_curves(context: Context, call: ApiCall) -> WithHeaders | NotModified:
    """Return the curves of a job's metrics, thinned to a width."""
    query: CurvesQuery = call.query
    job = require_job(context, call, call.path["id"])
    seat, owner = choose_owners(job, query.seat if job.spec.nodes is None else query.seat or 0)[0]
    if query.to_step is not None and query.to_step < query.from_step:
        raise Refusal(ErrorCode.INVALID_VALUE, "The range of steps is empty.", field="to_step")
    store = _CurveStore(context, call.tenant, owner)
    plan = store.plan()
    newest = plan.chunks[-1:] or plan.summaries[-1:]
    state = [owner, query.model_dump(), [part.last for part in newest], plan.complete, job.state is JobState.RUNNING]
    etag = f'W/"{sha256(json.dumps(state).encode()).hexdigest()[:24]}"'
    # The chunks of an incomplete plan may wait for their summary alone.
    if plan.complete and call.headers.get("if-none-match") == etag:
        return NotModified(etag)
    contents = store.read(plan, call.now)
    names = sorted({name for content in contents for _, name in content.curves}, key=_rank)
    wanted = query.names.split(",") if query.names is not None else names[:1]
    seen = [content for content in contents if content.curves]
    first_step = min((content.first_step for content in seen), default=None)
    last_step = max((content.last_step for content in seen), default=None)
    newest_at = max((content.stored_at for content in contents), default=0)
    next_at = None
    if job.state is JobState.RUNNING and newest_at and job.started_at is not None:
        next_at = newest_at + int(log_wait_s(newest_at - job.started_at))
    curves: list[MetricCurve] = []
    if first_step is not None and last_step is not None:
        begin, end = max(query.from_step, first_step), last_step if query.to_step is None else query.to_step
        if begin <= end:
            curves = _view_curves(store.refine(contents, wanted, begin, end, query.width), begin, end, query.width)
    view = CurvesView(
        names=names,
        seat=seat,
        first_step=first_step,
        last_step=last_step,
        curves=curves,
        complete=plan.complete or len(contents) == len(plan.summaries) + len(plan.chunks),
        next_at=next_at,
    )
    return WithHeaders(view, {"etag": etag})


class _CurveStore:
    """Chunks and summaries of one job, or of one seat."""

    def __init__(self, context: Context, tenant: str, owner: str) -> None:
        self._objects = context.objects
        self._tenant = tenant
        self._chunks, self._summaries = logs_prefix(owner), curves_prefix(owner)

    def plan(self) -> _Plan:
        """List the newest summaries and the chunks behind them."""
        found = []
        for key, _ in self._list(self._summaries, None):
            named = _SUMMARY.fullmatch(key)
            if named is not None:
                found.append(_Part(int(named[1]), named[2], named[3]))
        summaries: list[_Part] = []
        for part in sorted(found, key=lambda part: (-part.level, part.first)):
            if not summaries or part.first > summaries[-1].last:
                summaries.append(part)
        chunks: list[_Part] = []
        size_bytes = 0
        for name, chunk_bytes in self._list(self._chunks, summaries[-1].last if summaries else None):
            if name[-1] not in POINT_LETTERS:
                continue
            size_bytes += chunk_bytes
            if len(chunks) >= _FANOUT and (len(chunks) >= _NEW_CHUNKS or size_bytes > _NEW_BYTES):
                return _Plan(summaries, chunks[: len(chunks) // _FANOUT * _FANOUT], False)
            chunks.append(_Part(0, name, name))
        return _Plan(summaries, chunks, True)

    def _list(self, prefix: str, after: str | None) -> Iterable[tuple[str, int]]:
        """Yield name and size in bytes of the objects behind a name."""
        for _ in range(_MAX_PAGES):
            start = None if after is None else prefix + after
            page = self._objects.list(self._tenant, CHECKPOINTS_BUCKET, prefix, limit=_NAMES_PER_PAGE, after=start)
            for entry in page.items:
                after = entry.key.removeprefix(prefix)
                yield after, entry.size_bytes
            if page.cursor is None or not page.items:
                return

    def read(self, plan: _Plan, now: int) -> list[_Content]:
        """Return the contents of the plan's parts, and store the summaries that are due.

        As many contents as parts: no summary is due.
        """
        parts = [*plan.summaries, *plan.chunks]
        found = list(zip(parts, self._load(parts), strict=True))
        settled = _count_settled(found, now)
        for level in range(9):
            begin = next((place for place, (part, _) in enumerate(found) if part.level == level), len(found))
            end = next((place for place, (part, _) in enumerate(found) if part.level < level), len(found))
            end = min(end, settled) if level == 0 else end
            while end - begin >= _FANOUT:
                found[begin : begin + _FANOUT] = [self._summarize(found[begin : begin + _FANOUT])]
                begin, end = begin + 1, end - _FANOUT + 1
        return [content for _, content in found]

    def _summarize(self, found: Sequence[tuple[_Part, _Content]]) -> tuple[_Part, _Content]:
        summary = _Part(found[0][0].level + 1, found[0][0].first, found[-1][0].last)
        joined = join_curves(content.curves for _, content in found)
        # A chunk whose points have no metrics has no steps.
        seen = [content for _, content in found if content.curves]
        content = _Content(
            min((content.first_step for content in seen), default=0),
            max((content.last_step for content in seen), default=0),
            {key: thin_evenly(buckets, _SUMMARY_BUCKETS) for key, buckets in joined.items()},
            [(part, content.first_step, content.last_step) for part, content in found],
        )
        document = {
            "steps": [content.first_step, content.last_step],
            "parts": content.parts,
            "curves": [[epoch, name, buckets] for (epoch, name), buckets in content.curves.items()],
        }
        self._objects.create(self._tenant, CHECKPOINTS_BUCKET, self._key(summary), to_json(document))
        return summary, content

    def _key(self, part: _Part) -> str:
        if part.level == 0:
            return f"{self._chunks}{part.first}"
        return f"{self._summaries}{part.level}/{part.first}_{part.last}"

    def _load(self, parts: Sequence[_Part]) -> list[_Content]:
        data = self._objects.read_many(self._tenant, CHECKPOINTS_BUCKET, [self._key(part) for part in parts])
        return [_parse(part, data.get(self._key(part))) for part in parts]

    def refine(
        self, contents: Sequence[_Content], names: Iterable[str], first_step: int, last_step: int, width: int
    ) -> dict[CurveKey, list[CurveBucket]]:
        """Return the curves within a range of steps, from finer parts where the summaries are too coarse."""
        wanted = set(names)
        room = _FINER_OBJECTS

        def finer(content: _Content) -> dict[CurveKey, list[CurveBucket]]:
            nonlocal room
            found = {key: list(buckets) for key, buckets in content.curves.items() if key[1] in wanted}
            share = min(content.last_step, last_step) - max(content.first_step, first_step) + 1
            # Half of the requested buckets are fine enough: a summary is read for a whole curve at the usual width.
            needed = width / 2 * share / (last_step - first_step + 1)
            coarse = [key for key, buckets in found.items() if is_coarse(buckets, first_step, last_step, needed)]
            parts = [part for part, begin, end in content.parts if begin <= last_step and end >= first_step]
            if not coarse or not parts or len(parts) > room:
                return found
            room -= len(parts)
            inside = join_curves(map(finer, self._load(parts)))
            for key in coarse:
                before = [bucket for bucket in found[key] if bucket.step < first_step]
                after = [bucket for bucket in found[key] if bucket.step > last_step]
                found[key] = [*before[-1:], *inside.get(key, ()), *after[-1:]]
            return found

        return {key: cut(found, first_step, last_step) for key, found in join_curves(map(finer, contents)).items()}


def _count_settled(found: Sequence[tuple[_Part, _Content]], now: int) -> int:
    """Return the number of parts before the first chunk of an attempt whose predecessor may still store a chunk."""
    before = _FIRST_ATTEMPT
    for place, (part, content) in enumerate(found):
        attempt = part.first.partition("-")[0]
        if attempt != before and content.stored_at > now - _SETTLED_S:
            return place
        before = part.last.partition("-")[0]
    return len(found)


def _parse(part: _Part, data: bytes | None) -> _Content:
    """Return the content of a part; an empty content for a part that does not exist any more."""
    if data is None:
        return _Content(0, 0, {})
    document: dict[str, Any] = from_json(data)
    if part.level == 0:
        points = [point for point in document["points"] if point["metrics"]]
        steps = [point["step"] for point in points]
        curves = read_points(document["epoch"], points)
        return _Content(min(steps, default=0), max(steps, default=0), curves, stored_at=document["at"])
    first_step, last_step = document["steps"]
    curves = {(epoch, name): [CurveBucket(*row) for row in rows] for epoch, name, rows in document["curves"]}
    parts = [(_Part(*known), begin, end) for known, begin, end in document["parts"]]
    return _Content(first_step, last_step, curves, parts)


def _view_curves(
    curves: dict[CurveKey, list[CurveBucket]], first_step: int, last_step: int, width: int
) -> list[MetricCurve]:
    while True:
        thinned = {key: thin_to_width(buckets, first_step, last_step, width) for key, buckets in curves.items()}
        if width == 1 or sum(map(len, thinned.values())) <= _MAX_BUCKETS:
            return [_view_curve(key, buckets) for key, buckets in sorted(thinned.items()) if buckets]
        width //= 2


def _view_curve(key: CurveKey, buckets: Sequence[CurveBucket]) -> MetricCurve:
    exact = all(bucket.exact() for bucket in buckets)
    return MetricCurve(
        epoch=key[0],
        name=key[1],
        steps=[bucket.step for bucket in buckets],
        means=[_round(bucket.total / bucket.readings) if bucket.readings else None for bucket in buckets],
        lows=None if exact else [bucket.low if bucket.readings else None for bucket in buckets],
        highs=None if exact else [bucket.high if bucket.readings else None for bucket in buckets],
        not_finite=[bucket.step for bucket in buckets if bucket.not_finite],
    )


def _round(value: float) -> float:
    """Return a value with 9 significant digits, which are more than a screen shows."""
    return float(f"{value:.9g}")


def _rank(name: str) -> tuple[int, str]:
    """Return the place of a metric: the loss first, then evaluations, then the others."""
    known = name.replace("/", ".")
    return 0 if known in ("loss", "train.loss") else 1 if known == "eval.loss" else 2 if known[
        :4
    ] == "eval" else 3, name

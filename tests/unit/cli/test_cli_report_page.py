"""The HTML report is complete, safe and small for any job and any metrics."""

from __future__ import annotations

import math
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import pytest

from baton.contract.jobs.goodput import Goodput
from baton.contract.jobs.history import AttemptView, EventView
from baton.contract.jobs.job import JobCounters, JobView, Progress, Reason
from baton.contract.jobs.policy import Policy, Requirements
from baton.contract.worker.control import EndedBy
from baton.contract.worker.metric_history import join_attempts
from baton.contract.worker.output import MetricPoint
from gpu_client.cli.insight.charts import Curve, Frame, Mark, draw_chart, round_ticks, thin_points
from gpu_client.cli.insight.report import ReportInput, render_report

ID = "146683a1-cb76-4702-9fef-fcccd32594f1"
EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\x1b[31m\x00'
_VOID = {"meta", "br", "img", "link"}


class Page(HTMLParser):
    """Reads a page, and refuses what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def said(self) -> str:
        return " ".join(self.words)


def job(**fields: Any) -> JobView:
    known: dict[str, Any] = {
        "id": ID, "status": "complete", "state": "complete", "queue": "default", "priority": 50, "command": ["train"],
        "parameters": {}, "environment": {}, "inputs": [], "outputs": [], "requirements": Requirements(),
        "policy": Policy(), "tags": {}, "epoch": 1, "counters": JobCounters(attempts=1), "created_at": 1_790_000_000,
        "updated_at": 1_790_000_900, "checkpoint_bucket": "b", "checkpoint_prefix": "p",
    }  # fmt: skip
    return JobView(**{**known, **fields})


def event(kind: str, epoch: int = 1, **data: Any) -> EventView:
    return EventView(
        seq=1, type=kind, at=1_790_000_000, epoch=epoch, data=data, event_type=kind, timestamp=1_790_000_000
    )


def attempt(epoch: int, **fields: Any) -> AttemptView:
    return AttemptView(epoch=epoch, started_at=1_790_000_000, **fields)


def point(epoch: int, step: int, **metrics: Any) -> MetricPoint:
    return MetricPoint(epoch=epoch, step=step, at=step, metrics=metrics)


def page(
    points: Sequence[MetricPoint] = (),
    *,
    events: Any = (),
    attempts: Any = (),
    price: float | None = None,
    **fields: Any,
) -> tuple[str, Page]:
    resumed = {one.epoch: one.resumed_step for one in attempts}
    history = join_attempts(points, resumed)
    text = render_report(ReportInput(job(**fields), attempts, events, history, price, 1_790_001_000))
    assert "NaN" not in re.sub("NaN or infinite", "", text), "nothing is drawn at a place that is none"
    assert "inf," not in text
    return text, Page(text)


def pictures(text: str) -> list[ElementTree.Element]:
    """Return the page's pictures, each of which must be well-formed XML."""
    return [ElementTree.fromstring(one) for one in re.findall(r"<svg viewBox.*?</svg>", text, re.DOTALL)]


def test_a_job_without_anything() -> None:
    text, read = page(state="pending", status="pending", counters=JobCounters())
    assert "The training has reported no metrics." in read.said
    assert "script" not in read.tags
    assert pictures(text) == []


def test_nothing_comes_from_elsewhere() -> None:
    _, read = page([point(1, step, loss=1 / step) for step in range(1, 50)])
    assert not {"script", "link", "img", "iframe", "object"} & set(read.tags)
    assert not [name for name, _ in read.attributes if name in ("src", "href", "xlink:href") or name.startswith("on")]


def test_strangers_words_stay_words() -> None:
    told = [point(1, step, loss=1 / step, lr=0.1) for step in range(1, 20)]
    events = [
        event("rule.fired", rule=EVIL, step=5, operands={EVIL: EVIL, "x": None}, actions=[EVIL], message=EVIL),
        event("rule.fired", rule={"a": EVIL}, step=EVIL, operands=EVIL, actions=EVIL),
        event("job.rolled_back", rule=EVIL, step=9, to_step=EVIL),
        event("action.applied", command=EVIL, step=7, actions=[EVIL], message=EVIL),
    ]
    attempts = [
        attempt(1, machine_id=EVIL, end="interrupted", reason=Reason(code=EVIL, message=EVIL), ended_at=1_790_000_100),
        attempt(2, machine_id=EVIL, resumed_step=10),
    ]
    text, read = page(
        told, events=events, attempts=attempts, name=EVIL, command=[EVIL], tags={EVIL: EVIL}, recipe=EVIL,
        state="failed", status="failed", reason=Reason(code=EVIL, message=EVIL),
        ended_by=EndedBy(rule="spike", step=5, message=EVIL),
    )  # fmt: skip
    assert not {"script", "img"} & set(read.tags)
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    assert "alert(1)" in read.said
    assert "\x1b" not in text
    assert "\x00" not in text
    assert len(pictures(text)) >= 2


def test_what_happened_stands_on_the_curve() -> None:
    told = [point(1, step, loss=1.0) for step in range(1, 40)] + [point(2, step, loss=0.5) for step in range(21, 61)]
    events = [
        event("checkpoint.committed", step=20),
        event("rule.fired", rule="spike", step=35, operands={"loss": 1.0}, actions=["rollback"]),
        event("job.rolled_back", rule="spike", step=35, to_step=20),
        event("action.applied", epoch=2, command=3, step=50, actions=["set"], message="lr: 1 -> 0.5"),
    ]
    attempts = [attempt(1, end="released", ended_at=1_790_000_100), attempt(2, resumed_step=20, end="complete")]
    text, read = page(
        told, events=events, attempts=attempts, ended_by=EndedBy(rule="enough", step=60, message="step = 60")
    )
    main = pictures(text)[0]
    labels = {one.text for one in main.iter("text")}
    assert {"spike", "rolled back to 20", "attempt 2", "set"} <= labels
    kinds = [one.get("class") for one in main.iter()]
    assert kinds.count("ckpt") == 1
    assert "void" in kinds and "curve" in kinds and "back arc" in kinds
    spots = {
        one.get("class"): float(one.get("cy", "0")) for one in main.iter("circle") if "spot" in one.get("class", "")
    }
    assert spots["fire spot"] < spots["act spot"], "it fired on what the first attempt saw, not the second"
    assert "rule enough at step 60: step = 60" in read.said
    assert "loss" in read.said and "1" in read.said


def test_goodput_and_money_of_each_attempt() -> None:
    goodput = Goodput(productive_s=1800, repeated_s=900, idle_s=900)
    attempts = [attempt(1, ended_at=1_790_003_600, end="complete", progress=Progress(step=5, goodput=goodput))]
    _, read = page(attempts=attempts, price=2.0)
    assert "50%" in read.said
    assert "2.00" in read.said and "1.00 for new steps" in read.said
    _, read = page(attempts=attempts)
    assert "for new steps" not in read.said


@pytest.mark.parametrize(
    "values",
    [
        ["nan"],
        ["nan", "inf", "-inf"],
        [1.0],
        [1.0, "nan", 2.0],
        ["nan", 1.0],
        [0.0, 0.0],
        [1e308, -1e308, 5e-324],
        [5e-324, 1e308],
        [1.0, 1.0 + 1e-16],
        [-1e-300, 1e-300],
        [1e15, 1e15 + 1],
    ],
    ids=str,
)
def test_odd_values(values: list[Any]) -> None:
    text, _ = page([point(1, step, loss=value, other=value) for step, value in enumerate(values)])
    for picture in pictures(text):
        for one in picture.iter():
            for name in ("x", "y", "cx", "cy", "x1", "x2", "y1", "y2"):
                if one.get(name) is not None:
                    assert math.isfinite(float(one.get(name, "")))
                    assert abs(float(one.get(name, ""))) < 2000


def test_20_000_points_make_a_small_page() -> None:
    rng = random.Random(7)
    points = [point(1, step, **{name: rng.random() for name in ("loss", "eval.loss", "lr")}) for step in range(20_000)]
    text, _ = page(points)
    assert len(text.encode()) < 200_000
    assert len(pictures(text)) == 3


def test_many_metrics_firings_and_attempts_make_a_small_page() -> None:
    points = [point(1, step, **{f"m{number}": float(step) for number in range(64)}) for step in range(300)]
    points += [point(2, step, **{f"n{number}": float(step) for number in range(64)}) for step in range(300, 600)]
    events = [event("rule.fired", rule=f"r{n}", step=n % 600, operands={"loss": 1.0}) for n in range(5000)]
    attempts = [attempt(epoch, resumed_step=epoch - 1) for epoch in range(1, 300)]
    text, read = page(points, events=events, attempts=attempts)
    assert len(text.encode()) < 2_000_000
    assert "more metrics are in the table" in read.said
    assert "earlier decisions: see baton events" in read.said


def test_thinning_keeps_every_peak_and_the_ends() -> None:
    points = [(step, 0.0) for step in range(10_000)]
    points[4321] = (4321, 9.0)
    points[7777] = (7777, -9.0)
    points[5000] = (5000, math.nan)
    kept = thin_points(points, 100)
    assert len(kept) <= 500
    assert (kept[0], kept[-1]) == ((0, 0.0), (9999, 0.0))
    assert (4321, 9.0) in kept
    assert (7777, -9.0) in kept
    assert any(math.isnan(value) for _, value in kept)
    steps = [step for step, _ in kept]
    assert steps == sorted(set(steps))


def test_labels_do_not_cover_each_other() -> None:
    marks = [Mark("fire", 50 + number, f"rule-{number}") for number in range(6)]
    picture = ElementTree.fromstring(draw_chart([Curve("curve", [(0, 1.0), (100, 2.0)])], Frame(marks=marks)))
    places = [(one.get("x"), one.get("y")) for one in picture.iter("text") if "word" in one.get("class", "")]
    assert len({y for _, y in places}) == len(places) == 6


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 7), (0, 1e-9), (1e15, 1e15 + 4), (2.0, 2.0), (-1e308, 1e308)])
def test_ticks_lie_within(low: float, high: float) -> None:
    found = round_ticks(low, high, 5)
    assert 1 <= len(found) <= 22
    assert all(low - 1e-9 <= value <= high * (1 + 1e-9) + 1e-9 for value in found)


def test_a_loop_that_puts_the_step_into_its_metrics_names_has_a_page_as_any_other() -> None:
    """A loop with the step in its metrics' names gets a short page at once; a search for each name took an hour."""
    text, read = page([point(1, step, **{"loss": 1.0, f"grad/{step}": 0.5}) for step in range(4000)])
    assert len(text) < 2_000_000
    assert "3,001 more metrics: see baton metrics." in read.said


def test_the_membership_of_an_elastic_training_stands_under_its_loss() -> None:
    nodes = [2, 3, 2]
    told = [point(1, step, loss=4.0 - step, **{"world.nodes": nodes[step - 1]}) for step in (1, 2, 3)]
    happened = [
        event("world.joined", round=1, joined=[2]),
        event("world.lost", round=2, lost=[{"seat": 2, "cause": "silent"}]),
        event("world.joined", joined=[1]),
    ]
    seats = [attempt(1, seat=0), attempt(1, seat=1)]
    text, found = page(told, events=happened, attempts=seats, nodes={"min": 1, "max": 3})
    assert "nodes" in found.said and "round 1: node 2 joined" in text and "round 2: without node 2 (silent)" in text
    assert text.index("loss") < text.index("nodes over steps") < text.index("<h2>Attempts")
    assert text.count("world.nodes over steps") == 0
    assert "resumes from step" not in text
    assert "nodes over steps" not in page([point(1, 1, loss=1.0)])[0]

"""Aggregates over streams, against plain references that look at the whole history each time."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.contract.rules.engine.expression_compiler import Compiler
from baton.contract.rules.language.checker import check
from baton.contract.rules.limits import LIMITS
from baton.contract.rules.metrics import Metric, MetricCatalog
from baton.contract.rules.windows.series import SCALE_STEP, ObservationClock
from baton.contract.rules.windows.sliding_windows import Moments
from baton.contract.rules.windows.window_closures import MOMENT_READERS, Reader
from tests.kits.rules.naive_evaluator import World
from tests.properties.profiles import machine_settings

METRICS = MetricCatalog([Metric("x"), Metric("y")])
EXACT = [
    "min(x, 4)", "max(x, 4)", "min(x, 10s)", "max(x, 10s)", "median(x, 3)", "median(x, 4)", "median(x, 10s)",
    "mean(x, 1)", "mean(x, 5)", "mean(x, 10s)", "delta(x)", "delta(x, 3)", "delta(x, 10s)", "rising(x, 2)",
    "rising(x, 8s)", "falling(x, 2)", "falling(x, 8s)", "changed(x)", "changed(x, 3)", "changed(x, 8s)",
    "count(x)", "count(x, 10s)", "lag(x, 1)", "lag(x, 3)",
    "best(x, min)", "best(x, max)", "since_best(x, min)", "since_best(x, max, 0.5)", "age(x)", "x", "missing(x)",
]  # fmt: skip
CLOSE = [
    "std(x, 2)", "std(x, 5)", "std(x, 10s)", "slope(x, 2)", "slope(x, 5)", "slope(x, 10s)", "zscore(x, 2)",
    "zscore(x, 4)", "zscore(x, 10s)", "ema(x, 1)", "ema(x, 4)", "ema(x, 10s)",
]  # fmt: skip

VALUE = st.one_of(
    st.floats(-10, 10),
    st.integers(-3, 3).map(float),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, -1e308, 5e-324, 1e16]),
    st.none(),
)
OBSERVATION = st.tuples(
    st.one_of(st.just({}), st.fixed_dictionaries({"x": VALUE})),
    st.sampled_from([0.0, 0.5, 1.0, 3.0, 11.0, 1e6, -5.0]),
)


class Stream:
    """Expressions of one set of series, fed by hand."""

    def __init__(self, *texts: str) -> None:
        self.clock = ObservationClock()
        self.compiler = Compiler(self.clock)
        self.typed = {}
        self.readers: dict[str, Reader] = {}
        for text in texts:
            checked = check(text, METRICS)
            assert checked.typed is not None, checked.faults
            self.typed[text] = checked.typed
            self.readers[text] = self.compiler.compile(checked.typed)

    def push(self, value: float | None, now: float) -> None:
        self.clock.now = max(self.clock.now, now)
        series = self.compiler.series["x"]
        if value is None:
            series.current = None
        else:
            series.push(value, self.clock.now)


def same(found: float | bool | None, expected: float | bool | None, *, closely: bool = False) -> bool:
    if found is None or expected is None or isinstance(expected, bool):
        return found is expected
    if math.isnan(expected) or math.isinf(expected) or not closely:
        return found == expected or (math.isnan(found) and math.isnan(expected))
    return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-300)


@machine_settings(runs=80, steps=1)
@given(observations=st.lists(OBSERVATION, max_size=30))
def test_every_aggregate_is_its_reference(observations: list[tuple[dict[str, float | None], float]]) -> None:
    stream = Stream(*EXACT, *CLOSE)
    world = World()
    now = 1000.0
    for step, (metrics, later) in enumerate(observations):
        now += later
        for value in metrics.values():
            stream.push(value, now)
        stream.clock.now = max(stream.clock.now, now)
        world.take(metrics, step, now)
        for text, read in stream.readers.items():
            expected = world.value(stream.typed[text])
            assert same(read(), expected, closely=text in CLOSE), text


@pytest.mark.parametrize("offset", [0.0, 1e6, -1e9, 1e12])
@pytest.mark.parametrize("size", [10, 1000])
def test_nothing_drifts_over_many_points(offset: float, size: int) -> None:
    """120,000 points far from zero, with a huge one in between: as numpy and statistics have the window alone."""
    texts = [f"{name}(x, {size})" for name in ("mean", "std", "slope", "median", "min", "max", "zscore")]
    stream = Stream(*texts)
    chance = random.Random(7)
    points = [offset + chance.gauss(0, 1) for _ in range(120_000)]
    points[60_000] = 1e300
    for index, value in enumerate(points):
        stream.push(value, float(index))
    window = points[-size:]
    before = points[-size - 1 : -1]
    found = {text.partition("(")[0]: read() for text, read in stream.readers.items()}
    assert found["mean"] == statistics.fmean(window) or math.isclose(found["mean"], np.mean(window), rel_tol=1e-15)
    assert math.isclose(found["std"], statistics.stdev(window), rel_tol=1e-14)
    assert math.isclose(found["std"], np.std(np.array(window) - offset, ddof=1), rel_tol=1e-6)
    slope, _ = np.polyfit(np.arange(size), np.array(window) - offset, 1)
    assert math.isclose(found["slope"], slope, rel_tol=1e-6, abs_tol=1e-9)
    assert math.isclose(
        found["slope"], statistics.linear_regression(range(size), window).slope, rel_tol=1e-3, abs_tol=1e-7
    )
    assert found["median"] == np.median(window)
    assert (found["min"], found["max"]) == (min(window), max(window))
    expected = (points[-1] - statistics.mean(before)) / statistics.stdev(before)
    assert math.isclose(found["zscore"], expected, rel_tol=1e-12)


def test_a_nan_is_in_the_window_as_long_as_it_is_and_no_longer() -> None:
    stream = Stream("mean(x, 3)", "std(x, 3)", "max(x, 3)", "median(x, 3)", "slope(x, 3)", "ema(x, 3)")
    told = []
    for index, value in enumerate([1.0, 2.0, 3.0, math.nan, 4.0, 5.0, 6.0]):
        stream.push(value, float(index))
        told.append({text.partition("(")[0]: read() for text, read in stream.readers.items()})
    assert told[1] == dict.fromkeys(told[1])
    assert told[2] == {"mean": 2, "std": 1, "max": 3, "median": 2, "slope": 1, "ema": told[2]["ema"]}
    for at in (3, 4, 5):
        assert all(math.isnan(told[at][name]) for name in ("mean", "std", "max", "median", "slope"))
    assert [math.isnan(one["ema"]) for one in told[2:]] == [False, True, False, False, False]
    assert told[6] == {"mean": 5, "std": 1, "max": 6, "median": 5, "slope": 1, "ema": told[6]["ema"]}


def test_a_window_over_a_duration_empties_with_time() -> None:
    stream = Stream("count(x, 10s)", "mean(x, 10s)", "age(x)")
    count, mean, age = stream.readers.values()
    assert (count(), mean(), age()) == (0.0, None, None)
    for second in range(11):
        stream.push(float(second), float(second))
    assert (count(), mean(), age()) == (10.0, 5.5, 0.0)
    stream.clock.now = 15.0
    assert (count(), mean(), age()) == (5.0, 8.0, 5.0)
    stream.clock.now = 1e9
    assert (count(), mean(), age()) == (0.0, None, 1e9 - 10)


def test_a_zscore_over_a_duration_is_known_once_the_history_is_that_long() -> None:
    stream = Stream("zscore(x, 10s)")
    (zscore,) = stream.readers.values()
    told = []
    for at, value in [(0.0, 1.0), (6.0, 2.0), (9.0, 4.0), (10.0, 6.0)]:
        stream.push(value, at)
        told.append(zscore())
    assert told == [None, None, None, pytest.approx(3 / math.sqrt(2))]


def test_memory_is_that_of_the_longest_window() -> None:
    stream = Stream("mean(x, 100)", "std(x, 10)", "delta(x, 50)", "best(x, min)", "mean(x, 1s)", "ema(x, 1000)")
    series = stream.compiler.series["x"]
    for index in range(20_000):
        stream.push(float(index % 17), index / 10)
        assert len(series.values) <= 2 * 102 + 2 * 128
        assert len(series.times) == len(series.values)
    assert series.total == 20_000
    # points that come faster than any window over a duration can hold: the oldest go
    flood = Stream("count(x, 1h)", "median(x, 1h)")
    for index in range(LIMITS.duration_points + 100):
        flood.push(float(index), 0.0)
    assert flood.readers["count(x, 1h)"]() == LIMITS.duration_points
    assert len(flood.compiler.series["x"].values) <= 3 * LIMITS.duration_points


def test_equal_aggregates_are_kept_once() -> None:
    stream = Stream(
        "mean(x, 50)", "mean(x, 50) + 1", "std(x, 50)", "slope(x, 50)", "mean(x, 51)", "rising(x, 2)", "rising(x, 9)"
    )
    assert len(stream.compiler.series["x"].followers) == 3


def test_an_update_does_the_same_work_after_any_history() -> None:
    """Counted in the numbers that a window looks at: appends and removals of one update."""
    stream = Stream("mean(x, 1000)", "zscore(x, 900)", "slope(x, 5)", "max(x, 1000)", "median(x, 1000)")
    series = stream.compiler.series["x"]
    own = [series.followers["max(1000, 0.0)"], series.followers["median(1000, 0.0)"]]
    # windows of sums do nothing when a point comes: the series sums it up once for all of them
    assert len(series.pushes) == 3
    looked: list[int] = []
    for index in range(30_000):
        stamps = [follower.stamp for follower in own]  # type: ignore[attr-defined]
        starts = [follower.start for follower in own]  # type: ignore[attr-defined]
        stream.push(math.sin(index), float(index))
        moved = sum(follower.start - start for follower, start in zip(own, starts, strict=True))  # type: ignore[attr-defined]
        added = sum(follower.stamp - stamp for follower, stamp in zip(own, stamps, strict=True))  # type: ignore[attr-defined]
        looked.append(moved + added)
        assert series.sums is not None
        assert len(series.sums.totals) == len(series.values) + 1 <= 1.25 * 1001 + 128 + 1
    assert max(looked[:1000]) == 2
    assert set(looked[1000:]) == {4}
    assert len(own[0].queue) <= 1000  # type: ignore[attr-defined]


def test_sums_of_values_that_become_ever_smaller_are_exact_and_not_made_anew() -> None:
    stream = Stream("mean(x, 3)", "slope(x, 3)", "mean(x, 1000)")
    sums = stream.compiler.series["x"].sums
    assert sums is not None
    for index in range(1000):
        stream.push(2.0**-index, float(index))
        assert sums.totals[0] == 0 or len(sums.totals) > 1000, "what has been summed up stays as it is"
    assert len(sums.eras) <= 1 + 1080 // SCALE_STEP
    last = [2.0**-997, 2.0**-998, 2.0**-999]
    assert stream.readers["mean(x, 3)"]() == sum(last) / 3
    assert stream.readers["slope(x, 3)"]() == (last[2] - last[0]) / 2
    assert stream.readers["mean(x, 1000)"]() == 2.0 / 1000


@machine_settings(runs=80, steps=1)
@given(
    values=st.lists(
        st.one_of(
            st.floats(-10, 10),
            st.floats(allow_nan=False, allow_infinity=False),
            st.sampled_from([math.nan, math.inf, 1e308, -1e308, 5e-324, 1e-300, 0.0]),
        ),
        max_size=30,
    )
)
def test_the_quick_way_gives_the_same_float_as_the_windows_own(values: list[float]) -> None:
    series = Compiler(ObservationClock())
    found: list[tuple[str, Moments, Reader]] = []
    for function in MOMENT_READERS:
        window = Moments(series._series("x"), ObservationClock(), 4, 0.0, int(function == "zscore"))
        window.sums.with_squares = window.sums.weighs = True
        found.append((function, window, MOMENT_READERS[function](window)))
    for value in values:
        series.series["x"].push(value, 0.0)
        for function, window, read in found:
            if (quick := read()) is not None:
                assert same(quick, getattr(window, function)()), function

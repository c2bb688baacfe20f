"""Test the bench's figures and reports from given rounds."""

from __future__ import annotations

import json

import pytest

from bench.api.claim_race import Taken, check_each_once
from bench.harness.figures import Figure, table
from bench.training import dreambooth
from bench.training.contenders import MODES, Processors, Run, added_percent, order_of
from bench.training.overhead import figures


def test_a_ratio_is_taken_round_by_round_and_its_median_is_judged() -> None:
    # Both got twice as slow in the second round: the ratio does not care.
    figure = Figure(
        name="f", unit="s", rounds=[11.0, 21.0, 30.0], baseline_name="bare", baseline=[10.0, 20.0, 10.0], at_most=1.1
    )
    assert figure.ratios == [1.1, 1.05, 3.0]
    assert figure.judged == 1.1
    assert figure.met is True


def test_a_count_is_judged_by_its_worst_round() -> None:
    figure = Figure(name="f", unit="", rounds=[1, 1, 2], at_most=1, counted=True)
    assert figure.judged == 2
    assert figure.met is False


def test_a_figure_without_a_target_is_neither_met_nor_missed() -> None:
    figure = Figure(name="f", unit="ms", rounds=[3.0])
    assert figure.met is None
    assert "target" not in figure.as_dict()


@pytest.mark.parametrize(
    "fields",
    [
        {"rounds": []},
        {"rounds": [1.0], "baseline": [1.0]},
        {"rounds": [1.0], "baseline_name": "bare"},
        {"rounds": [1.0, 2.0], "baseline_name": "bare", "baseline": [1.0]},
    ],
)
def test_a_figure_that_compares_nothing_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="f: "):
        Figure(name="f", unit="s", **fields)  # type: ignore[arg-type]


def test_the_report_holds_rounds_median_worst_baseline_ratio_and_target() -> None:
    figure = Figure(
        name="f", unit="s", rounds=[2.0, 3.0, 4.0], baseline_name="bare", baseline=[2.0, 2.0, 2.0], at_most=1.3
    )
    told = json.loads(json.dumps(figure.as_dict()))
    assert told["rounds"] == [2.0, 3.0, 4.0]
    assert (told["median"], told["worst"]) == (3.0, 4.0)
    assert told["baseline"] == {"name": "bare", "rounds": [2.0, 2.0, 2.0], "median": 2.0, "worst": 2.0}
    assert told["ratio"] == {"rounds": [1.0, 1.5, 2.0], "median": 1.5, "worst": 2.0}
    assert told["target"] == {"of": "ratio", "statistic": "median", "at_most": 1.3}
    assert told["met"] is False


def test_the_table_has_a_line_for_each_figure_and_shouts_about_a_miss() -> None:
    good = Figure(name="good", unit="ms", rounds=[1.5], at_most=2)
    bad = Figure(name="bad", unit="ms", rounds=[2.5], at_most=2)
    lines = table([good, bad]).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("good") and lines[2].endswith("yes")
    assert lines[3].startswith("bad") and lines[3].endswith("NO")


def taken(*job_ids: str, error: str = "") -> Taken:
    return Taken(job_ids=list(job_ids), conflicts=0, transactions=0, queries=0, error=error)


def test_a_race_in_which_every_job_went_to_one_claimer_is_sound() -> None:
    check_each_once([taken("a", "b"), taken("c")], 3)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([taken("a", "b"), taken("b")], "2 of 3 jobs were claimed, 1 of them twice"),
        ([taken("a"), taken("b")], "2 of 3 jobs were claimed, 0 of them twice"),
        ([taken("a", "b", "c"), taken(error="answered with 500")], "answered with 500"),
    ],
)
def test_a_race_with_a_job_lost_or_claimed_twice_is_no_measurement(parts: list[Taken], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        check_each_once(parts, 3)


def run(wall_s: float, **fields: float) -> Run:
    values = {
        "cpu_s": wall_s,
        "checkpoint_wall_s": 0.2,
        "checkpoint_waited_s": 0.0,
        "checkpoints": 10,
        "waited_s": 0.0,
        "process_cpu_s": wall_s + 1,
    }
    return Run(wall_s=wall_s, **{**values, **fields})  # type: ignore[arg-type]


def test_overhead_is_the_loop_under_the_agent_against_the_mean_of_both_bare_loops() -> None:
    runs = {
        "bare": [run(9.9, checkpoints=0), run(20.0, checkpoints=0)],
        "control": [run(10.1, checkpoints=0), run(20.0, checkpoints=0)],
        "session": [run(10.1), run(20.2)],
        "agent": [run(10.2), run(20.4, checkpoint_wall_s=0.4)],
    }
    wall, *_, control, stall, _added = figures(runs, Processors((0,), (1,)), steps=500)
    assert wall.ratios == pytest.approx([1.02, 1.02])
    assert wall.met is True
    assert control.ratios == pytest.approx([10.1 / 9.9, 1.0])
    assert stall.rounds == pytest.approx([20.0, 40.0])
    assert wall.details["processors"] == {"trainer": [0], "agent and control plane": [1]}


def test_waiting_for_a_processor_that_neighbours_use_is_told_apart() -> None:
    runs = {
        "bare": [run(10.0, checkpoints=0)],
        "control": [run(10.0, checkpoints=0)],
        "session": [run(10.1)],
        "agent": [run(15.1, waited_s=5.0)],
    }
    wall, undisturbed, *_ = figures(runs, Processors((), ()), steps=500)
    assert wall.met is False
    assert undisturbed.ratios == pytest.approx([1.01])
    assert wall.details["waited for the processor, s"]["agent"] == [5.0]


def test_the_order_of_turns_changes_and_nobody_is_left_out() -> None:
    orders = [order_of(number) for number in range(8)]
    assert all(sorted(order) == sorted(MODES) for order in orders)
    assert {order[0] for order in orders} == set(MODES)
    followers = {order[(order.index("agent") + 1) % len(order)] for order in orders}
    assert followers == {"bare", "control"}


def test_what_checkpoints_add_is_taken_from_one_run_without_its_waiting() -> None:
    # 10 s of steps and 0.2 s of checkpoints; 5 s of waiting, 1 s of them in checkpoints.
    assert added_percent(run(15.2, waited_s=5.0, checkpoint_wall_s=1.2, checkpoint_waited_s=1.0)) == pytest.approx(2.0)


def test_dreambooth_is_judged_by_steps_per_second_and_by_peak_memory() -> None:
    mib = 2**20
    runs = {
        "bare": [run(9.9, checkpoints=0, peak_bytes=499 * mib)],
        "control": [run(10.1, checkpoints=0, peak_bytes=501 * mib)],
        "session": [run(10.1)],
        "agent": [run(10.3, peak_bytes=530 * mib)],
    }
    found = {figure.name.removeprefix("Dreambooth, "): figure for figure in dreambooth.overhead(runs, 100, {"a": 1})}
    wall, memory = found["a step under the agent: wall"], found["peak memory under the agent"]
    assert (list(wall.rounds), list(wall.baseline)) == ([pytest.approx(103.0)], [pytest.approx(100.0)])
    assert wall.met is True, "0.971 of the steps per second"
    assert (list(memory.rounds), list(memory.baseline)) == ([530.0], [500.0])
    assert memory.met is False
    runs["agent"] = [run(10.32, peak_bytes=524 * mib)]
    found = {figure.name.removeprefix("Dreambooth, "): figure for figure in dreambooth.overhead(runs, 100, {})}
    assert found["a step under the agent: wall"].met is False, "0.969 of the steps per second"
    assert found["peak memory under the agent"].met is True


def test_what_caches_save_is_only_told() -> None:
    figures = dreambooth.savings({"cached": [run(6.0)], "encoded anew": [run(8.0)]}, 100)
    assert [(list(figure.rounds), figure.ratios, figure.met) for figure in figures] == [([60.0], [0.75], None)] * 2


def test_a_tail_is_judged_by_its_95th_percentile() -> None:
    figure = Figure(name="f", unit="s", rounds=[9.0, *[1.0] * 18, 2.0], at_most=2.0, p95=True)
    assert figure.judged == 2.0
    assert figure.as_dict()["target"]["statistic"] == "p95"

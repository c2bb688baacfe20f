"""The controllers of several ranks decide as one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from controller_kit import Alone, Rate, Setup, Together, agree, command, ranks, rule, run_together

from gpu_client.controller import orders

SPIKES = [1.0, 1.0, 5.0, 1.0, 5.0, 5.0, 1.0, 1.0]


@pytest.mark.parametrize("size", [2, 4])
def test_several_processes_decide_as_one(size: int) -> None:
    text = rule("spike", "zscore(loss, 3) > 1 or loss > 4", '{"log": "x"}', **{"for": "2 of 3"})
    alone = Setup(text)
    for step, loss in enumerate(SPIKES, 1):
        alone.report(step, loss=loss)
    setups = run_together(size, text, {0: SPIKES})
    assert setups[0].agent.fired() == alone.agent.fired() != []
    assert all(setup.agent.heard == [] for setup in setups[1:]), "the first one speaks for all"


def test_one_process_with_a_nan_is_enough_and_all_stop() -> None:
    nan = [1.0, 1.0, float("nan"), 1.0, 1.0]
    setups = run_together(4, rule("nan", "not isfinite(loss)", "stop"), {0: [1.0] * 5, 2: nan})
    assert setups[0].agent.fired() == [("nan", 3)]
    assert [setup.loop.stops for setup in setups] == [[("rule", True)]] * 4
    assert all(setup.steering.finishing for setup in setups)


def test_what_comes_with_the_last_step_is_looked_at() -> None:
    """The vote was read at the next step, which never comes after the last step."""
    setups = run_together(2, rule("nan", "not isfinite(loss)", "stop"), {0: [1.0, 1.0, float("nan")]})
    assert setups[0].agent.fired() == [("nan", 3)]


def test_processes_may_report_differently_twice_or_not_at_all() -> None:
    setups = ranks(3, rule("r", "loss > 2 and mine > 0"))
    for step in range(1, 5):
        setups[0].report(step, loss=1.0)
        setups[0].report(step, loss=3.0)
        if step % 2:
            setups[1].report(step, mine=1.0)
        agree(setups)
    assert setups[0].agent.fired() == [("r", 1)]


def test_live_rules_and_commands_reach_all_at_the_same_step() -> None:
    setups = ranks(3)
    rates = [Rate() for _ in setups]
    for setup, rate in zip(setups, rates, strict=True):
        setup.steering.offer(knobs={"lr": rate})
    agree(setups)
    setups[0].steering.receive({"type": "rules", "revision": 1, "text": rule("r", "loss > 1")})
    setups[0].steering.receive(command(1, "set", knob="lr", factor=0.5))
    for setup in setups:
        setup.report(1, loss=2.0)
    agree(setups)
    assert [rate.value for rate in rates] == [1.0] * 3
    for setup in setups:
        setup.report(2, loss=2.0)
    agree(setups)
    assert [rate.value for rate in rates] == [0.5] * 3
    assert [setup.steering.engine.revision for setup in setups] == [1] * 3
    for step in (3, 4):
        for setup in setups:
            setup.report(step, loss=2.0)
        agree(setups)
    assert setups[0].agent.fired() == [("r", 3)]


def test_a_command_of_before_is_done_again_by_all_at_its_step() -> None:
    """The first rank never calls checkpoint_due, so no checkpoint is due."""
    commands = [{**command(1, "set", knob="lr", factor=0.5), "status": "applied", "step": 3}]
    setups = ranks(2, commands=commands)
    rates = [Rate(), Rate()]
    for setup, rate in zip(setups, rates, strict=True):
        setup.steering.offer(knobs={"lr": rate})
        setup.steering.resume(1, [])
    seen = []
    for step in range(2, 6):
        for setup in setups:
            setup.report(step, loss=1.0)
        agree(setups)
        seen.append([rate.value for rate in rates])
    assert seen == [[1.0, 1.0], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("killed_after", range(1, 8))
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (4, 2), (1, 2)])
def test_killed_after_any_step_several_processes_decide_as_if_they_had_not_been(
    killed_after: int, sizes: tuple[int, int]
) -> None:
    """Reports in transit at the checkpoint were never evaluated."""
    text = rule("spike", "mean(loss, 2) > 2", '{"log": "x"}', **{"for": "2 checks", "cooldown": "1 checks"})
    losses = [1.0, 5.0, 5.0, 5.0, 1.0, 5.0, 5.0, 5.0]
    expected = run_together(sizes[0], text, {0: losses})[0].agent.fired()
    assert len(expected) >= 2
    fired: list[tuple[str, int]] = []
    state: Any = None
    for size, steps in zip(sizes, (range(1, killed_after + 1), range(killed_after + 1, 9)), strict=True):
        together = Together(size)
        setups = [Setup(text, peers=together.rank(number) if size > 1 else Alone()) for number in range(size)]
        for setup in setups:
            if state is not None:
                setup.steering.load_state_dict(state)
                setup.steering.resume(steps[0] - 1, [])
        for step in steps:
            for setup in setups:
                setup.clock.now += 1
                setup.steering.report_step(step, {"loss": losses[step - 1]}, last=step == len(losses))
            if size > 1:
                agree(setups)
        state = json.loads(json.dumps(setups[0].steering.state_dict()))
        fired += setups[0].agent.fired()
    assert fired == expected


@pytest.mark.parametrize("do", ["rollback", "pause", "requeue"])
@pytest.mark.parametrize("agent", [True, False], ids=["with an agent", "alone"])
def test_all_end_alike_though_only_the_first_has_an_agent(do: str, agent: bool) -> None:
    """The others refused what hands the job back, took the stop behind it, and waited for the first one for ever."""
    both = [{"name": do, "when": "loss > 5", "do": do}, {"name": "stop", "when": "loss > 5", "do": "stop"}]
    setups = run_together(3, json.dumps({"rules": both}), {0: [1.0, 9.0, 1.0, 1.0]}, agent=agent, ends=0)
    saves = do != "rollback" or not agent
    assert [setup.loop.stops for setup in setups] == [[("rule", saves)]] * 3
    assert [setup.steering.finishing for setup in setups] == [not agent] * 3
    assert len({setup.steering.has_state for setup in setups}) == 1, "or one of them has a state to save, others none"
    assert [one["kind"] for one in setups[0].agent.of("leaving")] == [do] * agent


def test_a_command_ends_all_of_them_alike() -> None:
    setups = ranks(2, ends=0)
    setups[0].steering.receive(command(1, "pause"))
    setups[0].steering.receive(command(2, "stop"))
    for setup in setups:
        setup.report(1, loss=1.0)
    agree(setups)
    assert setups[0].agent.results() == [(1, "applied"), (2, "rejected")]
    assert [setup.loop.stops for setup in setups] == [[("rule", True)]] * 2
    assert [setup.steering.finishing for setup in setups] == [False, False]
    assert [setup.steering.has_state for setup in setups] == [True, True]


def test_orders_that_nobody_can_share_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "MAX_WAITING_ORDERS", 5)
    setups = ranks(2, rule("r", "loss > 1", cooldown="1 steps"))
    for step in range(1, 20):
        for setup in setups:
            setup.report(step, loss=2.0)
        rows = [setup.steering.contribution() for setup in setups]
        for setup in setups:
            setup.steering.receive_rows(rows)
    assert len(setups[0].steering._orders) == 5


def turned(sizes: tuple[int, int], killed_after: int, *, checkpoints: bool = True, long: bool = False) -> list[float]:
    """The rate after each step of a training of so many processes, which was killed after that step."""
    text = rule("high", "loss > 4", '{"set": {"knob": "lr", "factor": 0.5}}', cooldown="1 steps")
    losses = [1.0, 5.0, 5.0, 1.0, 5.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0]
    seen: list[float] = []
    state: Any = None
    value = 1.0
    for size, steps in zip(sizes, (range(1, killed_after + 1), range(killed_after + 1, 12)), strict=True):
        if not steps:
            break
        setups, rates = ranks(size, text, votes_take=3.0 if long else 0.0), [Rate(value) for _ in range(size)]
        for setup, rate in zip(setups, rates, strict=True):
            setup.steering.offer(knobs={"lr": rate})
            if state is not None:
                setup.steering.load_state_dict(state)
                setup.steering.resume(steps[0] - 1, [])
        for step in steps:
            for setup in setups:
                setup.report(step, loss=losses[step - 1])
            agree(setups)
            if checkpoints or step == killed_after:
                state = json.loads(json.dumps(setups[0].steering.state_dict()))
            assert len({rate.value for rate in rates}) == 1, "all turn it after the same step"
            seen.append(rates[0].value)
        value = rates[0].value
    return seen


@pytest.mark.parametrize("killed_after", range(1, 11))
def test_killed_after_any_step_knobs_are_turned_after_the_same_steps(killed_after: int) -> None:
    """A kill after any step does not move the step at which knobs change: the next machine knows the voted orders."""
    expected = turned((2, 2), 11, checkpoints=False)
    assert expected == [1, 1, 1, 0.5, 0.25, 0.25, 0.125, 0.125, 0.125, 0.0625, 0.0625], "two steps behind the loss"
    for sizes in ((2, 2), (4, 2), (2, 3)):
        assert turned(sizes, killed_after) == expected, "nor do checkpoints move it"


def test_long_steps_do_not_move_what_rules_do() -> None:
    assert turned((2, 2), 11, long=True) == turned((2, 2), 11)


def outcomes(setup: Setup) -> list[tuple[str, list[str]]]:
    decisions = setup.agent.of("decision")
    return [(one["decision"], one["actions"]) for one in decisions if one["decision"].startswith("action.")]


def test_what_was_decided_at_the_last_steps_is_done_by_the_first_or_told() -> None:
    """Orders of the last two steps, which no later vote carries, are executed by the first rank or rejected."""
    do = '[{"alert": "high"}, {"set": {"knob": "lr", "factor": 0.5}}, {"stop": "failed"}]'
    setups = run_together(2, rule("r", "loss > 2", do), {0: [1.0, 1.0, 5.0]}, ends=0)
    assert outcomes(setups[0]) == [
        ("action.rejected", ["set"]),
        ("action.applied", ["alert"]),
        ("action.applied", ["stop"]),
    ]
    assert len(setups[0].agent.of("leaving")) == 1


def test_what_was_decided_before_the_machine_leaves_is_left_to_the_next_one() -> None:
    setups = ranks(2, rule("r", "loss > 2", '{"alert": "high"}'))
    for step, loss in ((1, 1.0), (2, 5.0), (3, 1.0)):
        for setup in setups:
            setup.report(step, loss=loss)
        agree(setups)
    state = json.loads(json.dumps(setups[0].steering.state_dict()))
    for setup in setups:
        setup.loop.stopping = True
        setup.close()
    assert setups[0].agent.fired() == [("r", 2)]
    assert outcomes(setups[0]) == []
    (alone,) = [Setup(rule("r", "loss > 2", '{"alert": "high"}'))]
    alone.steering.load_state_dict(state)
    alone.steering.resume(3, [])
    assert outcomes(alone) == [("action.applied", ["alert"])]


@pytest.mark.parametrize("total", [3, 0], ids=["total", "nobody knows how many steps"])
def test_a_nan_at_the_last_step_fails_the_job_however_the_loop_ends(total: int) -> None:
    """A loop that ends by itself, with no total, dropped the stop that was decided at its end."""
    setups = ranks(2, rule("nan", "not isfinite(loss)", '{"stop": "failed"}'), ends=0)
    for step, loss in enumerate([1.0, 1.0, float("nan")], 1):
        for setup in setups:
            setup.steering.report_step(step, {"loss": loss}, last=step == total)
        agree(setups)
    for setup in setups:
        setup.close()
    assert outcomes(setups[0]) == [("action.applied", ["stop"])]
    assert [one["kind"] for one in setups[0].agent.of("leaving")] == ["stop"]
    assert not setups[0].steering.finishing


def test_what_was_decided_beside_a_stop_is_done_or_told() -> None:
    """The job is complete: no attempt resumes the checkpoint that records the firing."""
    rules = [
        {"name": "stop", "when": "loss > 5", "do": "stop"},
        {"name": "late", "when": "step == 4", "do": [{"alert": "x"}, "save"]},
    ]
    setups = ranks(2, json.dumps({"rules": rules}), ends=0)
    for step, loss in enumerate([1.0, 1.0, 9.0, 1.0, 1.0], 1):
        for setup in setups:
            setup.report(step, loss=loss)
        agree(setups)
        for setup in setups:
            setup.loop.stopping = bool(setup.loop.stops)
    for setup in setups:
        setup.close()
    told = [("action.applied", ["stop"]), ("action.rejected", ["save"]), ("action.applied", ["alert"])]
    assert outcomes(setups[0]) == told


def test_a_decision_names_the_process_whose_value_was_not_finite() -> None:
    """A decision names the rank with the nonfinite value, for example the one with damaged memory."""
    inf = [1.0, 1.0, float("inf"), 1.0, 1.0]
    setups = run_together(4, rule("inf", "loss > 100", '{"alert": "x"}'), {0: [1.0] * 5, 2: inf})
    (fired,) = [one for one in setups[0].agent.of("decision") if one["decision"] == "rule.fired"]
    assert (fired["step"], fired["rank"], fired["operands"]) == (3, 2, {"loss": "inf"})
    setups = run_together(2, rule("high", "loss > 2", '{"alert": "x"}'), {0: [1.0, 3.0, 3.0]})
    (fired,) = [one for one in setups[0].agent.of("decision") if one["decision"] == "rule.fired"]
    assert "rank" not in fired, "all of them together: the first one speaks"


def test_a_batch_is_skipped_where_the_loop_said_that_it_can() -> None:
    text = rule("spike", "loss > 2", "skip_batch", cooldown="1 steps")
    alone = Setup(text)
    alone.steering.offer(skip_batch=True)
    unwanted = []
    for step, loss in enumerate([1.0, 3.0, 1.0], 1):
        alone.report(step, loss=loss)
        unwanted.append((alone.steering.batch_unwanted, alone.steering.batch_unwanted))
    assert unwanted == [(False, False), (True, False), (False, False)], "asking takes note of it"
    setups = ranks(2, text)
    for setup in setups:
        setup.steering.offer(skip_batch=True)
    for step in range(1, 5):
        for setup in setups:
            setup.report(step, loss=3.0)
        agree(setups)
        assert not any(setup.steering.batch_unwanted for setup in setups), "it was applied two steps ago"
    assert ("action.rejected", ["skip_batch"]) in outcomes(setups[0])

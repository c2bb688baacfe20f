"""The call that back-tests rules on the reports of a job. `baton rules backtest --json` prints the same answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from baton.contract.base import AnswerModel, JsonObject, Step, WireModel
from baton.contract.worker.control import RulesText
from baton.contract.worker.output import MetricPoint

if TYPE_CHECKING:
    # The route table names these models; a cold start must not load the rule language.
    from baton.contract.rules.backtest.history import History
    from baton.contract.rules.backtest.judging import Aim, Finding, Run, RunVerdict

MAX_SHOWN_FIRINGS = 200


class BacktestRequest(WireModel):
    """Body of `POST /job/{id}/rules/backtest`.

    Example: `{"text": "rules: [{name: late, when: loss > 9, do: stop}]"}`
    """

    text: RulesText


class BestLater(AnswerModel):
    """Best value of the goal after a firing. Example: `{"value": 0.31, "step": 900}`"""

    value: float
    step: Step


class RunGoal(AnswerModel):
    """Metric by which a back-test judges. Example: `{"metric": "eval.loss", "goal": "min"}`"""

    metric: str
    goal: Literal["min", "max"]


class RuleBacktest(AnswerModel):
    """Decisions of one rule on the reports of a run.

    Example: `{"rule": "late", "mode": "enforce", "tried": true, "reason": "", "fires": 1, "cleared": 0,
    "first_step": 70, "first_after_s": 84.5, "steps": [70], "operands": {"loss": 9.1}, "actions": ["stop"],
    "gpu_hours": 1.5, "use": "saved", "why": "loss never got better again", "best_later": null}`
    """

    rule: str
    mode: str
    tried: bool
    reason: str
    """Reason for which the rule was not tried, or a restriction of the trial; empty without one."""
    fires: int
    cleared: int
    first_step: Step | None
    first_after_s: float | None
    """Seconds from the first report to the first firing."""
    steps: list[Step]
    """Steps of the first 200 firings."""
    operands: JsonObject
    """Values of the condition at the first firing."""
    actions: list[str]
    gpu_hours: float | None
    """GPU hours after the first firing, for a rule that stops or pauses."""
    use: str | None
    """`saved`, `wrongly` (cut off) or `unknown`: the use of these hours."""
    why: str
    best_later: BestLater | None


class BacktestView(AnswerModel):
    """Effects that rules would have had on a run, each rule alone.

    Example: `{"complete": true, "rows": 400, "points": 800, "first_step": 1, "last_step": 400, "seconds": 812.5,
    "gpus": 1, "failed": false, "goal": {"metric": "loss", "goal": "min"}, "rules": [], "ended_by": null}`
    """

    complete: bool = True
    """False: the run has more reports than the call replays; the answer is about the first ones."""
    rows: int
    points: int
    first_step: Step | None = None
    last_step: Step | None = None
    seconds: float | None = None
    gpus: float
    failed: bool
    goal: RunGoal | None = None
    rules: list[RuleBacktest]
    ended_by: str | None = None
    """Enforced rule that would have been the first to end or divert the run."""


def history_of_points(points: Sequence[MetricPoint], name: str) -> History:
    """Build one history of the points of all attempts of a job. Raises HistoryError without points."""
    from baton.contract.rules.backtest.history import Builder, HistoryError
    from baton.contract.rules.metrics import is_name, name_in_rules

    if not points:
        raise HistoryError("nothing was reported", "Report metrics from the training.")
    builder = Builder(name)
    for point in points:
        named = {name_in_rules(one): value for one, value in point.numbers().items()}
        builder.add(point.step, point.at, {one: value for one, value in named.items() if is_name(one)})
    return builder.history()


def view_verdict(verdict: RunVerdict, *, complete: bool = True) -> BacktestView:
    """Return the answer for the verdict on one run."""
    run, history = verdict.run, verdict.run.history
    return BacktestView(
        complete=complete,
        rows=history.rows,
        points=history.points,
        first_step=history.steps[0],
        last_step=history.steps[-1],
        seconds=run.seconds_after(0),
        gpus=run.gpus,
        failed=run.failed,
        goal=None if run.aim is None else _view_goal(run.aim),
        rules=[_view_finding(one, run) for one in verdict.findings],
        ended_by=None if verdict.end is None else verdict.end.rule.name,
    )


def _view_goal(aim: Aim) -> RunGoal:
    return RunGoal(metric=aim.metric, goal=aim.goal)


def _view_finding(finding: Finding, run: Run) -> RuleBacktest:
    from baton.contract.rules.numbers import encode

    row, trial, after, steps = finding.first, finding.trial, finding.after, run.history.steps
    better = None if after is None else after.better
    return RuleBacktest(
        rule=finding.rule.name,
        mode=finding.rule.mode,
        tried=trial is not None,
        reason=finding.reason,
        fires=0 if trial is None else len(trial.fired),
        cleared=0 if trial is None else len(trial.cleared),
        first_step=None if row is None else steps[row],
        first_after_s=None if row is None else run.seconds_until(row),
        steps=[] if trial is None else [steps[one] for one in trial.fired[:MAX_SHOWN_FIRINGS]],
        operands={}
        if trial is None
        else {text: value if isinstance(value, bool) else encode(value) for text, value in trial.operands},
        actions=finding.action_names(),
        gpu_hours=None if after is None else after.gpu_hours,
        use=None if after is None else str(after.use),
        why="" if after is None else after.why,
        best_later=None if better is None else BestLater(value=better.value, step=steps[better.row]),
    )

"""Back-test rules on the reports of a job, within bounds on what the call reads and on its time."""

from __future__ import annotations

import time

from baton.contract.errors import ErrorCode
from baton.contract.jobs.job import JobState
from baton.contract.jobs.rule_backtest import BacktestRequest, BacktestView, history_of_points, view_verdict
from functions.api.http.context import ApiCall, Context, require_job
from functions.api.rules.rule_calls import require_sound_rules
from functions.api.worker.logs import read_first_points
from functions.domain.errors import Refusal
from functions.domain.records import Attempt

MAX_POINTS = 20_000
MAX_REPLAY_S = 10.0
"""Most of this time passes only with windows of many points; 20 typical rules take 2 s for 20,000 points."""
_MAX_ATTEMPTS = 1_000


def backtest(context: Context, call: ApiCall) -> BacktestView:
    """Replay the first reports of a job through rules that are not in force; change nothing."""
    body: BacktestRequest = call.body
    job = require_job(context, call, call.path["id"])
    if job.spec.nodes is not None:
        raise Refusal(ErrorCode.NOT_FOR_ELASTIC, "A back-test has no rules of nodes.", field="text")
    text = require_sound_rules(body.text, "text") or "rules: []"
    # Imported here, so that a cold start does not load the rule language.
    from baton.contract.rules.backtest.history import HistoryError
    from baton.contract.rules.backtest.judging import Aim, Run, aim_of, judged
    from baton.contract.rules.document.loader import load
    from baton.contract.rules.metrics import name_in_rules
    from baton.contract.worker.metric_history import join_attempts

    rules = load(text).rules
    if rules is None:
        raise RuntimeError("sound rules do not load")
    gpus, failed = float(job.spec.requirements.min_gpus or 1), job.state is JobState.FAILED
    points, complete = read_first_points(context, call.tenant, job.id, MAX_POINTS)
    attempts = context.jobs.history(Attempt, job.id, limit=_MAX_ATTEMPTS, cursor=None).items
    kept = join_attempts(points, {one.epoch: one.resumed_step for one in attempts}).kept
    if not kept:
        return BacktestView(rows=0, points=0, gpus=gpus, failed=failed, rules=[])
    try:
        history = history_of_points(kept, job.id)
    except HistoryError as error:
        detail = f"The reports of job {job.id} cannot be replayed: {error.reason}."
        raise Refusal(ErrorCode.PAYLOAD_TOO_LARGE, detail, field="id", remedy=error.remedy) from error
    retention = job.spec.policy.retention
    best = retention.keep_best_metric
    run = Run(
        history,
        gpus,
        # The end of a run that goes on behind these reports says nothing about them.
        failed=failed and complete,
        aim=aim_of(
            history, rules.metrics(), None, Aim(name_in_rules(best), retention.keep_best_mode) if best else None
        ),
        held=[(float(one.started_at), float(one.ended_at or history.clock[-1])) for one in attempts],
    )
    return view_verdict(judged(rules, run, _Deadline().require_time), complete=complete)


class _Deadline:
    """End of the time for a replay."""

    def __init__(self) -> None:
        self._at = time.monotonic() + MAX_REPLAY_S

    def require_time(self, _rows: int) -> None:
        """Refuse the call if its time has passed."""
        if time.monotonic() > self._at:
            detail = f"These rules take more than {MAX_REPLAY_S:g} s on the reports of this job."
            remedy = "Run baton rules backtest FILE --job ID on a machine of your own, or use shorter windows."
            raise Refusal(ErrorCode.PAYLOAD_TOO_LARGE, detail, field="text", remedy=remedy)

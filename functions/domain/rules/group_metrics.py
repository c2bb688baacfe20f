"""Keep the metrics of a group that its jobs' rules compare: one value for each job and requested metric.

The values of a job stay after its end, so that stopped jobs still count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from baton.contract.jobs.job import Progress
from baton.contract.rules.engine.group_statistics import GroupValue
from baton.contract.rules.metrics import name_in_rules
from baton.contract.rules.numbers import decode, encode
from functions.domain.records import MemberRecord, MemberValue

RETENTION_S = 30 * 86_400
"""Time that a job counts after its last evaluation."""
MAX_VALUES = 64
"""Maximum number of values of one job; the values that its newest rules request stay longest."""


def update_member(
    before: MemberRecord, needed: Collection[GroupValue], progress: Progress | None, *, now: int
) -> MemberRecord:
    """Return the member record after a report. A value at a step is that of the first report at or after the step."""
    known = {(one.metric, one.step): one.value for one in before.values}
    reported = reported_values(progress) if progress else {}
    for one in needed:
        if progress is None or one.metric not in reported:
            continue
        if one.step is None or (progress.step >= one.step and (one.metric, one.step) not in known):
            known[one.metric, one.step] = encode(reported[one.metric])
    wanted = {(one.metric, one.step) for one in needed}
    order = {(one.metric, one.step): place for place, one in enumerate(before.values)}
    # Beyond MAX_VALUES the values with the oldest requests are dropped.
    names = sorted(known, key=lambda name: (name not in wanted, -order.get(name, len(order)), name[0], name[1] or -1))
    values = [MemberValue(metric=name[0], step=name[1], value=known[name]) for name in names[:MAX_VALUES][::-1]]
    if not values:
        return before
    if values == before.values and before.expires_at > now + RETENTION_S // 2:
        return before
    return MemberRecord(values=values, expires_at=now + RETENTION_S)


def reported_values(progress: Progress) -> dict[str, float | None]:
    """Return the reported metrics by their names in rules; NaN and infinity are values."""
    reported = {**progress.metrics, **{name: decode(word) for name, word in progress.nonfinite.items()}}
    return {name_in_rules(name): value for name, value in reported.items()}


class GroupMembers:
    """GroupValues of one job. `members`: records of the group, by job."""

    def __init__(self, job_id: str, own: MemberRecord, members: Mapping[str, MemberRecord] | None) -> None:
        """`own` is newer than the job's entry in `members`. `members` None: the job is in no group."""
        self._own = _by_name(own)
        self._members: list[dict[GroupValue, float]] | None = None
        if members is not None:
            self._members = [self._own, *(_by_name(one) for other, one in members.items() if other != job_id)]

    def members(self, metric: str, step: int | None) -> Sequence[float] | None:
        """Return the values of a metric of all jobs of the group that have a value."""
        if self._members is None:
            return None
        wanted = GroupValue(metric, step)
        return [one[wanted] for one in self._members if wanted in one]

    def own(self, metric: str, step: int | None) -> float | None:
        """Return the value of a metric of this job."""
        return self._own.get(GroupValue(metric, step))


def _by_name(member: MemberRecord) -> dict[GroupValue, float]:
    values = ((GroupValue(one.metric, one.step), decode(one.value)) for one in member.values)
    return {name: value for name, value in values if value is not None}

"""Recognize an account whose prepaid credit ends soon: the provider would end its machines without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from functions.fleet.records import Machine

LOW_H = 2.0
"""Hours of the present spending at which the credit counts as low."""


def sum_spending(machines: Iterable[Machine]) -> Mapping[str, float]:
    """Return the present spending by provider in USD per hour; providers without a billed machine are missing."""
    sums: dict[str, float] = {}
    for one in machines:
        if one.billed:
            sums[one.provider] = sums.get(one.provider, 0.0) + one.usd_per_hour
    return sums


def describe_low_balance(balance_usd: float | None, usd_per_hour: float) -> str:
    """Return why a credit is low, and the remedy; empty for enough credit, and for a provider that bills afterwards."""
    if balance_usd is None or balance_usd > LOW_H * usd_per_hour:
        return ""
    if balance_usd <= 0:
        return f"the credit is {balance_usd:.2f} USD; add credit, because the provider rents nothing without"
    hours = balance_usd / usd_per_hour
    return (
        f"the credit of {balance_usd:.2f} USD lasts {hours:.1f} h at {usd_per_hour:.2f} USD/h; add credit before the "
        "provider ends the machines"
    )

"""Define amounts of money and budgets."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from baton.contract.base import WireModel

Usd = Annotated[float, Field(gt=0, le=1_000_000)]


class Budget(WireModel):
    """Upper bounds of spending in USD. Every bound that is given holds at all times.

    Example: `{"total_usd": 20, "per_day_usd": 5}`
    """

    total_usd: Usd | None = None
    per_day_usd: Usd | None = None
    """Per day, by UTC."""
    per_month_usd: Usd | None = None
    """Per calendar month, by UTC."""

    @model_validator(mode="after")
    def _has_a_bound(self) -> Self:
        if self.total_usd is None and self.per_day_usd is None and self.per_month_usd is None:
            raise ValueError("a budget needs total_usd, per_day_usd or per_month_usd")
        return self

"""Define the machines that a job rents for itself."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from baton.contract.base import WireModel
from baton.contract.fleets.money import Usd
from baton.contract.names import ProviderName

SHOWN_JOB_ID = 8
"""Characters of the job's id in the name of its fleet."""


class RentSpec(WireModel):
    """Money and providers for machines of the job's own: one, or one for each node. The job's requirements choose them.

    Example: `{"budget_usd": 5, "providers": ["loopback"], "max_usd_per_hour": 0.5}`
    """

    budget_usd: Usd
    """Upper bound of all machines of the job together; they are given back before the money ends."""
    providers: Annotated[list[ProviderName], Field(min_length=1, max_length=8)]
    max_usd_per_hour: Usd | None = None
    """Price cap of each machine; None: the budget is the only bound."""

    @field_validator("providers")
    @classmethod
    def _names_no_provider_twice(cls, providers: list[str]) -> list[str]:
        if len(set(providers)) < len(providers):
            raise ValueError("names a provider twice")
        return providers


def fleet_of(job_id: str) -> str:
    """Return the name of the fleet, and of the queue, of a job that rents its own machines."""
    return f"rent-{job_id[:SHOWN_JOB_ID]}"

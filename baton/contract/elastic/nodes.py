"""Define how many machines train one job together."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from baton.contract.base import WireModel

MAX_NODES = 64
ELASTIC_PORT = 47100
"""Port of a node inside a rented machine; the provider may map another port of its address to this one."""

NodeCount = Annotated[int, Field(ge=1, le=MAX_NODES)]


class NodesSpec(WireModel):
    """Machines of an elastic training. The training begins with `min` nodes and uses up to `max` nodes.

    Example: `{"min": 2, "max": 8}`
    """

    min: NodeCount = 1
    max: NodeCount

    @model_validator(mode="after")
    def _min_is_not_above_max(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"'min' is {self.min}, which is above 'max' ({self.max})")
        return self

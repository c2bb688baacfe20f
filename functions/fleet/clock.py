"""Provide the clock of the fleets, of which all times of fleets are. In a demo an hour of rent passes in a minute."""

from __future__ import annotations

import math

from functions.domain.record_base import Record


class ClockAnchor(Record):
    """Instant of the server at which the fleets' clock showed `fleet`, and the clock's speed from then on."""

    server: int = 0
    fleet: int = 0
    speed: int = 1


class FleetClock:
    """Clock that runs `anchor.speed` times as fast as the server's clock, from the anchor on.

    anchor: None for the server's clock.
    """

    def __init__(self, anchor: ClockAnchor | None = None) -> None:
        self._anchor = anchor or ClockAnchor()

    def at(self, server_time: float) -> int:
        """Return the fleets' time at a time of the server."""
        anchor = self._anchor
        return anchor.fleet + int((server_time - anchor.server) * anchor.speed)

    def server_time(self, at: int) -> int:
        """Return the server's time at a time of the fleets, rounded up."""
        anchor = self._anchor
        return anchor.server + math.ceil((at - anchor.fleet) / anchor.speed)

    def server_seconds(self, seconds: float) -> int:
        """Return a duration of the fleets in seconds of the server; at least 1."""
        return max(1, round(seconds / self._anchor.speed))

    def server_price(self, usd_per_hour: float) -> float:
        """Return a price per hour of the fleets as USD per hour of the server."""
        return usd_per_hour * self._anchor.speed


def anchor_at_speed(known: ClockAnchor | None, server_time: int, speed: int) -> ClockAnchor:
    """Return the anchor of a clock with this speed that goes on where the clock of `known` is at `server_time`.

    A clock that began anew at another speed would go back, and machines would be younger than their last events.
    """
    if known is not None and known.speed == speed:
        return known
    fleet = server_time if known is None else FleetClock(known).at(server_time)
    return ClockAnchor(server=server_time, fleet=fleet, speed=speed)

"""Bill machines by the second, as a provider does, so that a test can assert money."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class BilledSpan:
    """Cost of one kind for one machine, from `begin_at` to `end_at`; open while `end_at` is None."""

    handle: str
    kind: str
    usd_per_hour: float
    begin_at: float
    end_at: float | None = None

    def usd(self, now: float) -> float:
        """Return the cost up to `now` in USD."""
        until = now if self.end_at is None else min(self.end_at, now)
        return max(0.0, until - self.begin_at) / 3600 * self.usd_per_hour


@dataclass
class BillingMeter:
    """Meter of a provider. `now`: the provider's clock in seconds."""

    now: Callable[[], float]
    spans: list[BilledSpan] = field(default_factory=list)
    extra_usd: dict[tuple[str, str], float] = field(default_factory=dict)
    """Costs that do not grow with time, such as traffic, by machine and kind."""

    def rate(self, handle: str, kind: str, usd_per_hour: float) -> None:
        """Bill a machine at a price from now on, in place of the earlier price of this kind; 0 ends the billing."""
        for span in self.spans:
            if (span.handle, span.kind) == (handle, kind) and span.end_at is None:
                if span.usd_per_hour == usd_per_hour:
                    return
                span.end_at = self.now()
        if usd_per_hour:
            self.spans.append(BilledSpan(handle, kind, usd_per_hour, self.now()))

    def add(self, handle: str, kind: str, usd: float) -> None:
        """Bill a single amount."""
        self.extra_usd[handle, kind] = self.extra_usd.get((handle, kind), 0.0) + usd

    def end(self, handle: str) -> None:
        """End the billing of a machine."""
        for span in self.spans:
            if span.handle == handle and span.end_at is None:
                span.end_at = self.now()

    def billing(self) -> list[str]:
        """Return the machines that cost money at this moment."""
        return sorted({span.handle for span in self.spans if span.end_at is None})

    def usd(self, handle: str | None = None, kind: str | None = None) -> float:
        """Return the bill in USD up to now, of one machine and kind or of all."""
        now = self.now()
        spans = sum(span.usd(now) for span in self.spans if handle in (None, span.handle) and kind in (None, span.kind))
        extra = sum(
            usd for (owner, sort), usd in self.extra_usd.items() if handle in (None, owner) and kind in (None, sort)
        )
        return spans + extra

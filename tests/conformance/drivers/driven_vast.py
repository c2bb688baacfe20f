"""Drive Vast.ai's driver over the fake of Vast.ai."""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr

from baton.contract.fleets.providers import VastAccount
from fakes.vast.provider import KEY, FakeVast
from functions.fleet.drivers.vast.driver import VastDriver
from tests.kits.clock import Clock


def vast_account(fake: FakeVast, key: str = KEY) -> VastAccount:
    return VastAccount(api_key=SecretStr(key), address=fake.url)


class VastDriven:
    """A service without the intervals between calls, whose instances run and are listed at once."""

    charges = True

    def __init__(self, directory: Path) -> None:
        self.clock = Clock(1_700_000_000)
        self.fake = FakeVast(self.clock)
        self.fake.intervals_s.clear()
        self.fake.boot_s = self.fake.visible_after_s = 0
        self.fake.__enter__()
        self.driver = VastDriver(vast_account(self.fake), now=self.clock, pause=lambda _: None)

    def now(self) -> int:
        return int(self.clock())

    def advance(self, seconds: int) -> None:
        self.clock.advance(seconds)

    def inject(self, fault: str) -> None:
        match fault:
            case "lost_answers":
                self.fake.inject("lost", "PUT /api/v0/asks/")
            case "unreadable":
                self.fake.inject("500", "GET /api/v1/instances/", count=2)
            case "snatched":
                self.fake.snatched = 1
            case "incomplete":
                self.fake.unreadable_rows = 1
            case "ignored_destroys":
                self.fake.ignored_destroys = 1

    def existing(self) -> list[str]:
        return self.fake.labels()

    def end(self, token: str) -> None:
        handle = next(one.handle for one in self.fake.instances if one.body["label"] == token and not one.destroyed)
        self.fake.set_status(handle, "exited")

    def close(self) -> None:
        for one in self.fake.instances:
            self.driver.destroy(one.handle)
        assert self.fake.meter.billing() == []
        self.fake.__exit__()

"""Drive RunPod's driver over the fake of RunPod."""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr

from baton.contract.fleets.providers import RunpodAccount
from fakes.runpod.provider import FakePod, FakeRunpod
from functions.fleet.drivers.runpod import RunpodDriver
from tests.kits.clock import Clock


def runpod_account(fake: FakeRunpod) -> RunpodAccount:
    return RunpodAccount(api_key=SecretStr(fake.key), address=f"{fake.url}/v2")


class RunpodDriven:
    """RunPod's list has one page, therefore an entry without a name is what makes an inventory incomplete."""

    charges = True

    def __init__(self, directory: Path) -> None:
        self.clock = Clock(1_700_000_000)
        self.fake = FakeRunpod(self.clock)
        self.fake.__enter__()
        self.driver = RunpodDriver(runpod_account(self.fake), now=self.clock)

    def now(self) -> int:
        return int(self.clock())

    def advance(self, seconds: int) -> None:
        self.clock.advance(seconds)

    def inject(self, fault: str) -> None:
        match fault:
            case "lost_answers":
                self.fake.inject("lost", "POST /v2/pods")
            case "unreadable":
                self.fake.inject("500", "GET /v2/pods", count=2)
            case "snatched":
                self.fake.unplaceable = 1
            case "incomplete":
                self.fake.unreadable_entries = 1
            case "ignored_destroys":
                self.fake.ignored_deletes = 1

    def existing(self) -> list[str]:
        return [one.request["name"] for one in self.fake.exists()]

    def pod(self, token: str) -> FakePod:
        return next(one for one in self.fake.exists() if one.request["name"] == token)

    def end(self, token: str) -> None:
        self.fake.end(self.pod(token))

    def close(self) -> None:
        self.fake.scopes = {"pods", "billing"}
        for one in self.fake.exists():
            self.driver.destroy(one.id)
        assert self.fake.meter.billing() == []
        self.fake.__exit__()

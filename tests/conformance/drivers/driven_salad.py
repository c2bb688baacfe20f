"""Drive Salad's driver over the fake of Salad."""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr

from baton.contract.fleets.providers import SaladAccount
from fakes.salad.api import JWKS, FakeSalad
from functions.fleet.drivers.salad.driver import SaladDriver
from tests.kits.clock import Clock


def salad_account(fake: FakeSalad) -> SaladAccount:
    return SaladAccount(
        api_key=SecretStr(fake.api_key),
        organization=fake.organization,
        project=fake.project,
        address=fake.address,
        identity_keys=fake.url + JWKS,
    )


class SaladDriven:
    """Nodes are found, images pulled and containers stopped at once, because the suite lets no time pass for them.

    Salad's API has no charges. Its list has one page, therefore an entry that is not a group is what makes an inventory
    incomplete. A machine ends without a destroy when somebody stops its group on the portal.
    """

    charges = False

    def __init__(self, directory: Path) -> None:
        self.clock = Clock(1_700_000_000)
        self.fake = FakeSalad(self.clock)
        cloud = self.fake.cloud
        cloud.allocate_s = cloud.download_s = cloud.create_s = cloud.stopping_s = 0.0
        self.fake.__enter__()
        self.driver = SaladDriver(salad_account(self.fake), now=self.clock)

    def now(self) -> int:
        return int(self.clock())

    def advance(self, seconds: int) -> None:
        self.clock.advance(seconds)

    def inject(self, fault: str) -> None:
        groups = f"/api/public/organizations/{self.fake.organization}/projects/{self.fake.project}/containers"
        match fault:
            case "lost_answers":
                self.fake.inject("lost", f"POST {groups}")
            case "unreadable":
                self.fake.inject("500", f"GET {groups}", count=2)
            case "snatched":
                self.fake.withdrawn_classes = 1
            case "incomplete":
                self.fake.unreadable_groups = [{}]
            case "ignored_destroys":
                self.fake.cloud.ignored_deletes = 1

    def existing(self) -> list[str]:
        self.fake.cloud.settle()
        return list(self.fake.cloud.groups)

    def end(self, token: str) -> None:
        self.fake.cloud.stop(self.fake.group(token))

    def close(self) -> None:
        for name in self.existing():
            self.driver.destroy(name)
        assert self.fake.billing() == []
        self.fake.__exit__()

"""Transfer tokens: a download token opens one object once, for any number of callers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import ClassVar, Literal

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from functions.domain.records import TransferGrant
from tests.kits.api.factories import NOW, TENANT
from tests.properties.serving import Stores, pick


class TokenMachine(RuleBasedStateMachine):
    """Subclasses say on which stores: `fresh`."""

    fresh: ClassVar[Callable[[], Stores]]

    def __init__(self) -> None:
        super().__init__()
        self.tokens = type(self).fresh().tokens
        self.now = NOW
        self.grants: list[TransferGrant] = []
        self.redeemed: set[str] = set()

    @rule(purpose=st.sampled_from(["download", "download", "upload"]), life_s=st.sampled_from([300, 10]))
    def issue(self, purpose: Literal["download", "upload"], life_s: int) -> None:
        grant = TransferGrant(
            token_sha256=hashlib.sha256(f"grant {len(self.grants)}".encode()).hexdigest(),
            purpose=purpose,
            tenant=TENANT,
            bucket="training-data",
            key="a:b/..c d",
            expires_at=self.now + life_s,
        )
        self.tokens.put_grant(grant)
        self.grants.append(grant)

    @precondition(lambda self: self.grants)
    @rule(which=st.integers(0, 20), again=st.booleans())
    def redeem(self, which: int, again: bool) -> None:
        grant = pick(self.grants, which)
        for _ in range(1 + again):
            due = grant.purpose == "download" and grant.expires_at > self.now
            expected = grant if due and grant.token_sha256 not in self.redeemed else None
            assert self.tokens.redeem(grant.token_sha256, self.now) == expected
            if expected is not None:
                self.redeemed.add(grant.token_sha256)

    @precondition(lambda self: self.grants)
    @rule(which=st.integers(0, 20))
    def look(self, which: int) -> None:
        """Check that a grant can be read until it is redeemed, even after its expiry: the reader compares the time."""
        grant = pick(self.grants, which)
        expected = None if grant.token_sha256 in self.redeemed else grant
        assert self.tokens.get_grant(grant.token_sha256) == expected

    @rule(number=st.integers(-3, -1))
    def guess(self, number: int) -> None:
        guessed = hashlib.sha256(f"grant {number}".encode()).hexdigest()
        assert self.tokens.redeem(guessed, self.now) is None
        assert self.tokens.get_grant(guessed) is None

    @rule(seconds=st.sampled_from([1, 9, 10, 299, 300]))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

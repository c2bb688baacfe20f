"""Test each provider's driver over a provider with injected faults: the promises that the controller relies on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from functions.fleet.drivers.protocol import Ambiguous, Created, NotCreated, ProviderUnavailable
from tests.conformance.drivers.driver_kit import (
    LOGIN,
    PASSWORD,
    PREFIX,
    PROVIDERS,
    SECRET,
    SPEC,
    DrivenProvider,
    create,
    inventory,
)
from tests.kits.network.ssh_server import MISSING, SSHD
from tests.kits.waiting import soon

TOKEN = f"{PREFIX}nights-1"


def _marked(name: str) -> object:
    marks = [pytest.mark.processes] if name in ("loopback", "ssh") else []
    if name == "ssh":
        marks.append(pytest.mark.skipif(SSHD is None, reason=MISSING))
    return pytest.param(name, marks=marks)


@pytest.fixture(params=[_marked(name) for name in PROVIDERS])
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DrivenProvider]:
    made: DrivenProvider = PROVIDERS[request.param](tmp_path)
    yield made
    made.close()
    soon(lambda: not made.existing(), what="the end of all machines")


def made(provider: DrivenProvider, token: str = TOKEN) -> str:
    """Create a machine; return its handle."""
    result = create(provider, token)
    assert isinstance(result, Created)
    return result.handle


def ended(provider: DrivenProvider, token: str = TOKEN) -> None:
    """Wait until the provider neither lists nor runs the machine."""
    soon(lambda: not inventory(provider).of(token) and token not in provider.existing(), what="the machine's end")


def test_a_quote_has_no_side_effects(provider: DrivenProvider) -> None:
    offers = provider.driver.quote(SPEC)
    assert offers and len({one.ref for one in offers}) == len(offers)
    assert all(one.provider == provider.driver.name and one.usd_per_hour > 0 for one in offers)
    assert (provider.existing(), inventory(provider).sightings) == ([], [])
    assert [one.ref for one in provider.driver.quote(SPEC)] == [one.ref for one in offers]


def test_a_created_machine_exists_and_is_listed_under_its_token(provider: DrivenProvider) -> None:
    price = min(one.usd_per_hour for one in provider.driver.quote(SPEC))
    asked_at, handle = provider.now(), made(provider)
    earliest, found, latest = provider.now(), inventory(provider), provider.now()
    (seen,) = found.of(TOKEN)
    assert (found.provider, found.complete) == (provider.driver.name, True)
    assert earliest <= found.at <= latest
    assert (seen.handle, seen.running, seen.usd_per_hour) == (handle, True, price)
    assert asked_at - 1 <= seen.created_at <= earliest + 1
    assert provider.existing() == [TOKEN]


def test_each_create_that_succeeded_is_listed_also_for_a_repeated_token(provider: DrivenProvider) -> None:
    """A provider may refuse the repetition or make a second machine, but never hides one of them."""
    other = made(provider, f"{PREFIX}nights-2")
    results = [create(provider), create(provider)]
    handles = {one.handle for one in results if isinstance(one, Created)}
    assert {one.handle for one in inventory(provider).of(TOKEN)} == handles
    assert [one.handle for one in inventory(provider).of(f"{PREFIX}nights-2")] == [other]
    assert other not in handles
    assert provider.existing().count(TOKEN) == len(handles) >= 1


def test_machines_of_other_deployments_are_not_listed(provider: DrivenProvider) -> None:
    made(provider, "dep20000-nights-1")
    made(provider)
    assert [one.token for one in inventory(provider).sightings] == [TOKEN]


def test_a_destroy_ends_the_machine_and_its_bill_and_may_be_repeated(provider: DrivenProvider) -> None:
    handle, spared = made(provider), made(provider, f"{PREFIX}nights-2")
    provider.advance(1800)
    assert provider.driver.destroy(handle)
    ended(provider)
    bill = provider.driver.charged_usd(handle)
    provider.advance(1800)
    assert provider.driver.destroy(handle)
    assert provider.driver.destroy("no-such-machine")
    assert provider.driver.charged_usd(handle) == bill
    assert [one.handle for one in inventory(provider).sightings] == [spared]


def test_a_lost_answer_is_ambiguous_and_the_machine_exists(provider: DrivenProvider) -> None:
    provider.inject("lost_answers")
    assert isinstance(create(provider), Ambiguous)
    (seen,) = inventory(provider).of(TOKEN)
    assert provider.existing() == [TOKEN]
    provider.driver.destroy(seen.handle)
    ended(provider)


def test_a_snatched_offer_is_a_certain_refusal(provider: DrivenProvider) -> None:
    provider.inject("snatched")
    result = create(provider)
    assert isinstance(result, NotCreated) and result.reason and result.handle is None
    assert (provider.existing(), inventory(provider).sightings) == ([], [])
    assert isinstance(create(provider), Created)


def test_a_list_that_cannot_be_read_proves_nothing(provider: DrivenProvider) -> None:
    made(provider)
    provider.inject("incomplete")
    assert not inventory(provider).complete
    provider.inject("unreadable")
    with pytest.raises(ProviderUnavailable):
        inventory(provider)
    assert inventory(provider).complete and inventory(provider).of(TOKEN)


def test_a_destroy_without_an_effect_leaves_the_machine_listed_and_billed(provider: DrivenProvider) -> None:
    handle = made(provider)
    provider.inject("ignored_destroys")
    assert provider.driver.destroy(handle)
    provider.advance(3600)
    assert inventory(provider).of(TOKEN) and provider.existing() == [TOKEN]
    assert bool(provider.driver.charged_usd(handle)) == provider.charges
    provider.driver.destroy(handle)
    ended(provider)


def test_the_bill_is_price_times_life(provider: DrivenProvider) -> None:
    handle = made(provider)
    (seen,) = inventory(provider).of(TOKEN)
    assert seen.usd_per_hour
    for hours in (1, 2):
        provider.advance(3600)
        expected = pytest.approx(hours * seen.usd_per_hour, rel=1e-3) if provider.charges else None
        assert provider.driver.charged_usd(handle) == expected
    assert provider.driver.charged_usd("no-such-machine") is None


def test_a_machine_that_ended_by_itself_is_not_listed_as_running(provider: DrivenProvider) -> None:
    made(provider)
    provider.end(TOKEN)
    soon(lambda: not any(one.running for one in inventory(provider).of(TOKEN)), what="the news of the end")
    assert inventory(provider).complete


def test_no_secret_is_in_offers_lists_or_logs(provider: DrivenProvider) -> None:
    answer = create(provider, login=LOGIN)
    assert isinstance(answer, Created)
    told = (answer, provider.driver.quote(SPEC), inventory(provider), provider.driver.logs(answer.handle))
    assert SECRET not in repr(told) and PASSWORD not in repr(told)
    assert provider.driver.logs("no-such-machine") is None

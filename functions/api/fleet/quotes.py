"""Ask all providers for their offers at once, within the time of one API call."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from pydantic import ValidationError

from baton.contract.fleets.fleet import FleetSpec
from functions.fleet.accounts import AccountsUnreadable, no_account
from functions.fleet.drivers.protocol import Driver, ProviderRefused, ProviderUnavailable
from functions.fleet.records import Offer
from functions.fleet.store import FleetStore
from functions.fleet.ticks.tick import NO_ANSWER

logger = logging.getLogger("baton.fleet")

ANSWER_S = 20.0
"""Time for all providers together: API Gateway ends a call after 30 s."""


def ask(
    drivers: Mapping[str, Driver], store: FleetStore, providers: Iterable[str], spec: FleetSpec, now: int
) -> tuple[list[Offer], dict[str, str]]:
    """Return the offers of the providers, and the reason of each provider without an answer.

    A provider's minimum interval counts calls of the controller's tick as well.
    """
    silent: dict[str, str] = {}
    asked: dict[str, Driver] = {}
    for name in providers:
        try:
            driver = drivers.get(name)
        except AccountsUnreadable as error:
            silent[name] = str(error)
            continue
        if driver is None:
            silent[name] = no_account(name).removeprefix(f"{name}: ")
            continue
        interval_s = driver.min_interval_s.get("quote", 0.0)
        if interval_s and not store.allow(name, "quote", now, interval_s):
            silent[name] = f"takes one call in {interval_s:g} s; try again then"
        else:
            asked[name] = driver
    offers: list[Offer] = []
    if not asked:
        return offers, silent
    pool = ThreadPoolExecutor(len(asked), thread_name_prefix="quote")
    answers = {name: pool.submit(driver.quote, spec) for name, driver in asked.items()}
    done, _ = wait(answers.values(), ANSWER_S)
    # A read that still waits for its provider ends by its own time-out; nothing follows from its answer.
    pool.shutdown(wait=False)
    for name, answer in answers.items():
        if answer not in done:
            silent[name] = f"did not answer within {ANSWER_S:g} s"
            continue
        try:
            found: Sequence[Offer] = answer.result()
        except (ProviderUnavailable, ProviderRefused) as error:
            silent[name] = str(error)
        except ValidationError as error:
            silent[name] = f"the answer has {error.error_count()} impossible values"
        except NO_ANSWER as error:
            logger.warning("the driver of %s failed", name, exc_info=error)
            silent[name] = f"its driver failed with {type(error).__name__}, and the log has the cause"
        else:
            offers += found
    return offers, silent

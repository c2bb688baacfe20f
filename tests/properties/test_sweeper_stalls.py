"""The sweeper's retention, stalled before each of its storage calls in turn, or killed there, while others go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.contract.errors import ErrorCode
from functions.domain.checkpoints.packs import DEAD_AFTER_S, SWEEPER_TIMEOUT_S
from functions.domain.jobs.attempt_end import LATE_AFTER_S
from tests.kits.api.harness import TENANT, Answer, Api, Held
from tests.properties.stalling import stalled_sweep
from tests.properties.test_every_stall import DIGESTS, P, Q, R, S, World, repeated, world


def stopped_with_leavings() -> World:
    """Job one keeps step 20. Step 10 is read no more, and step 30 was never committed."""
    made = world()
    made.commit(made.one, 10, P, Q)
    made.api.post(f"/job/{made.one.id}/checkpoints/10/urls", key="submit").ok()
    made.commit(made.one, 20, Q)
    made.ready(made.one, 30, R)
    made.commit(made.two, 10, S)
    made.api.post(f"/job/{made.one.id}/stop").ok()
    made.api.clock.advance(LATE_AFTER_S)
    made.two.heartbeat().ok()
    return made


def another_job_takes_up_what_goes(made: World) -> str:
    return committed(made, made.two, 20, P, R)


def it_is_retried_restored_and_goes_on(made: World) -> str:
    api, job = made.api, made.one.id
    chosen = api.post(f"/job/{job}/retry", {"from_step": 10})
    if chosen.status == 404:
        api.post(f"/job/{job}/retry").ok()
    made.one = api.claim(queue="one", machine_id="m-2")
    (step,) = [ref["step"] for ref in made.one.item["resume"]]
    assert step == (20 if chosen.status == 404 else 10)
    urls = made.one.post(f"/job/{job}/checkpoints/{step}/urls").ok()["urls"]
    for digest, url in urls.items():
        assert api.send("GET", url).text.encode() == DIGESTS[digest]
    return f"from step {step}, {committed(made, made.one, step + 5, P, R)}"


def committed(made: World, held: Held, step: int, *packs: bytes) -> str:
    """A commit by a worker that repeats what is refused for the moment: whether it had to wait, or to upload."""
    manifest = held.manifest(step, {str(number): data for number, data in enumerate(packs)})

    def send(_: Api) -> Answer:
        return held.post(f"/job/{held.id}/checkpoints", manifest)

    answer = send(made.api)
    said = "had to wait"
    if answer.status == 200:
        said = "had to upload" if answer.json["missing"] else "at once"
    else:
        assert answer.error["code"] == ErrorCode.CONFLICT, answer.text
        made.check()
        made.api.clock.advance(SWEEPER_TIMEOUT_S + DEAD_AFTER_S)
        held.heartbeat().ok()
    assert repeated(made, send).ok()["committed"] is True
    return said


@pytest.mark.parametrize("killed", [False, True], ids=["stalled", "killed"])
@pytest.mark.parametrize("later_s", [0, SWEEPER_TIMEOUT_S - 1])
@pytest.mark.parametrize("meanwhile", [another_job_takes_up_what_goes, it_is_retried_restored_and_goes_on])
def test_nothing_is_lost_and_nothing_is_left(meanwhile: Callable[[World], str], later_s: int, killed: bool) -> None:
    """`later_s`: longer than any other function lives, and longer than what one of them condemned is refused."""
    assert later_s in (0, DEAD_AFTER_S + 4)
    steps, over = 0, False
    seen: set[str] = set()
    while not over:
        made = stopped_with_leavings()
        sweeping = stalled_sweep(made.api)
        sweeping.step(steps)
        over = sweeping.done
        made.api.clock.advance(later_s)
        began = made.api.clock.now()
        made.check()
        seen.add(meanwhile(made))
        made.check()
        # Where somebody had to wait for it, its function is over.
        if killed or made.api.clock.now() - began > SWEEPER_TIMEOUT_S:
            sweeping.kill()
        else:
            sweeping.finish()
        made.check()
        left(made)
        steps += 1
    assert steps > 12, "there is nothing to stall at"
    assert len(seen) > 1, "it makes no difference when"


def left(made: World) -> None:
    """End both jobs with their retention; check that exactly the packs that checkpoints name are stored."""
    api = made.api
    api.clock.advance(SWEEPER_TIMEOUT_S + DEAD_AFTER_S)
    for held in (made.one, made.two):
        if api.job(held.id)["state"] == "running":
            held.heartbeat().ok()
            held.complete().ok()
    api.clock.advance(2 * LATE_AFTER_S)
    api.retain()
    assert api.context.jobs.due_retentions(2**40, limit=9) == []
    named = made.check()
    assert {key.removeprefix("packs/") for key in api.objects(prefix="packs/")} == set(named)
    items = api.context.packs.get_many(TENANT, DIGESTS)
    assert {digest: set(item.jobs) for digest, item in items.items() if item.jobs} == named
    assert len([key for key in api.objects() if "/manifests/" in key]) == 2

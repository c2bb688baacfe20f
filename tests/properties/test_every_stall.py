"""Test two calls of the API: the first stalls before each of its storage calls in turn, the second runs to its end.

Each pair also runs with the stalled call killed. Afterwards no checkpoint has lost a byte, and once the jobs have
ended, every stored pack is named by a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from blake3 import blake3

from baton.contract.checkpoints.manifest import Pack, parse_manifest
from baton.contract.errors import ErrorCode
from functions.domain.checkpoints.packs import DEAD_AFTER_S, CondemnPack
from functions.domain.records import CheckpointRecord
from tests.kits.api.harness import TENANT, Answer, Api, Held, memory_api
from tests.kits.files.declared_files import pack_of
from tests.properties.stalling import StalledCall

P, Q, R, S = (f"pack {name}".encode() for name in "pqrs")
DIGESTS = {blake3(data).hexdigest(): data for data in (P, Q, R, S)}
Send = Callable[[Api], Answer]


@dataclass
class World:
    """Two jobs of one tenant, each of which keeps its last checkpoint."""

    api: Api
    one: Held
    two: Held

    def ready(self, held: Held, step: int, *packs: bytes) -> Send:
        """Upload the packs of a commit; return its last call."""
        manifest = held.manifest(step, {f"{number}.bin": data for number, data in enumerate(packs)})
        path = f"/job/{held.id}/checkpoints"
        stored = self.api.objects(prefix="packs/")
        if any(f"packs/{pack['blake3']}" not in stored for pack in manifest["packs"]):
            held.upload_missing(held.post(path, manifest), DIGESTS)
        return lambda api: Held(api, held.item).post(path, manifest)

    def commit(self, held: Held, step: int, *packs: bytes) -> None:
        held.commit(step, {f"{number}.bin": data for number, data in enumerate(packs)}).ok()

    def check(self) -> dict[str, set[str]]:
        """Check that every checkpoint is whole; return the jobs that name each pack."""
        stored = self.api.objects()
        named: dict[str, set[str]] = {}
        for held in (self.one, self.two):
            for record in self.api.context.jobs.history(CheckpointRecord, held.id, limit=100).items:
                assert record.manifest_key in stored, f"the manifest of step {record.step} is gone"
                for pack in parse_manifest(stored[record.manifest_key]).packs:
                    assert stored.get(f"packs/{pack.blake3}") == DIGESTS[pack.blake3], f"lost {DIGESTS[pack.blake3]!r}"
                    named.setdefault(pack.blake3, set()).add(held.id)
        return named

    def check_nothing_is_left(self) -> None:
        """End the jobs; check that exactly the packs of checkpoints are stored, each held by the jobs that name it."""
        self.api.clock.advance(DEAD_AFTER_S)
        for name, held in (("one", self.one), ("two", self.two)):
            holder = held
            if self.api.job(held.id)["state"] == "complete":
                self.api.post(f"/job/{held.id}/retry").ok()
                holder = self.api.claim(queue=name)
            holder.heartbeat().ok()
            holder.complete().ok()
        named = self.check()
        assert {key.removeprefix("packs/") for key in self.api.objects(prefix="packs/")} == set(named)
        items = self.api.context.packs.get_many(TENANT, DIGESTS)
        assert {digest: set(item.jobs) for digest, item in items.items() if item.jobs} == named
        manifests = [key for key in self.api.objects() if "/manifests/" in key]
        assert len(manifests) == 2


def world() -> World:
    api = memory_api()
    helds = []
    for name in ("one", "two"):
        api.submit(queue=name, policy={"retention": {"keep_last": 1}, "heartbeat_interval_s": 600})
        helds.append(api.claim(queue=name))
    return World(api, *helds)


# Each builds a state and answers with two calls.


def one_job_drops_and_names_again(world: World) -> tuple[Send, Send]:
    world.commit(world.one, 10, P, Q)
    return world.ready(world.one, 20, R), world.ready(world.one, 30, P, R)


def one_job_drops_what_the_other_takes_up(world: World) -> tuple[Send, Send]:
    world.commit(world.one, 10, P, Q)
    world.commit(world.two, 10, S)
    return world.ready(world.one, 20, R), world.ready(world.two, 20, P, S)


def both_drop_what_they_shared(world: World) -> tuple[Send, Send]:
    world.commit(world.one, 10, P, Q)
    world.commit(world.two, 10, P, Q)
    return world.ready(world.one, 20, R), world.ready(world.two, 20, S)


def both_upload_the_same(world: World) -> tuple[Send, Send]:
    first = world.ready(world.one, 10, P, Q)
    return first, world.ready(world.two, 10, P, R)


def a_whole_life_in_between(world: World) -> tuple[Send, Send]:
    """The first job has uploaded a pack; the second holds the pack, commits it, and lets it go."""
    mine = world.ready(world.one, 10, P)
    world.commit(world.two, 5, S)

    def other(api: Api) -> Answer:
        held = Held(api, world.two.item)
        held.commit(10, {"a": P})
        return held.commit(20, {"a": Q})

    return mine, other


def the_end_of_the_one(world: World) -> tuple[Send, Send]:
    """The end of the first job removes the pack of its killed commit, while the second job takes up the same pack."""
    world.commit(world.one, 10, Q)
    world.commit(world.two, 10, S)
    world.ready(world.one, 20, P)
    ending = world.one.item
    taking = world.ready(world.two, 20, P, R)

    def end(api: Api) -> Answer:
        return Held(api, ending).complete()

    return end, taking


def damage_and_reuse(world: World) -> tuple[Send, Send]:
    world.commit(world.one, 10, P)
    world.commit(world.two, 10, Q)
    path = f"/job/{world.one.id}/checkpoints/10/damaged"
    report = world.one.item
    return (lambda api: Held(api, report).post(path, {"epoch": 1})), world.ready(world.two, 20, P)


def the_next_attempt_takes_up_what_the_last_one_left(world: World) -> tuple[Send, Send]:
    """Retention behind its first commit wants to sweep that up. No record goes with it, and yet `rev` must rise."""
    world.ready(world.one, 20, Q)
    world.one.release().ok()
    world.one = world.api.claim(queue="one")
    world.commit(world.two, 10, S)
    return world.ready(world.one, 20, P), world.ready(world.one, 30, P, Q)


def two_come_upon_what_a_dead_one_condemned(world: World) -> tuple[Send, Send]:
    """The one takes it over, for its object is still there; the other condemns it again, and deletes it."""
    world.commit(world.one, 10, Q)
    world.commit(world.two, 10, S)
    world.ready(world.two, 20, P)
    pack = Pack.model_validate(pack_of(P))
    assert not world.api.context.packs.remove_references(
        TENANT, "x", [CondemnPack(pack=pack, seen=None, at=world.api.clock.now())]
    )
    world.api.clock.advance(DEAD_AFTER_S)
    ending = world.two.item

    def end(api: Api) -> Answer:
        return Held(api, ending).complete()

    return world.ready(world.one, 20, P), end


SCENES = (
    one_job_drops_and_names_again,
    one_job_drops_what_the_other_takes_up,
    both_drop_what_they_shared,
    both_upload_the_same,
    a_whole_life_in_between,
    the_end_of_the_one,
    damage_and_reuse,
    two_come_upon_what_a_dead_one_condemned,
    the_next_attempt_takes_up_what_the_last_one_left,
)
PASSING = {ErrorCode.CONFLICT}
OVERTAKEN = {ErrorCode.STEP_NOT_NEWER}


@pytest.mark.parametrize("killed", [False, True], ids=["stalled", "killed"])
@pytest.mark.parametrize("swapped", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_nothing_is_lost_and_nothing_is_left(
    scene: Callable[[World], tuple[Send, Send]], swapped: bool, killed: bool
) -> None:
    steps, over = 0, False
    while not over:
        made = world()
        first, second = scene(made)
        if swapped:
            first, second = second, first
        stalled = StalledCall(made.api, first)
        stalled.step(steps)
        over = stalled.done
        heard = [second(made.api)]
        if killed:
            stalled.kill()
        heard.append(stalled.finish() if not stalled.killed else heard[0])
        made.check()
        for send, answer in ((second, heard[0]), (first, heard[1])):
            again = answer
            if again.status != 200 and again.error["code"] in PASSING:
                made.api.clock.advance(DEAD_AFTER_S)
                made.check()
                again = repeated(made, send)
            assert again.status == 200 or again.error["code"] in OVERTAKEN, again.text
            made.check()
        repeated(made, first)
        made.check()
        if all(made.api.job(held.id)["checkpoint_step"] is not None for held in (made.one, made.two)):
            made.check_nothing_is_left()
        steps += 1
    assert steps > 5, "there is nothing to stall at"


def the_next_attempt_drops_and_names_again(world: World) -> tuple[Send, Send]:
    """Retention comes behind its first commit, with a transaction of its own."""
    world.commit(world.one, 10, P)
    world.one.release().ok()
    world.one = world.api.claim(queue="one")
    return world.ready(world.one, 20, R), world.ready(world.one, 30, P)


@pytest.mark.parametrize(
    "scene", [one_job_drops_and_names_again, the_next_attempt_drops_and_names_again], ids=lambda scene: scene.__name__
)
def test_nothing_is_lost_when_each_overtakes_the_other(scene: Callable[[World], tuple[Send, Send]]) -> None:
    """The second begins where the first one stalls, stalls in its turn, and goes on once the first has ended."""
    steps_of_first, over, tried = 0, False, 0
    while not over:
        steps_of_second, second_over = 0, False
        while not second_over:
            made = world()
            first, second = (StalledCall(made.api, send) for send in scene(made))
            first.step(steps_of_first)
            over = first.done
            second.step(steps_of_second)
            second_over = second.done
            for call in (first, second):
                answer = call.finish()
                assert answer.status == 200 or answer.error["code"] in PASSING | OVERTAKEN, answer.text
                made.check()
            steps_of_second += 1
            tried += 1
        steps_of_first += 1
    assert tried > 100


def repeated(made: World, send: Send) -> Answer:
    """The worker's way: post, upload what is missing, post."""
    answer = send(made.api)
    if answer.status == 200 and answer.json.get("missing"):
        for item in answer.json["missing"]:
            sent = made.api.send("PUT", item["url"], item["headers"], DIGESTS[item["blake3"]])
            assert sent.status in (200, 412)
        answer = send(made.api)
    return answer


@pytest.mark.parametrize("killed", [False, True], ids=["stalled", "killed"])
@pytest.mark.parametrize("stalling", ["commit", "urls"])
def test_what_somebody_was_told_to_read_stays(stalling: str, killed: bool) -> None:
    steps, over, told, gone = 0, False, 0, 0
    while not over:
        made = world()
        held = made.one
        made.commit(held, 10, P, Q)
        commit = made.ready(held, 20, R)

        def ask(api: Api, held: Held = held) -> Answer:
            return api.post(f"/job/{held.id}/checkpoints/10/urls", key="submit")

        stalled = StalledCall(made.api, commit if stalling == "commit" else ask)
        stalled.step(steps)
        over = stalled.done
        other = (ask if stalling == "commit" else commit)(made.api)
        if killed and not over:
            stalled.kill()
        answer = None if stalled.killed else stalled.finish()
        committed, asked = (answer, other) if stalling == "commit" else (other, answer)
        assert committed is None or committed.ok()["committed"] is True
        if asked is not None and asked.status == 200:
            assert [made.api.send("GET", url).status for url in asked.json["urls"].values()] == [200, 200]
            told += 1
        elif asked is not None:
            assert asked.error["code"] == ErrorCode.CHECKPOINT_NOT_FOUND
            gone += 1
        made.check()
        steps += 1
    assert steps > 2 and told and (gone or killed)


@pytest.mark.parametrize("how", ["lost", "stopped", "handed back", "lost, and proved again"])
def test_a_stalled_commit_of_an_attempt_that_has_ended_commits_nothing(how: str) -> None:
    """The transaction has no condition on the lease: the job's `rev` says whether it has ended since it was read."""
    steps, over, refused = 0, False, 0
    while not over:
        made = world()
        api, held = made.api, made.one
        made.commit(held, 10, P)
        stalled = StalledCall(api, made.ready(held, 20, Q))
        stalled.step(steps)
        over = stalled.done
        before = api.job(held.id)["checkpoint_step"]
        if how.startswith("lost"):
            api.clock.advance(1800)
            if how == "lost":
                assert api.sweep().reclaimed == 2
                api.claim(queue="one", machine_id="m-2")
            else:
                held.heartbeat().ok()
        elif how == "stopped":
            api.post(f"/job/{held.id}/stop").ok()
        else:
            held.release().ok()
            api.claim(queue="one", machine_id="m-2")
        answer = stalled.finish()
        if how == "lost, and proved again" or before == 20:
            assert answer.ok()["committed"] is True
        else:
            # Known already where it has read that the step is committed; or else its attempt is over.
            assert answer.status == 409, answer.text
            assert api.job(held.id)["checkpoint_step"] == 10
            assert [record.step for record in api.context.jobs.history(CheckpointRecord, held.id, limit=9).items] == [
                10
            ]
            refused += 1
        made.check()
        steps += 1
    assert steps > 5 and (refused > 3 or how == "lost, and proved again")

"""Packs shared by checkpoints and by two jobs, under calls that stall or die between any two of their storage calls.

What is checked after every step: each pack that a committed, sound checkpoint names is stored with its bytes. And at
the end, when every job has let go of what its policy does not keep: nothing else is stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from blake3 import blake3
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.contract.checkpoints.manifest import parse_manifest
from baton.contract.errors import ErrorCode
from baton.contract.names import CHECKPOINTS_BUCKET
from functions.domain.checkpoints.packs import DEAD_AFTER_S, FUNCTION_TIMEOUT_S, SWEEPER_TIMEOUT_S
from functions.domain.jobs.attempt_end import LATE_AFTER_S
from functions.domain.records import CheckpointRecord
from tests.kits.api.harness import TENANT, Answer, Api, Held
from tests.kits.clouds.paging import all_pages
from tests.properties.serving import pick
from tests.properties.stalling import StalledCall, stalled_sweep

PACKS = {blake3(data).hexdigest(): data for data in (b"pack %d" % number for number in range(4))}
ALLOWED = {
    ErrorCode.CONFLICT,
    ErrorCode.STEP_NOT_NEWER,
    ErrorCode.CHECKPOINT_CONFLICT,
    ErrorCode.CHECKPOINT_NOT_FOUND,
    ErrorCode.LEASE_LOST,
    ErrorCode.LEASE_EXPIRED,
    ErrorCode.JOB_FINISHED,
    ErrorCode.JOB_NOT_RUNNING,
}
"""Refusals that an honest worker may receive after another worker overtook it."""

names = st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True)
which = st.integers(0, 20)
steps = st.integers(1, 12)
aheads = st.sampled_from([10, 10, 10, 0, -10])
mostly = st.sampled_from([True, True, False])


@dataclass
class Offer:
    """A checkpoint that a worker wants to commit, as far as it has come."""

    held: Held
    manifest: dict[str, Any]
    missing: list[dict[str, Any]] = field(default_factory=list)

    def send(self, api: Api) -> Answer:
        """Post the manifest."""
        answer = Held(api, self.held.item).post(f"/job/{self.held.id}/checkpoints", self.manifest)
        if answer.status == 200:
            self.missing = answer.json["missing"]
        return answer


@dataclass
class Line:
    """A job and its newest worker."""

    name: str
    held: Held
    stopped_at_last: bool
    step: int = 0


class PackMachine(RuleBasedStateMachine):
    """Subclasses say on which stores: `fresh`."""

    fresh: ClassVar[Callable[[], Api]]

    def __init__(self) -> None:
        super().__init__()
        self.api = type(self).fresh()
        self.lines: list[Line] = []
        self.offers: list[Offer] = []
        self.calls: list[StalledCall] = []
        self.rotten: set[str] = set()
        self.loose: set[str] = set()
        """Packs that a machine stored or held after it had lost its job: the sweeper may delete them or leave them."""
        self.read: dict[tuple[str, str], int] = {}
        """Manifests whose packs somebody was given URLs for: until when."""

    @initialize(
        keep_last=st.integers(1, 2), every=st.sampled_from([None, 40]), stopped=st.tuples(st.booleans(), st.booleans())
    )
    def jobs(self, keep_last: int, every: int | None, stopped: tuple[bool, bool]) -> None:
        for name, stopped_at_last in zip(("one", "two"), stopped, strict=True):
            policy = {
                "retention": {"keep_last": keep_last, "keep_every_steps": every},
                "heartbeat_interval_s": 600,
                "max_interruptions": 1000,
            }
            self.api.submit(queue=name, policy=policy)
            self.lines.append(Line(name, self.api.claim(queue=name), stopped_at_last))

    # Calls of workers

    @rule(
        line=which,
        chosen=names,
        ahead=st.sampled_from([10, 10, 10, 0, -10]),
        stalled=st.sampled_from([True, True, False]),
    )
    def commit(self, line: int, chosen: list[int], ahead: int, stalled: bool) -> None:
        """A new checkpoint: the first call of its commit begins, or all of it is done."""
        at = pick(self.lines, line)
        at.step = max(at.step + ahead, 0)
        offer = self.offer(at, chosen)
        if stalled:
            self.begin(offer.send, offer)
            return
        self.heard(offer.send(self.api))
        self._upload(offer, 3)
        self.heard(offer.send(self.api))

    @rule(
        lines=st.tuples(which, which),
        chosen=st.tuples(names, names),
        order=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 5)), min_size=3, max_size=16),
    )
    def race(self, lines: tuple[int, int], chosen: tuple[list[int], list[int]], order: list[tuple[int, int]]) -> None:
        """Interleave the last calls of two commits, each with its retention; all packs are uploaded."""
        calls = []
        for line, numbers in zip(lines, chosen, strict=True):
            at = pick(self.lines, line)
            at.step += 10
            offer = self.offer(at, numbers)
            stored = self.api.objects(prefix="packs/")
            if any(f"packs/{pack['blake3']}" not in stored for pack in offer.manifest["packs"]):
                self.heard(offer.send(self.api))
                self._upload(offer, 3)
            calls.append(self.begin(offer.send, offer))
        for who, count in order:
            if not calls[who].done:
                calls[who].step(count)
                self._ended(calls[who])

    @precondition(lambda self: self.offers)
    @rule(offer=which, count=st.integers(0, 3), again=st.sampled_from(["stalled", "stalled", "whole", "not"]))
    def upload(self, offer: int, count: int, again: str) -> None:
        """Upload some missing packs, perhaps from a machine that has lost its job, and send the manifest again."""
        chosen = pick(self.offers, offer)
        self._upload(chosen, count)
        if again == "stalled":
            self.begin(chosen.send, chosen)
        elif again == "whole":
            self.heard(chosen.send(self.api))

    def _upload(self, offer: Offer, count: int) -> None:
        for item in offer.missing[:count]:
            digest = item["blake3"]
            status = self.api.send("PUT", item["url"], item["headers"], PACKS[digest]).status
            assert status in (200, 404, 412)
            if status == 200:
                self.rotten.discard(digest)
                if self.lost(offer):
                    self.loose.add(digest)

    @rule(line=which, rot=st.booleans(), stalled=st.booleans())
    def damaged(self, line: int, rot: bool, stalled: bool) -> None:
        """A restore finds other bytes than it should; perhaps they are."""
        at = pick(self.lines, line)
        records = [record for record in self.records(at.held.id) if not record.damaged]
        if not records:
            return
        record = records[0]
        named = self.named(record)
        if rot and named:
            digest = sorted(named)[0]
            if f"packs/{digest}" in self.api.objects(prefix="packs/"):
                self.api.put_object(CHECKPOINTS_BUCKET, f"packs/{digest}", b"rotten")
                self.rotten.add(digest)
        path, body = f"/job/{at.held.id}/checkpoints/{record.step}/damaged", {"epoch": record.epoch}
        held = at.held.item
        self.do(lambda api: Held(api, held).post(path, body), stalled=stalled)
        at.step = self.api.job(at.held.id)["checkpoint_step"] or 0

    @rule(line=which, how=st.sampled_from(["release", "stop", "complete", "complete, stalled"]), back=st.booleans())
    def next_attempt(self, line: int, how: str, back: bool) -> None:
        """The job goes to another worker; the one before it does not know."""
        at = pick(self.lines, line)
        if how == "release":
            at.held.release().ok()
        elif how == "stop":
            self.api.post(f"/job/{at.held.id}/stop").ok()
        else:
            held = at.held.item
            self.do(lambda api: Held(api, held).complete(), stalled=how == "complete, stalled", at_least=8)
        self._goes_on(at, back=back)

    @rule(line=which, back=st.booleans(), count=st.integers(0, 12), kept_waiting=st.booleans())
    def is_stopped(self, line: int, back: bool, count: int, kept_waiting: bool) -> None:
        """The sweeper lets go of what a stopped job does not keep; meanwhile, or then, it is to run again."""
        at = pick(self.lines, line)
        self.api.post(f"/job/{at.held.id}/stop").ok()
        self.time_passes(LATE_AFTER_S)
        sweeping = stalled_sweep(self.api)
        self.calls.append(sweeping)
        sweeping.step(count)
        self._ended(sweeping)
        if kept_waiting:
            self.time_passes(DEAD_AFTER_S)
        self._goes_on(at, back=back)

    def _goes_on(self, at: Line, *, back: bool) -> None:
        """The next worker has the job, perhaps from an older checkpoint, once it has ended."""
        job = self.api.job(at.held.id)
        if job["status"] in ("canceled", "complete"):
            sound = [record.step for record in self.records(at.held.id) if not record.damaged]
            choice = {"from_step": sound[-1]} if back and sound else {}
            answer = self.api.post(f"/job/{at.held.id}/retry", choice)
            if answer.status == 404:
                self.api.post(f"/job/{at.held.id}/retry").ok()
        elif job["status"] == "running":
            self.api.post(f"/job/{at.held.id}/stop").ok()
            self.api.post(f"/job/{at.held.id}/retry").ok()
        at.held = self.api.claim(queue=at.name)
        at.step = self.api.job(at.held.id)["checkpoint_step"] or 0

    # Progress and death of stalled calls

    @precondition(lambda self: self.calls)
    @rule(call=which, count=steps)
    def goes_on(self, call: int, count: int) -> None:
        chosen = pick(self.calls, call)
        chosen.step(count)
        self._ended(chosen)

    @precondition(lambda self: self.calls)
    @rule(call=which)
    def ends(self, call: int) -> None:
        chosen = pick(self.calls, call)
        chosen.finish()
        self._ended(chosen)

    @precondition(lambda self: self.calls)
    @rule(call=which)
    def is_killed(self, call: int) -> None:
        chosen = pick(self.calls, call)
        chosen.kill()
        self._ended(chosen)

    @rule(seconds=st.sampled_from([1, 5, FUNCTION_TIMEOUT_S, DEAD_AFTER_S, SWEEPER_TIMEOUT_S, 900, 4000]))
    def time_passes(self, seconds: int) -> None:
        """No function outlives its time; and the lease is proved again where it must be."""
        self.api.clock.advance(seconds)
        for call in list(self.calls):
            if self.api.clock.now() - call.started_at >= call.lives_s:
                call.kill()
                self._ended(call)
        for at in self.lines:
            at.held.heartbeat().ok()

    @rule(line=which, choice=which)
    def is_read(self, line: int, choice: int) -> None:
        """Give URLs of a checkpoint to a reader: the packs stay until the URLs expire."""
        at = pick(self.lines, line)
        records = self.records(at.held.id)
        if records:
            record = pick(records, choice)
            answer = self.api.post(f"/job/{at.held.id}/checkpoints/{record.step}/urls", key="submit")
            answer.ok()
            self.read[at.held.id, record.manifest_key] = self.api.clock.now() + 3600

    def offer(self, at: Line, chosen: list[int]) -> Offer:
        """A checkpoint of these packs, and of none else."""
        files = {f"{number}.bin": list(PACKS.values())[number] for number in chosen}
        offer = Offer(at.held, at.held.manifest(at.step, files))
        self.offers.append(offer)
        return offer

    def lost(self, offer: Offer) -> bool:
        """True if another worker has the job by now."""
        return all(offer.held is not at.held for at in self.lines)

    def begin(self, send: Callable[[Api], Answer], offer: Offer | None = None) -> StalledCall:
        call = StalledCall(self.api, send, offer)
        self.calls.append(call)
        return call

    def do(self, send: Callable[[Api], Answer], *, stalled: bool, at_least: int = 0) -> None:
        if not stalled:
            self.heard(send(self.api))
            return
        call = self.begin(send)
        call.step(at_least)
        self._ended(call)

    def _ended(self, call: StalledCall) -> None:
        if call.offer is not None and self.lost(call.offer):
            self.loose |= {pack["blake3"] for pack in call.offer.manifest["packs"]}
        if call.done:
            self.calls.remove(call)
            if call.answer is not None:
                self.heard(call.answer)

    def heard(self, answer: Answer) -> None:
        """Check an answer: success, or a refusal that an overtaken worker may receive."""
        assert answer.status == 200 or answer.error["code"] in ALLOWED, answer.text

    # Invariants

    @invariant()
    def what_a_checkpoint_names_is_stored(self) -> None:
        stored = self.api.objects()
        now = self.api.clock.now()
        for at in self.lines:
            for record in self.records(at.held.id):
                data = stored.get(record.manifest_key)
                assert data is not None and blake3(data).hexdigest() == record.manifest_blake3, record
                if record.damaged:
                    continue
                for pack in parse_manifest(data).packs:
                    found = stored.get(f"packs/{pack.blake3}")
                    assert found is not None, f"{at.name}: step {record.step} has lost {PACKS[pack.blake3]!r}"
                    assert found == PACKS[pack.blake3] or pack.blake3 in self.rotten
        for (_, key), until in self.read.items():
            if now < until:
                for pack in parse_manifest(stored[key]).packs:
                    assert f"packs/{pack.blake3}" in stored, "somebody is reading it"

    def records(self, job_id: str) -> list[CheckpointRecord]:
        return all_pages(
            lambda cursor: self.api.context.jobs.history(CheckpointRecord, job_id, limit=100, cursor=cursor)
        )

    def named(self, record: CheckpointRecord) -> set[str]:
        data = self.api.context.objects.read(TENANT, CHECKPOINTS_BUCKET, record.manifest_key)
        assert data is not None
        return {pack["blake3"] for pack in json.loads(data)["packs"]}

    def teardown(self) -> None:
        """Check that both jobs can commit and end, and that exactly the packs of kept checkpoints are left."""
        for call in list(self.calls):
            call.kill()
        if not self.lines:
            return
        self.calls.clear()
        self.time_passes(4000)
        for at in self.lines:
            for ahead in (1, 2):
                step = (self.api.job(at.held.id)["checkpoint_step"] or 0) + ahead
                at.held.commit(step, {"a": b"pack 0", "b": b"pack 1"}).ok()
                assert self.api.checkpoints(at.held.id)[step]["current"]
        for at in self.lines:
            if at.stopped_at_last:
                self.api.post(f"/job/{at.held.id}/stop").ok()
            else:
                at.held.complete().ok()
        self.api.clock.advance(LATE_AFTER_S)
        assert self.api.retain() == sum(at.stopped_at_last for at in self.lines)
        assert self.api.retain() == 0
        self.what_a_checkpoint_names_is_stored()
        kept: dict[str, set[str]] = {}
        for at in self.lines:
            for record in self.records(at.held.id):
                for digest in self.named(record):
                    kept.setdefault(digest, set()).add(at.held.id)
        stored = {key.removeprefix("packs/") for key in self.api.objects(prefix="packs/")}
        assert stored - self.loose <= set(kept) <= stored, "a pack that nobody names is left"
        items = self.api.context.packs.get_many(TENANT, [digest for digest in PACKS if digest not in self.loose])
        holders = {digest: set(item.jobs) for digest, item in items.items() if item.jobs}
        assert holders == {digest: jobs for digest, jobs in kept.items() if digest not in self.loose}
        manifests = {key for key in self.api.objects() if "/manifests/" in key}
        assert manifests == {record.manifest_key for at in self.lines for record in self.records(at.held.id)}

"""The plot: a training draws its own pictures, and waits; another reads them from a ring, while what fills it dies."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from demo.failure import DemoError
from demo.processes import Child
from demo.ring import pictures
from demo.ring.crew import Crew, plan
from demo.ring.shapes import held_out, render
from demo.ring.summary import Look, Proof, Result, Trained, trained_of
from demo.ring.train import GENERATORS
from demo.screen import Phase, Screen
from demo.steps import Steps
from gpu_client.ring.errors import RingError
from gpu_client.ring.places import make_ring
from gpu_client.ring.reader import RingReader
from gpu_client.ring.ring import Ring
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.status import status_of, verified

SECONDS = 30.0
"""Each training lasts so long from its first batch on."""
SETTINGS = RingSettings(cap=512, min_size=64, publish_interval_s=0.1, lease_s=3.0)
HELD_OUT = 300
HELD_OUT_SEED = 2000
KILLS_AT_S = (4.0, 7.0, 10.0, 13.0)
"""One generator each, in turn; it is started anew a moment later."""
BACK_AFTER_S = 1.0
NOBODY_S = (16.0, 22.0)
"""All of them are dead."""
REPLAYED = 24
START_S = 60.0
"""Deadline for the first batch."""
POLL_S = 0.2


def tell(steps: Steps, screen: Screen, report: Path) -> Result:
    """All of it; picture and numbers go to `report`. Raises DemoError for what went or came out wrong."""
    try:
        return _told(steps, screen, report)
    except RingError as error:
        raise DemoError(f"the ring did not do its part: {error}") from error


def _told(steps: Steps, screen: Screen, report: Path) -> Result:
    scratch = steps.scratch
    measured_with = _draw_held_out(steps, screen)
    with screen.phase("coupled", "Train without the ring", SECONDS) as phase:
        child = steps.household.start_program(
            "training-without", "demo.ring.train", "coupled", scratch / "coupled", measured_with, SECONDS
        )
        coupled = _follow(phase, child, scratch / "coupled")
        phase.ends_with(f"waited {100 * coupled.wait_share:.1f} % of its time, {len(coupled.steps)} steps")
    place = str(scratch / "ring")
    ring = make_ring(place, SETTINGS)
    with screen.phase("ring", "Train from the ring", SECONDS) as phase:
        turns = plan(GENERATORS, KILLS_AT_S, BACK_AFTER_S, NOBODY_S)
        crew = Crew(steps.household, place, scratch / "begun", GENERATORS, turns)
        crew.start(*range(GENERATORS))
        child = steps.household.start_program(
            "training", "demo.ring.train", "ring", scratch / "trained", measured_with, SECONDS, place
        )
        looks: list[Look] = []

        def meanwhile(at_s: float) -> None:
            crew.carry_on(at_s)
            looks.append(_look(ring, crew.alive))

        fed = _follow(phase, child, scratch / "trained", meanwhile)
        phase.ends_with(f"waited {100 * fed.wait_share:.1f} % of its time, {len(fed.steps)} steps")
    with screen.phase("prove", "Look at every sample") as phase:
        proof = _proven(ring, crew)
        phase.ends_with(
            f"{proof.inserted} samples, {proof.lost} lost in {proof.kills} kills, {proof.replayed} replayed"
        )
    result = Result(coupled, fed, looks, crew.events, proof, SETTINGS.cap, dict(screen.durations_s))
    if wrong := result.wrong():
        raise DemoError(wrong, child.log)
    with screen.phase("draw", "Draw the picture") as phase:
        pictures.figure_of(result).savefig(report / "ring.png")
        phase.ends_with("ring.png")
    result = Result(coupled, fed, looks, crew.events, proof, SETTINGS.cap, dict(screen.durations_s))
    (report / "summary.json").write_text(json.dumps(result.as_dict(), indent=1) + "\n", encoding="utf-8")
    return result


def _draw_held_out(steps: Steps, screen: Screen) -> Path:
    """Pictures that no training sees: two processes draw them."""
    files = [steps.scratch / f"held-out-{half}.npz" for half in range(2)]
    with screen.phase("held_out", "Draw pictures to measure with") as phase:
        half = HELD_OUT // 2
        children = [
            steps.household.start_program(path.stem, "demo.ring.shapes", path, HELD_OUT_SEED, place * half, half)
            for place, path in enumerate(files)
        ]
        for child in children:
            if child.wait(START_S):
                raise DemoError("pictures to measure with could not be drawn", child.log)
        halves = [held_out(path) for path in files]
        whole = steps.scratch / "held-out.npz"
        np.savez(
            whole,
            images=np.concatenate([images for images, _ in halves]),
            labels=np.concatenate([labels for _, labels in halves]),
        )
        phase.ends_with(f"{HELD_OUT} pictures of {len(set(halves[0][1].tolist()))} shapes")
    return whole


def _follow(phase: Phase, child: Child, file: Path, meanwhile: Callable[[float], None] = lambda _: None) -> Trained:
    """To the end of a training. `meanwhile` is given the seconds since its first batch, 0 before it."""
    began = time.monotonic()
    while child.exit_code is None:
        found = trained_of(file) if file.exists() else Trained([], [])
        if not found.steps and time.monotonic() - began > START_S:
            raise DemoError(f"{child.name} had no batch within {START_S:.0f} s", child.log)
        if time.monotonic() - began > START_S + 2 * SECONDS:
            raise DemoError(f"{child.name} does not come to its end", child.log)
        at_s = time.monotonic() - found.began_at if found.steps else 0.0
        meanwhile(at_s)
        if found.steps:
            phase.at(min(at_s, SECONDS), f"step {len(found.steps)}, loss {found.steps[-1].loss:.2f}")
        time.sleep(POLL_S)
    if child.exit_code:
        raise DemoError(f"{child.name} failed with exit code {child.exit_code}", child.log)
    phase.at(SECONDS)
    return trained_of(file)


def _look(ring: Ring, generators: int) -> Look:
    found = status_of(ring)
    return Look(
        time.monotonic(), found.readable, found.inserted, found.read,
        found.newest_s or 0.0, found.oldest_s or 0.0, generators,
    )  # fmt: skip


def _proven(ring: Ring, crew: Crew) -> Proof:
    """All generators are told to end; then everything is looked at."""
    crew.dismiss()
    while ring.publish() is not None:
        pass
    found = dict(verified(ring))
    wrong = []
    with RingReader(ring) as reader:
        slots = reader.newest().slots
        chosen = slots[:: max(len(slots) // REPLAYED, 1)][:REPLAYED]
        for slot in chosen:
            image, label = reader.sample(slot)
            again, again_label = render(reader.provenance(slot)["seed"])
            if label != again_label or image.tobytes() != again.tobytes():
                wrong.append(slot.id)
    damaged = sum(bool(why) for why in found.values())
    return Proof(
        crew.samples_begun, ring.newest().inserted, crew.kills, len(found), damaged, len(chosen) - len(wrong), wrong
    )

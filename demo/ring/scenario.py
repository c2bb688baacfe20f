"""The scenario: one training waits for the pictures that it draws; another reads a ring whose generators are killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from baton import RingReader, RingSettings, make_ring
from demo.failure import DemoError
from demo.ring.generators import Generators, plan
from demo.ring.results import Proof, RingResults, RingState, Training, read_training
from demo.ring.shapes import held_out, render
from demo.ring.train import GENERATORS
from demo.runner import Stage
from demo.screen import Phase
from gpu_client.ring.core.repair import verify_objects
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.tools.status import read_status

SECONDS = 30.0
"""Duration of each training from its first batch on."""
SETTINGS = RingSettings(cap=512, min_size=64, publish_interval_s=0.1, lease_s=3.0)
HELD_OUT = 300
HELD_OUT_SEED = 2000
KILLS_AT_S = (4.0, 7.0, 10.0, 13.0)
"""Times at which the demo kills one generator."""
BACK_AFTER_S = 1.0
"""Time after which a killed generator is started again."""
ALL_DEAD_S = (16.0, 22.0)
"""All generators are dead from the first to the second time."""
REPLAYED = 24
START_S = 60.0
"""Deadline for the first batch."""
POLL_S = 0.2


def play(stage: Stage) -> RingResults:
    """Run the scenario. Raises DemoError for a step that failed, RingError for a failed access to the ring."""
    pictures = _draw_held_out(stage)
    with stage.screen.phase("coupled", "Train without the ring", SECONDS) as phase:
        coupled = _train(stage, phase, "coupled", pictures)
    place = str(stage.scratch / "ring")
    ring, states = make_ring(place, SETTINGS), list[RingState]()
    with stage.screen.phase("ring", "Train from the ring", SECONDS) as phase:
        turns = plan(GENERATORS, KILLS_AT_S, BACK_AFTER_S, ALL_DEAD_S)
        generators = Generators(stage.processes, place, stage.scratch / "begun", GENERATORS, turns)
        generators.start(*range(GENERATORS))

        def meanwhile(at_s: float) -> None:
            generators.carry_on(at_s)
            states.append(_state(ring, generators.alive))

        fed = _train(stage, phase, "ring", pictures, place, meanwhile=meanwhile)
    with stage.screen.phase("prove", "Check every sample") as phase:
        proof = _prove(ring, generators)
        phase.ends_with(
            f"{proof.inserted} samples, {proof.lost} lost in {proof.kills} kills, {proof.replayed} replayed"
        )
    return RingResults(coupled, fed, states, generators.events, proof, SETTINGS.cap)


def _draw_held_out(stage: Stage) -> Path:
    """Draw pictures that no training sees, in two processes; returns the file."""
    half, whole = HELD_OUT // 2, stage.scratch / "held-out.npz"
    with stage.screen.phase("held_out", "Draw pictures to measure with") as phase:
        files = [stage.scratch / f"held-out-{number}.npz" for number in range(2)]
        children = [
            stage.processes.start(path.stem, "-m", "demo.ring.shapes", path, HELD_OUT_SEED, number * half, half)
            for number, path in enumerate(files)
        ]
        for child in children:
            if child.wait(START_S):
                raise DemoError(f"{child.name} did not draw its pictures", child.log)
        images, labels = zip(*map(held_out, files), strict=True)
        np.savez(whole, images=np.concatenate(images), labels=np.concatenate(labels))
        phase.ends_with(f"{HELD_OUT} pictures of {len(set(labels[0].tolist()))} shapes")
    return whole


def _train(
    stage: Stage,
    phase: Phase,
    source: str,
    pictures: Path,
    *place: str,
    meanwhile: Callable[[float], None] = lambda _: None,
) -> Training:
    """Run a training to its end; call `meanwhile` with the seconds since its first batch, 0 before it."""
    file = stage.scratch / f"{source}.jsonl"
    child = stage.processes.start(
        f"training-{source}", "-m", "demo.ring.train", source, file, pictures, SECONDS, *place
    )
    began = time.monotonic()
    while child.exit_code is None:
        training = read_training(file) if file.exists() else Training([], [])
        waited_s = time.monotonic() - began
        if waited_s > (START_S + 2 * SECONDS if training.steps else START_S):
            raise DemoError(f"{child.name} has {len(training.steps)} steps after {waited_s:.0f} s", child.log)
        at_s = time.monotonic() - training.began_at if training.steps else 0.0
        meanwhile(at_s)
        if training.steps:
            phase.at(min(at_s, SECONDS), f"step {len(training.steps)}, loss {training.steps[-1].loss:.2f}")
        time.sleep(POLL_S)
    if child.exit_code:
        raise DemoError(f"{child.name} failed with exit code {child.exit_code}", child.log)
    training = read_training(file)
    phase.at(SECONDS)
    phase.ends_with(f"waited {100 * training.wait_share:.1f} % of its time, {len(training.steps)} steps")
    return training


def _state(ring: Ring, generators: int) -> RingState:
    status = read_status(ring)
    return RingState(
        time.monotonic(), status.readable, status.inserted, status.read,
        status.newest_s or 0.0, status.oldest_s or 0.0, generators,
    )  # fmt: skip


def _prove(ring: Ring, generators: Generators) -> Proof:
    """End the generators, verify every stored sample, and draw some again from their seeds."""
    generators.end()
    while ring.publish() is not None:
        pass
    problems, wrong = dict(verify_objects(ring)), []
    with RingReader(ring) as reader:
        slots = reader.newest().slots
        chosen = slots[:: max(len(slots) // REPLAYED, 1)][:REPLAYED]
        for slot in chosen:
            image, label = reader.sample(slot)
            again, again_label = render(reader.provenance(slot)["seed"])
            if label != again_label or image.tobytes() != again.tobytes():
                wrong.append(slot.id)
    return Proof(
        begun=generators.samples_begun,
        inserted=ring.newest().inserted,
        kills=generators.kills,
        objects=len(problems),
        damaged=sum(map(bool, problems.values())),
        replayed=len(chosen) - len(wrong),
        wrong=wrong,
    )

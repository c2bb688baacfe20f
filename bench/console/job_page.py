"""The page of a job with a long curve: first paint, bytes, frames while the pointer moves."""

from __future__ import annotations

import time
from typing import Any

from bench.harness.figures import Figure
from tests.e2e.console.chromium import launched
from tests.e2e.console.desk import Desk
from tests.e2e.console.scenes import Scene
from tests.e2e.console.trainings import store_long_curve
from tests.kits.stack.stack import Stack

POINTS, QUICK_POINTS = 1_000_000, 20_000
MAX_PAINT_S = 1.0
MAX_FRAME_MS = 1.05 * 1000 / 60
CLOUD = {
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""Credentials of the emulated cloud."""
PLOT = ".u-over"
# From the change of the address to the frame after the one that draws the plot.
_PAINT = """(address) => new Promise((done) => {
  const begun = performance.now();
  const look = () => document.querySelector(".u-over")
    ? requestAnimationFrame(() => requestAnimationFrame(() => done((performance.now() - begun) / 1000)))
    : requestAnimationFrame(look);
  location.hash = address;
  look();
})"""
_FRAMES = """async () => {
  const place = document.querySelector(".u-over");
  const box = place.getBoundingClientRect();
  const lengths = [];
  for (let frame = 0, last = performance.now(); frame < 120; frame += 1) {
    const x = box.x + ((frame * 7) % box.width);
    place.dispatchEvent(new MouseEvent("mousemove", { clientX: x, clientY: box.y + 50, bubbles: true }));
    await new Promise(requestAnimationFrame);
    lengths.push(performance.now() - last);
    last = performance.now();
  }
  return lengths.sort((a, b) => a - b)[lengths.length / 2];
}"""


def measure(rounds: int, points: int) -> list[Figure]:
    """Measure the page of a job that has reported `points` points."""
    with Stack() as stack, launched() as browser:
        scene = Scene(stack, "bench")
        job_id = scene.submit("long")
        held = scene.claim("m-1")
        store_long_curve(stack, job_id, points)
        held.report(points, 2 * points, 0.3)
        desk = Desk(browser, stack)
        page = desk.sign_in()
        first_s = _paint(page, job_id)
        begun = time.perf_counter()
        page.get_by_text("summarizes earlier points").wait_for(state="detached", timeout=300_000)
        summarized_s = first_s + time.perf_counter() - begun
        answers: list[int] = []
        page.on("response", lambda answer: answers.append(len(answer.body())) if _is_curve(answer) else None)
        paints_s, zooms_s = [], []
        for number in range(rounds):
            paints_s.append(_paint(page, job_id))
            zooms_s.append(_paint(page, f"{job_id}?from={number}000&to={number + 50}000"))
        _paint(page, job_id)
        frames_ms = [float(page.evaluate(_FRAMES)) for _ in range(rounds)]
        desk.close()
    named = f"a curve of {points:,} points"
    return [
        Figure(name=f"{named}: first paint", unit="s", rounds=paints_s, at_most=MAX_PAINT_S),
        Figure(name=f"{named}: first paint before any summary", unit="s", rounds=[first_s]),
        Figure(name=f"{named}: whole curve before any summary", unit="s", rounds=[summarized_s]),
        Figure(name=f"{named}: first paint of a range", unit="s", rounds=zooms_s, at_most=MAX_PAINT_S),
        Figure(name=f"{named}: answer before compression", unit="kB", rounds=[size / 1000 for size in answers]),
        Figure(name=f"{named}: a frame while the pointer moves", unit="ms", rounds=frames_ms, at_most=MAX_FRAME_MS),
    ]


def _is_curve(answer: Any) -> bool:
    return "/curves" in answer.url and answer.status == 200


def _paint(page: Any, place: str) -> float:
    """Go to the page of a job from the list of jobs; return the seconds until its plot is drawn."""
    page.evaluate("location.hash = '/jobs'")
    page.get_by_role("heading", name="Jobs").wait_for()
    page.locator(PLOT).wait_for(state="detached")
    return float(page.evaluate(_PAINT, f"/jobs/{place}"))

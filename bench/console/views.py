"""Each view of the console in a browser that has not seen the console before: requests, bytes, time, long tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from baton.contract.admin.webhooks import WebhookCreate
from bench.harness.figures import Figure
from tests.e2e.console.chromium import launched
from tests.e2e.console.desk import Desk
from tests.e2e.console.rentals import Rentals
from tests.e2e.console.ring_work import ring_work
from tests.e2e.console.scenes import Scene
from tests.e2e.console.trainings import Training
from tests.e2e.console.world_work import rich_world
from tests.kits.stack.stack import Stack

MAX_SHOWN_S = 1.0
SETTLE_MS = 1500
# Notes when the element is on the screen, from the begin of the navigation, and the tasks of more than 50 ms.
_WATCH = """(() => {
  window.longTasks_ms = 0;
  new PerformanceObserver((list) => list.getEntries().forEach((task) => (window.longTasks_ms += task.duration)))
    .observe({ type: "longtask", buffered: true });
  window.shown = new Promise((done) => {
    const look = () => document.querySelector('SELECTOR')
      ? requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() / 1000)))
      : requestAnimationFrame(look);
    look();
  });
})()"""


def measure(rounds: int, points: int) -> list[Figure]:
    """Measure the views of a control plane with ten jobs, one of them with up to 2,000 points."""
    found: dict[str, dict[str, list[float]]] = {}
    with Stack() as stack, launched() as browser, _views(stack, min(points, 2000)) as views:
        for number in range(rounds):
            for name, (place, selector) in views.items():
                values = _open(Desk(browser, stack), place, selector, again=number == 0)
                for unit, value in values.items():
                    found.setdefault(name, {}).setdefault(unit, []).append(value)
    return [figure for name, values in found.items() for figure in _figures(name, values)]


def _figures(name: str, values: Mapping[str, list[float]]) -> list[Figure]:
    again = {"requests_again": values["requests_again"][0]}
    return [
        Figure(name=f"{name}: data on the screen", unit="s", rounds=values["shown_s"], at_most=MAX_SHOWN_S),
        Figure(name=f"{name}: long tasks", unit="ms", rounds=values["long_ms"]),
        Figure(name=f"{name}: requests", unit="", rounds=values["requests"], counted=True),
        Figure(name=f"{name}: answers as transferred", unit="kB", rounds=values["kb"], counted=True),
        Figure(name=f"{name}: answers without news", unit="kB", rounds=values["kb_again"], details=again),
    ]


def _open(desk: Desk, place: str | None, selector: str, *, again: bool) -> dict[str, float]:
    """Open a place (None: the page of somebody who is not signed in) until nothing more is asked."""
    finished: list[Any] = []
    desk.context.on("requestfinished", lambda request: finished.append(request))  # noqa: PLW0108 - Playwright marks it
    desk.context.add_init_script(_WATCH.replace("SELECTOR", selector))
    page = desk.open() if place is None else desk.sign_in(place)
    shown_s = float(page.evaluate("window.shown"))
    page.wait_for_load_state("networkidle")
    values = {"shown_s": shown_s, "long_ms": float(page.evaluate("window.longTasks_ms"))}
    if again:
        # Rows of a table ask for their details once they have stayed on the screen.
        page.wait_for_timeout(SETTLE_MS)
        values |= {**_sizes(finished), **_ask_again(desk, page)}
    desk.close()
    return values


def _sizes(finished: list[Any]) -> dict[str, float]:
    answered = [request.sizes() for request in finished if request.url.startswith("http")]
    transferred = sum(one["responseBodySize"] + one["responseHeadersSize"] for one in answered)
    return {"requests": len(answered), "kb": transferred / 1000}


def _ask_again(desk: Desk, page: Any) -> dict[str, float]:
    """Let the view ask as after an interval. Playwright tells no size of an answer 304."""
    transferred: dict[str, float] = {}
    network = desk.context.new_cdp_session(page)
    network.send("Network.enable")
    network.on(
        "Network.responseReceived", lambda told: transferred.update({told["requestId"]: _length(told["response"])})
    )
    network.on("Network.loadingFinished", lambda told: transferred.update({told["requestId"]: _length(told)}))
    desk.come_back(page)
    page.wait_for_timeout(SETTLE_MS)
    return {"requests_again": len(transferred), "kb_again": sum(transferred.values()) / 1000}


def _length(told: Any) -> float:
    return float(told["encodedDataLength"])


@contextmanager
def _views(stack: Stack, points: int) -> Iterator[dict[str, tuple[str | None, str]]]:
    """Yield place and first element of each view by name."""
    scene = Scene(stack, "gpu")
    scene.all_states()
    job_id = scene.submit("unet-photographs")
    Training(scene.claim("vast-29471999")).train(1, points, 2 * points)
    stack.client.create_webhook(WebhookCreate(url="https://hooks.example.com/baton", every_job=False))
    world = rich_world(Scene(stack, "elastic"))
    with Rentals(stack) as rentals, ring_work(stack, "brains", cap=60) as ring:
        rentals.apply("nights")
        rentals.night("nights", Scene(stack, "nights").submit("unet-rented"))
        ring.put("epoch-1", 20)
        ring.read("train-0", 40)
        yield {
            "sign in": (None, ".signin-card"),
            "jobs": ("/jobs", ".table-row"),
            "job: curves": (f"/jobs/{job_id}", ".u-over"),
            "job: log": (f"/jobs/{job_id}?tab=log", "[role=log]"),
            "job: world": (f"/jobs/{world.job}?tab=world", _row("Nodes")),
            "submit": ("/submit?recipe=digits@1", '[aria-label="Parameters"] input'),
            "fleets": ("/fleets", _row("Fleets")),
            "fleet": ("/fleets/nights", _row("Machines")),
            "rings": ("/rings", _row("Rings")),
            "ring": ("/rings/brains", _row("Writers")),
            "keys": ("/keys", _row("API keys")),
            "webhooks": ("/webhooks", '[aria-label^="Delete https"]'),
        }


def _row(table: str) -> str:
    return f'table[aria-label="{table}"] tbody tr'

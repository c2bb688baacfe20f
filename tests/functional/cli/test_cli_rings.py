"""`baton ring` with the control plane: create, list, inspect and remove with the profile's key."""

from __future__ import annotations

import json

import numpy as np

from gpu_client.ring.core.ring import Ring
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.store.control_plane import ControlPlaneStore
from gpu_client.ring.store.uri import ControlPlaneAccess
from tests.functional.cli.people import Baton
from tests.kits.clouds.emulator import unique
from tests.kits.stack.stack import Stack


def test_a_ring_from_its_making_to_its_end(baton: Baton, stack: Stack) -> None:
    name = unique("ring")
    place = f"baton:{name}"
    settings = ("--set", "publish_interval_s=0.1", "--set", "publish_every_samples=3")
    baton("ring", "make", place, "--set", "cap=4", *settings).ok()
    assert name in [ring["name"] for ring in baton("ring", "list", "--json").ok().json["rings"]]
    ring = Ring.open(ControlPlaneStore(name, ControlPlaneAccess(stack.url, stack.keys["submit"])))
    with RingWriter(ring, "w") as writer:
        for number in range(3):
            writer.put({"x": np.full(10, float(number))})
    baton("ring", "publish", place).ok()
    assert baton("ring", "status", place, "--json").ok().json["readable"] == 3
    assert baton("ring", "verify", place, "--json").ok().json == {"objects": 3, "damaged": {}}
    assert place in baton("ring", "list").ok().out
    job = json.dumps({"command": ["true"], "queue": name})
    submitted = baton("submit", "-", "--ring", name, "--json", stdin=job).ok().json
    assert submitted["rings"] == [name]
    stack.client.stop(submitted["id"])
    removed = baton("ring", "remove", place, "--json").ok().json
    assert removed["ring"] == place and removed["removed"] >= 5
    baton("ring", "status", place).failed(1, "there is no ring here")
    baton("ring", "remove", place, "--yes").failed(1, "No ring")
    baton("ring", "make", "baton:No Name", "--set", "cap=4").failed(1, "not a name of a ring")


def test_removing_asks_before(baton: Baton) -> None:
    place = f"baton:{unique('ring')}"
    baton("ring", "make", place, "--set", "cap=4").ok()
    said = baton("ring", "remove", place, stdin="n\n")
    assert said.code != 0 and "was not removed" in said.err
    baton("ring", "remove", place, stdin="y\n").ok()

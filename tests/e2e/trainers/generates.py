"""Puts samples into the ring that the job names, one for each seed, until there are as many as it is to make.

Parameters: ring, samples, sample_s. It goes on behind what is there, whoever made that.
"""

import json
import os
import time
from pathlib import Path

import gate
import numpy as np

from gpu_client.ring.core.ring import open_ring
from gpu_client.ring.generating.writer import RingWriter

params = json.loads(Path(os.environ["BATON_PARAMS"]).read_text())
assert "BATON_API_KEY" not in os.environ
ring = open_ring(f"baton:{params['ring']}")
with RingWriter(ring, f"epoch-{os.environ['BATON_EPOCH']}") as writer:
    while True:
        newest = ring.newest()
        seed = newest.inserted + sum(claim.samples for claim in ring.claims() if not newest.settled(claim.object))
        if seed >= params["samples"]:
            break
        gate.wait(seed)
        writer.put({"x": np.full(100, float(seed))}, seed=seed)
        print(f"put {seed}")
        time.sleep(params["sample_s"])
(Path(os.environ["BATON_OUTPUT_DIR"]) / "model.bin").write_text("done")

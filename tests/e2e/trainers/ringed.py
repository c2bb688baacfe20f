"""A training that reads from a ring and can be resumed: `python ringed.py`.

The parameters are `steps`, `step_s`, `ring`, and `trace`, a file that is told which samples each step read. Its output
says how many steps there were. `workers`: of the loader.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import gate
import torch

from baton import Session
from gpu_client.ring.reading.loader import RingLoader

EVERY = 5


def main() -> None:
    with Session.start() as session:
        steps, step_s = int(session.params["steps"]), float(session.params["step_s"])
        loader = RingLoader(session.params["ring"], batch_size=2, workers=int(session.params.get("workers", 0)))
        mean = torch.nn.Linear(1, 1)
        state = {"mean": mean, "batches": loader}
        step = session.resume(**state)
        with Path(session.params["trace"]).open("a", encoding="utf-8") as trace:
            for batch in loader:
                step += 1
                assert (batch["x"].mean(dim=1) == batch["seed"]).all()
                trace.write(json.dumps({"epoch": session.epoch, "step": step, "ids": loader.ids}) + "\n")
                trace.flush()
                time.sleep(step_s)
                session.report(step, steps, loss=1 / step)
                if session.checkpoint_due(step, every=EVERY):
                    session.checkpoint(step, **state)
                if session.should_stop:
                    return
                gate.wait(step)
                if step >= steps:
                    break
        (session.output_dir / "end.json").write_text(json.dumps({"step": step}), encoding="utf-8")


if __name__ == "__main__":
    main()

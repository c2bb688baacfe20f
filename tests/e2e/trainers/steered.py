"""A training without a model that goes wrong at step 25 unless its rate is low; rules and commands steer it.

`python steered.py`: the parameters are `steps`, `step_s`, `trace` (a file that is told of each step). It saves every
ten steps. Its output says how it ended.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import gate

from baton import BatchSampler, Session
from gpu_client.controller.learning_rate import LearningRate

WRONG_FROM = 25


class Rate:
    """The part of an optimizer that a knob reads and sets."""

    def __init__(self) -> None:
        self.param_groups = [{"lr": 1.0}]

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.param_groups[0]["lr"] = state["lr"]


def main() -> None:
    with Session.start() as session:
        steps, step_s = int(session.params["steps"]), float(session.params["step_s"])
        rate, batches = Rate(), BatchSampler(1000, 1, shuffle=False)
        session.steering.offer(knobs={"lr": LearningRate(rate)}, evaluate=True)
        state = {"rate": rate, "batches": batches}
        done = session.resume(**state)
        step = done
        with Path(session.params["trace"]).open("a", encoding="utf-8") as trace:
            for step in range(done + 1, steps + 1):
                [batch] = next(batches)
                lr = rate.param_groups[0]["lr"]
                loss = 50.0 if step >= WRONG_FROM and lr > 0.9 else 1.0 / step
                trace.write(json.dumps({"epoch": session.epoch, "step": step, "lr": lr, "batch": batch}) + "\n")
                trace.flush()
                time.sleep(step_s)
                session.report(step, steps, loss=loss)
                if session.steering.evaluation_due:
                    session.steering.evaluated(step, loss=loss)
                if session.checkpoint_due(step, every=10):
                    session.checkpoint(step, **state)
                if session.should_stop:
                    if session.finishing:
                        break
                    return
                gate.wait(step)
        (session.output_dir / "end.json").write_text(json.dumps({"step": step}), encoding="utf-8")


if __name__ == "__main__":
    main()

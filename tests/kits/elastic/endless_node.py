"""Node of an elastic training without rounds of its own accord: it trains until it is asked to stop."""

from __future__ import annotations

import time

import torch

from baton import Session

TOKENS_OF_SEAT_1 = 10**6
"""Weight of a step at seat 1; steps of the other seats weigh 1, therefore a round tells the steps of seat 1."""
TRAINING, STEPS = "training", "steps"
"""Files that a node writes at its first step and at its end."""


def main() -> None:
    """Train in steps of 10 ms, and write the number of steps."""
    with Session.start() as session:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = session.elastic(model, optimizer, inner_steps=10**9)
        outer.start()
        steps = 0
        while not session.should_stop:
            time.sleep(0.01)
            steps += 1
            outer.step(tokens=TOKENS_OF_SEAT_1 if outer.node.startswith("1.") else 1)
            (session.output_dir / TRAINING).touch()
        outer.leave()
        (session.output_dir / STEPS).write_text(str(steps))


if __name__ == "__main__":
    main()

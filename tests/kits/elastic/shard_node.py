"""Train the shards of one data set as a node, and write a line for each batch and checkpoint."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from baton import Session


def main() -> None:
    """Train `shards` shards of `batches` batches, each for `batch_s`, and write the batches to a file in `folder`.

    The data that a checkpoint contains are a line of the file beside `folder`.
    """
    with Session.start(output_dir="shards") as session:
        params = session.params
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = session.elastic(model, optimizer, inner_steps=4)
        shards = session.shards(params["shards"], seed=1)
        session.resume(model=model, elastic=outer)
        outer.start()
        with (Path(params["folder"]) / outer.node).open("w", encoding="utf-8", buffering=1) as trace:
            for shard in shards:
                for batch in range(shard.offset, params["batches"]):
                    trace.write(f"{shard.position} {batch} {outer.round}\n")
                    time.sleep(params["batch_s"])
                    optimizer.zero_grad()
                    model(torch.ones(1, 4)).sum().backward()
                    optimizer.step()
                    shard.advance(batch + 1)
                    outer.step()
                    session.report(outer.round, 0)
                    if outer.checkpoint_due:
                        state = outer.state_dict()
                        with Path(f"{params['folder']}.{outer.node}").open("a", encoding="utf-8") as saved:
                            saved.write(json.dumps({"round": state["round"], **state["data"]}) + "\n")
                        session.checkpoint(outer.round, model=model, elastic=outer)
        outer.leave()


if __name__ == "__main__":
    main()

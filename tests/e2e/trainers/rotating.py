"""Trains nothing; saves and deletes checkpoints as scripts do that keep one: `accelerate` deletes the old one before it
writes the new one, `trainer` (of Hugging Face) behind it.

    rotating.py accelerate|trainer OUTPUT_DIR STEPS [--resume_from_checkpoint=DIR]
"""

import json
import shutil
import sys
import time
from pathlib import Path

import gate
import torch

EVERY_S = 0.5
order, output, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
begun = 0
last = None
if len(sys.argv) > 4:
    last = Path(sys.argv[4].partition("=")[2])
    begun = torch.load(last / "model.pt", weights_only=True)["step"]
    assert torch.load(last / "optimizer.pt", weights_only=True)["step"] == begun
print(f"begins behind step {begun}")
for step in range(begun + 1, steps + 1):
    time.sleep(EVERY_S)
    if last and order == "accelerate":
        shutil.rmtree(last)
    directory = output / f"checkpoint-{step}"
    directory.mkdir()
    for name in ("model.pt", "optimizer.pt"):
        torch.save({"step": step, "order": order, "values": torch.full((20_000,), float(step))}, directory / name)
    # Every file differs between the two orders: the packs of an ended job are being deleted, and a commit of the same
    # packs waits for the end of the deletion.
    state = {"global_step": step, "max_steps": steps, "order": order}
    (directory / "trainer_state.json").write_text(json.dumps(state))
    if last and order == "trainer":
        shutil.rmtree(last)
    last = directory
    gate.wait(step)
(output / "model.txt").write_text(f"of {steps} steps, {steps - begun} of them since the last start")

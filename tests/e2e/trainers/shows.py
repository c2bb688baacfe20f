"""A training that shows a picture every fifth step. Parameters: steps, go (it waits for this file behind each picture).

It resumes; pictures of an earlier attempt are written again from the checkpoint and not shown again.
"""

import time
from pathlib import Path

from baton import Session


class Pictures:
    """Pictures by file name: the state of the session."""

    def __init__(self) -> None:
        self.made: dict[str, str] = {}

    def state_dict(self) -> dict[str, str]:
        """Return the pictures made so far."""
        return dict(self.made)

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Take back the pictures of a checkpoint."""
        self.made = dict(state)


with Session.start() as session:
    total, pictures = int(session.params["steps"]), Pictures()
    folder = session.output_dir / "validation"
    folder.mkdir(exist_ok=True)
    done = session.resume(pictures=pictures)
    for name, text in pictures.made.items():
        (folder / name).write_text(text)
    for step in range(done + 1, total + 1):
        session.report(step, total, loss=1 / step)
        if step % 5:
            continue
        name = f"step-{step:06}-0.png"
        pictures.made[name] = f"picture of step {step}"
        (folder / name).write_text(pictures.made[name])
        session.artifact(folder / name)
        session.checkpoint(step, must=True, pictures=pictures)
        while not Path(f"{session.params['go']}-{step}").exists():
            time.sleep(0.05)

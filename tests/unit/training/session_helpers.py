"""What several tests of the session need."""

from __future__ import annotations

from pathlib import Path

from gpu_client.training import Session


class Counter:
    """The smallest state."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def give_back(arena: Path) -> None:
    """What the agent does when it has stored what lies in the arena."""
    (arena / "checkpoint" / "baton.json").unlink()


def names(session: Session) -> list[str]:
    return sorted(path.name for path in session.output_dir.iterdir())

"""The example that users copy, step by step through a gate."""

from typing import Any

import gate

from gpu_client.training import Session, digits


class Gated(Session):
    """Waits behind each step that is reported."""

    def report(self, step: int, *given: Any, **named: Any) -> None:
        super().report(step, *given, **named)
        gate.wait(step)


digits.Session = Gated
digits.main()

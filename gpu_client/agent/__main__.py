"""`python -m gpu_client.agent`: the worker. Settings: see gpu_client/agent/settings.py."""

from __future__ import annotations

import logging
import sys

from pydantic import ValidationError

from gpu_client.agent.loop import Agent
from gpu_client.agent.settings import AgentSettings
from gpu_client.agent.signals import StopRequest, stop_on_signals
from gpu_client.agent.workspace import Workspace, WorkspaceError
from gpu_client.transport.api import BatonClient
from gpu_client.transport.transfer import Transfer

EXIT_BAD_SETTINGS = 2
EXIT_WORKSPACE = 3


def main() -> int:
    """Run an agent until it is done or told to stop. Returns the exit code."""
    try:
        settings = AgentSettings()
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            name = "_".join(str(part) for part in problem["loc"]).upper()
            variable = name if name.startswith(("BATON_", "SALAD_")) else f"BATON_{name}"
            sys.stderr.write(f"{variable}: {problem['msg']}\n")
        return EXIT_BAD_SETTINGS
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    stop = StopRequest()
    try:
        workspace = Workspace.open(settings.workspace, settings.worker_id)
    except (WorkspaceError, OSError) as error:
        sys.stderr.write(f"BATON_WORKSPACE={settings.workspace}: {error}\n")
        return EXIT_WORKSPACE
    client = BatonClient(settings.api_url, settings.api_key.get_secret_value())
    transfer = Transfer(workers=settings.transfers)
    with workspace, stop_on_signals(stop):
        agent = Agent(settings, client=client, transfer=transfer, workspace=workspace, stop=stop)
        try:
            return agent.run()
        finally:
            transfer.close()
            client.close()


if __name__ == "__main__":
    sys.exit(main())

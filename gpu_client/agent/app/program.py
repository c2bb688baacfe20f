"""Run the worker from its settings to its exit code. `gpu_client/agent/app/settings.py` lists the settings."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial

from pydantic import ValidationError

from baton.contract.fleets.fleet import EnrollAnswer
from gpu_client.agent.app import salad_container
from gpu_client.agent.app.enrolment import enroll, settings_of_machine
from gpu_client.agent.app.machine_heartbeats import SEND_BUDGET_S, MachineHeartbeats
from gpu_client.agent.app.own_machine import give_back
from gpu_client.agent.app.preemption import monitor_preemption
from gpu_client.agent.app.preflight import measure_machine
from gpu_client.agent.app.settings import AgentSettings, bytes_per_s, describe_problems
from gpu_client.agent.app.shutdown import ShutdownRequest, stop_on_signals
from gpu_client.agent.app.worker_loop import WorkerLoop
from gpu_client.agent.health import VARIABLE, LivenessFile
from gpu_client.agent.workspace.ownership import owner_id
from gpu_client.agent.workspace.slots import Workspace, WorkspaceError
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import BatonError
from gpu_client.transport.transfer.manager import Transfer

EXIT_BAD_SETTINGS = 2
EXIT_WORKSPACE = 3
EXIT_HURRIED = 4

ENROL_BUDGET_S = 30.0
"""Seconds for one call that enrols, with its retries."""

HURRY_S = 5.0
"""Seconds from a second signal to the exit, even if a thread hangs. The guardian kills the trainer."""

logger = logging.getLogger("baton.agent")


def main() -> int:
    """Run the worker until its work is done or a signal stops it. Returns the exit code."""
    try:
        settings = AgentSettings()
    except ValidationError as error:
        sys.stderr.writelines(f"{problem}\n" for problem in describe_problems(error))
        return EXIT_BAD_SETTINGS
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    # At DEBUG urllib3 logs every URL, queries included, and a query holds a signature.
    logging.getLogger("urllib3").setLevel(logging.INFO)
    stop = ShutdownRequest(shutdown_grace_s=settings.shutdown_grace_s)
    if settings.api_key is not None:
        return _run(settings, stop)
    try:
        code = _run(settings, stop)
    finally:
        # The enrolment token was valid once, therefore the fleet's machine is of no further use.
        give_back()
    if salad_container.is_rented(settings):
        salad_container.wait_for_deletion(stop)
    return code


def _run(settings: AgentSettings, stop: ShutdownRequest) -> int:
    """Enrol a rented machine, then work. Returns the exit code."""
    secret = "BATON_API_KEY" if settings.api_key else "BATON_ENROLMENT_TOKEN"
    try:
        enrolled = _enroll(settings) if settings.api_key is None else None
        settings = settings_of_machine(settings, enrolled) if enrolled else settings
        transfer = Transfer(
            workers=settings.transfers,
            max_upload_bytes_per_s=bytes_per_s(settings.max_upload_mbit_s),
            max_download_bytes_per_s=bytes_per_s(settings.max_download_mbit_s),
        )
        client = BatonClient(settings.api_url, settings.key, transfer=transfer)
    except ValueError as error:
        sys.stderr.write(f"BATON_API_URL, {secret}: {error}\n")
        return EXIT_BAD_SETTINGS
    except BatonError as error:
        sys.stderr.write(f"{secret}: this machine cannot enrol at {settings.api_url}: {error}\n")
        return EXIT_BAD_SETTINGS
    except OSError as error:
        return _report_workspace_error(settings, error)
    return _work(settings, stop, client, transfer, enrolled)


def _enroll(settings: AgentSettings) -> EnrollAnswer:
    identify = salad_container.read_identity if salad_container.is_rented(settings) else lambda: None
    with BatonClient(settings.api_url, settings.key) as client:
        api = client.within(ENROL_BUDGET_S)
        return enroll(settings, api, measure=partial(measure_machine, settings, api.preflight), identify=identify)


def _work(
    settings: AgentSettings,
    stop: ShutdownRequest,
    client: BatonClient,
    transfer: Transfer,
    enrolled: EnrollAnswer | None,
) -> int:
    """Run the loop in the workspace, on a rented machine with the machine's heartbeats. Returns the exit code."""
    threading.Thread(target=_exit_at_once, args=(stop,), name="hurry", daemon=True).start()
    try:
        owner = owner_id(settings.api_url, settings.key)
        workspace = Workspace.open(settings.workspace, settings.worker_id, settings.arena_dir, owner=owner)
    except (WorkspaceError, OSError) as error:
        return _report_workspace_error(settings, error)
    try:
        liveness = LivenessFile(settings.health_file)
    except OSError as error:
        workspace.close()
        sys.stderr.write(f"{VARIABLE}={settings.health_file}: {error}\n")
        return EXIT_BAD_SETTINGS
    machine = (
        MachineHeartbeats(
            client.within(SEND_BUDGET_S).machine_heartbeat,
            stop,
            interval_s=enrolled.heartbeat_interval_s,
            give_back=give_back,
        )
        if enrolled
        else None
    )
    with liveness, workspace, stop_on_signals(stop), monitor_preemption(settings.spot_notices, stop):
        agent = WorkerLoop(
            settings,
            client=client,
            transfer=transfer,
            workspace=workspace,
            stop=stop,
            liveness=liveness,
            machine=machine,
            queues=enrolled.queues if enrolled else None,
        )
        try:
            with machine or nullcontext():
                return agent.run()
        except WorkspaceError as error:
            return _report_workspace_error(settings, error)
        finally:
            transfer.close()
            client.close()


def _report_workspace_error(settings: AgentSettings, error: Exception) -> int:
    cause = error.strerror if isinstance(error, OSError) else None
    text = f"{cause}. Name a directory that the agent may write." if cause else str(error)
    sys.stderr.write(f"BATON_WORKSPACE={settings.workspace}: {text}\n")
    return EXIT_WORKSPACE


def _exit_at_once(stop: ShutdownRequest) -> None:
    """Exit the process `HURRY_S` after a second signal: the backstop behind every wait that ignores the signal."""
    stop.wait_now()
    time.sleep(HURRY_S)
    logger.error("a thread hangs %.0f s after the second signal: exiting without it", HURRY_S)
    os._exit(EXIT_HURRIED)

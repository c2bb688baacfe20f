"""Enrol a rented machine: exchange the single-use token in its environment for the identity and key of its worker."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Protocol

from pydantic import SecretStr

from baton.contract.fleets.fleet import EnrollAnswer, EnrollRequest, MachineMeasurements
from gpu_client.agent.app.own_machine import find_instance
from gpu_client.agent.app.settings import AgentSettings
from gpu_client.agent.retry_pauses import backoff_s, may_pass
from gpu_client.transport.errors import ApiError, BatonError

logger = logging.getLogger("baton.agent")

ENROL_WITHIN_S = 900.0
"""Seconds after which a machine that reaches no control plane gives up; as long as the fleet waits for the worker."""


NONCE = "enrolment"
"""File in the workspace that keeps the secret of this container."""


class EnrollmentApi(Protocol):
    """Part of BatonClient that enrols."""

    def enroll(self, request: EnrollRequest) -> EnrollAnswer: ...


def enroll(
    settings: AgentSettings,
    api: EnrollmentApi,
    *,
    measure: Callable[[], MachineMeasurements],
    identify: Callable[[], str | None] = lambda: None,
    environ: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> EnrollAnswer:
    """Report this machine's hardware and measurements; return its identity.

    measure: measures the machine; called until it succeeds, because the store of the download can be late, too.
    identify: returns the provider's proof of the machine's identity, anew for each try, because proofs are short-lived.
    environ: variables by which the provider tells the container its id.
    Raises ApiError if the control plane refuses the machine, BatonError without a usable answer in ENROL_WITHIN_S,
    OSError if the workspace cannot keep the container's secret.
    """
    found = settings.work_query()
    request = EnrollRequest(
        gpu_model=found.gpu_model,
        gpus=found.gpus or 0,
        vram_gib=found.vram_gib or 0,
        disk_gib=found.disk_gib or 0,
        instance=find_instance(environ),
        nonce=_keep_nonce(settings),
    )
    until = clock() + ENROL_WITHIN_S
    for tries in count():
        pause_s = backoff_s(1.0, tries)
        try:
            if request.measured is None:
                request = request.model_copy(update={"measured": measure()})
            proof = identify()
            return api.enroll(request.model_copy(update={"identity": proof}) if proof else request)
        except BatonError as error:
            if (isinstance(error, ApiError) and not may_pass(error)) or clock() + pause_s > until:
                raise
            logger.info("this machine is not enrolled yet: %s", error)
        pause(pause_s)
    raise AssertionError("count() has no end")


def _keep_nonce(settings: AgentSettings) -> str:
    """Return this container's secret for its enrolment token, the same after a restart of the agent.

    The file names the token's digest, because a workspace can outlive the machine for which the secret was made.
    """
    place = settings.workspace / NONCE
    token = hashlib.sha256(settings.key.encode()).hexdigest()
    with suppress(OSError, ValueError):
        known, _, nonce = place.read_text(encoding="ascii").partition(" ")
        if known == token:
            return nonce
    nonce = secrets.token_hex(32)
    settings.workspace.mkdir(parents=True, exist_ok=True)
    temporary = place.with_suffix(".new")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(f"{token} {nonce}")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(place)
    return nonce


def settings_of_machine(settings: AgentSettings, machine: EnrollAnswer) -> AgentSettings:
    """Return the settings with the identity, the key, the price and the rented hardware of the enrolled machine.

    The worker declares the hardware as rented, because the fleet rents for jobs that need as much: with the little less
    VRAM and free disk that the worker finds, the worker could not claim the job for which its machine was rented.
    """
    rented = {name: getattr(machine, name) for name in ("gpu_model", "vram_gib", "disk_gib", "image")}
    return settings.model_copy(
        update={
            **{name: value for name, value in rented.items() if value is not None},
            "api_key": SecretStr(machine.api_key),
            "machine_id": machine.machine_id,
            "worker_id": machine.machine_id,
            "price_usd_per_hour": machine.usd_per_hour,
        }
    )

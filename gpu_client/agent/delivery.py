"""The outputs of a training that ended well: which files they are, and that they are stored before the job is done."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from baton.contract.jobs import FailureClass
from baton.contract.work import WorkItem
from gpu_client.agent.failures import Failure
from gpu_client.agent.ledger import plan_of
from gpu_client.agent.workspace import JobDirectories
from gpu_client.checkpoints.artifacts import collect_outputs
from gpu_client.transport.errors import DigestMismatch, NotStoredYet, TransferError

logger = logging.getLogger("baton.job")

COMPLETE_TRIES = 5
COMPLETE_RETRY_S = 2.0


def outputs_of(item: WorkItem, directories: JobDirectories, *, on_left_out: Callable[[str], object]) -> dict[str, Path]:
    """The declared outputs, and what is there of those that may be missing and of files for later jobs.

    Raises what `collect_outputs` raises.
    """
    plan = plan_of(item)
    optional = [*(one.path for one in plan.shared), *(check.path for check in plan.optional_outputs)]
    return collect_outputs(directories.output, item.outputs, optional, on_left_out=on_left_out)


def until_stored(item: WorkItem, deliver: Callable[[], None], pause: Callable[[float], object]) -> Failure | None:
    """Upload and report; what is refused or said not to be stored is uploaded again, a few times. None: it is done.

    deliver: does both; what it raises besides that is raised. pause: waits so many seconds, or less.
    """
    tries = 0
    while True:
        tries += 1
        try:
            deliver()
        except (NotStoredYet, DigestMismatch, TransferError) as error:
            logger.warning("job %s: %s", item.id, error)
            if tries >= COMPLETE_TRIES:
                reason = f"after {tries} uploads the outputs are still refused: {error}"
                return Failure(FailureClass.TRANSFER_FAILED, reason)
            pause(COMPLETE_RETRY_S)
            continue
        return None

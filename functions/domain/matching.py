"""Which ready job a worker is given."""

from __future__ import annotations

import re
from collections.abc import Sequence

from baton.contract.work import WorkQuery
from functions.domain.records import Job


def mismatch(job: Job, worker: WorkQuery, now: int) -> str | None:
    """Why this worker may not have this job; None if it may."""
    if worker.machine_id and job.avoid.get(worker.machine_id, 0) > now:
        return "this machine failed the job recently"
    needs = job.spec.requirements
    for name, needed, has in (
        ("VRAM (GiB)", needs.min_vram_gib, worker.vram_gib),
        ("disk (GiB)", needs.min_disk_gib, worker.disk_gib),
        ("GPUs", needs.min_gpus, worker.gpus),
    ):
        if needed and (has is None or has < needed):
            return f"needs {needed:.15g} {name}, the worker declares {'none' if has is None else f'{has:.15g}'}"
    if needs.gpu_models and not any(_named(wanted, worker.gpu_model or "") for wanted in needs.gpu_models):
        return f"needs one of {', '.join(needs.gpu_models)}, the worker declares {worker.gpu_model or 'no GPU model'}"
    if needs.image and not _same_image(needs.image, worker.image or ""):
        return f"needs the image {needs.image}, the worker declares {worker.image or 'none'}"
    if job.spec.plan is not None and job.spec.plan.needs_plan and not worker.runs_plans:
        return "needs a worker that runs the steps of a recipe"
    return None


def _same_image(wanted: str, image: str) -> bool:
    """True if it is that image; without a tag or digest, any of that name is."""
    if wanted == image:
        return True
    name = re.split(r"@|:(?!.*/)", image, maxsplit=1)[0]
    return name == wanted


def _named(wanted: str, model: str) -> bool:
    """True if the model's name contains the wanted one as whole words: an "A10" is not an "A100"."""
    return re.search(rf"(?<!\w){re.escape(wanted.strip())}(?!\w)", model, re.IGNORECASE) is not None


def equals(candidates: Sequence[Job]) -> list[Job]:
    """The leading candidates that rank alike (stale, priority): a worker tries a random one of these."""
    if not candidates:
        return []
    first = candidates[0]
    return [job for job in candidates if job.stale == first.stale and job.priority == first.priority]

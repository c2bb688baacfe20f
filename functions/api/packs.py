"""What of a checkpoint is stored already, and where the worker uploads the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.contract.checkpoints import BlobUpload
from baton.contract.manifest import Pack
from baton.contract.names import CHECKPOINTS_BUCKET
from functions.api.context import Call, Context
from functions.api.declared import upload_of
from functions.domain.checkpoints import pack_key
from functions.domain.packs import Sighting, needs_look
from functions.domain.records import Job


@dataclass(frozen=True)
class Look:
    """What a commit found."""

    missing: list[BlobUpload]
    stored: list[Sighting]
    """What the job must hold before it may rely on it."""
    held: list[Sighting]
    """What it holds already. It may rely on what a checkpoint of it names; the rest may be just about to be let go."""
    new_bytes: int
    """Of the packs that the job did not hold."""
    manifest_stored: bool


def look_at(context: Context, call: Call, job: Job, packs: Sequence[Pack], manifest_key: str) -> Look:
    """Read the packs' items, then ask the object store for what they do not tell, and for the manifest.

    In this order: a pack that is deleted after its item was read is told by the item (`packs.may_hold`).
    """
    records = context.packs.get_many(call.tenant, [pack.blake3 for pack in packs])
    unknown: list[Sighting] = []
    held: list[Sighting] = []
    for pack in packs:
        sighting = Sighting(pack, records.get(pack.blake3))
        (unknown if needs_look(job.id, sighting, call.now) else held).append(sighting)
    keys = [pack_key(sighting.pack.blake3) for sighting in unknown]
    found = context.objects.head_many(call.tenant, CHECKPOINTS_BUCKET, [*keys, manifest_key])
    missing: list[BlobUpload] = []
    stored: list[Sighting] = []
    for sighting, key in zip(unknown, keys, strict=True):
        pack = sighting.pack
        # What is stored otherwise than declared is replaced. `needs_look` has let pass nothing that was verified to be
        # otherwise: such bytes are damaged, or were uploaded by somebody who never committed them.
        signed = upload_of(context, call, key, found.get(key), size_bytes=pack.size_bytes, crc64nvme=pack.crc64nvme)
        if signed is None:
            stored.append(sighting)
        else:
            missing.append(BlobUpload(blake3=pack.blake3, url=signed.url, headers=dict(signed.headers)))
    new_bytes = sum(one.pack.size_bytes for one in stored if not one.held_by(job.id))
    return Look(missing, stored, held, new_bytes, manifest_key in found)

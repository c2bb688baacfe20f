"""Simulate the control plane's side of checkpoints and artifacts in memory, over an HTTP store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.contract.checkpoints.calls import BlobUpload, BlobUrls, CheckpointRef, CommitAnswer
from baton.contract.checkpoints.manifest import Manifest
from baton.contract.worker.calls import ArtifactsAnswer, DeclaredArtifact, PresignedPut, WorkItem
from gpu_client.transport.errors import ApiError, api_error_class
from gpu_client.transport.net.digests import digest_bytes
from tests.unit.transport.scripted_server import ScriptedServer, reply

JOB_ID = "146683a1-cb76-4702-9fef-fcccd32594f1"
TOKEN = "lease-token"
EXPIRED = reply(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")


def refusal(code: str, status: int = 409) -> ApiError:
    return api_error_class(code, status)(code=code, status=status, message=code)


class FakeCloud:
    """`raises` holds errors that the next calls of that name raise."""

    def __init__(self, store: ScriptedServer, *, max_missing: int = 1000) -> None:
        self.store = store
        self.max_missing = max_missing
        self.committed: list[Manifest] = []
        self.damaged: list[tuple[int, int, str]] = []
        self.calls: list[str] = []
        self.raises: dict[str, list[Exception]] = {}
        self.blind = False
        """True if the control plane sees none of the stored blobs."""
        self.withheld: set[str] = set()
        """Digests for which no URL is given."""
        self.zips: dict[int, str] = {}

    # Calls of the agent

    def commit(self, lease_token: str, manifest: Manifest) -> CommitAnswer:
        self._called("commit", lease_token)
        missing = [
            BlobUpload(
                blake3=pack.blake3,
                url=self.store.url + self.pack_path(pack.blake3),
                headers={"x-amz-checksum-crc64nvme": pack.crc64nvme, "If-None-Match": "*"},
            )
            for pack in manifest.packs
            if self.blind or self.pack_path(pack.blake3) not in self.store.objects
        ]
        if not missing and manifest not in self.committed:
            self.committed.append(manifest)
            self.store.objects[self.manifest_path(manifest)] = manifest.canonical_bytes()
        return CommitAnswer(
            committed=not missing,
            step=manifest.step,
            epoch=manifest.epoch,
            missing=missing[: self.max_missing],
            more_missing=len(missing) > self.max_missing,
        )

    def blob_urls(self, job_id: str, step: int, blake3: Sequence[str], *, lease_token: str | None = None) -> BlobUrls:
        self._called("blob_urls", lease_token)
        assert job_id == JOB_ID
        assert len(blake3) <= 1000
        urls = {digest: self.store.url + self.pack_path(digest) for digest in blake3 if digest not in self.withheld}
        ref = CheckpointRef(step=step, epoch=1, manifest_url=self.store.url, total_bytes=0)
        return BlobUrls(urls=urls, expires_at=1, checkpoint=ref)

    def report_damaged(self, job_id: str, step: int, lease_token: str, *, epoch: int, message: str) -> None:
        self._called("report_damaged", lease_token)
        self.damaged.append((step, epoch, message))

    def declare_artifacts(
        self, job_id: str, lease_token: str, artifacts: Sequence[DeclaredArtifact]
    ) -> ArtifactsAnswer:
        self._called("declare_artifacts", lease_token)
        missing: list[PresignedPut] = []
        pending = []
        for artifact in artifacts:
            place = f"/artifacts/{artifact.path}"
            if place in self.store.objects:
                continue
            if artifact.parts is None:
                headers = {"x-amz-checksum-crc64nvme": artifact.crc64nvme, "If-None-Match": "*"}
                missing.append(PresignedPut(name=artifact.path, url=self.store.url + place, headers=headers))
                continue
            crcs = dict(enumerate(artifact.parts.crc64nvme, start=1))
            left = [number for number in crcs if f"{place}.{number}" not in self.store.objects]
            if not left:
                self.store.objects[place] = b"".join(self.store.objects.pop(f"{place}.{number}") for number in crcs)
                continue
            pending.append(artifact.path)
            missing += [
                PresignedPut(
                    name=artifact.path,
                    part=number,
                    url=f"{self.store.url}{place}.{number}",
                    headers={"x-amz-checksum-crc64nvme": crcs[number]},
                )
                for number in left
            ]
        return ArtifactsAnswer(missing=missing, pending=pending)

    # Reads and changes by tests

    @staticmethod
    def pack_path(digest: str) -> str:
        return f"/packs/{digest}"

    @staticmethod
    def manifest_path(manifest: Manifest) -> str:
        return f"/manifests/{manifest.step}-{manifest.epoch}.json"

    def manifest(self, step: int) -> Manifest:
        return next(manifest for manifest in self.committed if manifest.step == step)

    def packs(self, step: int) -> list[str]:
        """Return the store's paths of a checkpoint's packs."""
        return [self.pack_path(pack.blake3) for pack in self.manifest(step).packs]

    def blob_of(self, step: int, path: str) -> str:
        """Return the store's path of the pack with a file's first chunk."""
        manifest = self.manifest(step)
        file = next(file for file in manifest.files if file.path == path)
        pack = manifest.chunks[file.chunks[0]].pack
        return self.pack_path(manifest.packs[pack].blake3)

    def item(self, *, epoch: int = 2, outputs: Sequence[str] = ()) -> WorkItem:
        """A claim that lists all checkpoints, newest first."""
        refs = [
            CheckpointRef(
                step=manifest.step,
                epoch=manifest.epoch,
                manifest_url=self.store.url + self.manifest_path(manifest),
                manifest_blake3=digest_bytes(manifest.canonical_bytes()).blake3,
                total_bytes=manifest.total_bytes,
            )
            for manifest in self.committed
        ] + [
            CheckpointRef(
                step=step,
                epoch=1,
                manifest_url=self.store.url + path,
                total_bytes=len(self.store.objects[path]),
                legacy_key=path.removeprefix("/"),
            )
            for step, path in self.zips.items()
        ]
        known: dict[str, Any] = {
            "id": JOB_ID, "epoch": epoch, "lease_token": TOKEN, "lease_duration_s": 90, "lease_expires_at": 99,
            "heartbeat_interval_s": 30, "server_time": 9, "command": ["true"], "parameters": {}, "environment": {},
            "inputs": [], "outputs": list(outputs), "data_bucket": "d", "checkpoint_bucket": "c",
            "checkpoint_prefix": "p/", "resume": sorted(refs, key=lambda ref: -ref.step),
        }  # fmt: skip
        return WorkItem(**known)

    def _called(self, name: str, lease_token: str | None) -> None:
        self.calls.append(name)
        assert lease_token == TOKEN
        if self.raises.get(name):
            raise self.raises[name].pop(0)

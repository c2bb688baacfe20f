"""Restore: the newest intact checkpoint, complete and verified, or an error with its reason."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from gpu_client.checkpoints.restore.checkpoint_restore import RestoreFailed, restore
from gpu_client.checkpoints.save.checkpoint_commit import commit_checkpoint
from gpu_client.transport.errors import (
    DiskFull,
    LeaseLost,
    TransferCanceled,
    TransferError,
    Unreachable,
)
from gpu_client.transport.transfer.manager import Transfer
from tests.kits.files.directories import write_files
from tests.unit.checkpoints.fake_cloud import EXPIRED, FakeCloud, refusal
from tests.unit.checkpoints.restore_kit import assert_restored, contents
from tests.unit.transport.scripted_server import Handler, reply, reset, truncated


def test_the_newest_is_restored(cloud_100_200: FakeCloud, transfer: Transfer, output: Path) -> None:
    cloud = cloud_100_200
    moved: list[int] = []
    restored = restore(cloud, transfer, cloud.item(), output, progress=moved.append)
    assert_restored(restored, output, 200)
    assert cloud.calls == ["blob_urls"]
    assert cloud.damaged == []
    # what two files have is fetched once
    assert cloud.store.paths("GET").count(cloud.blob_of(200, "frozen.bin")) == 1
    assert sum(moved) == 12_000 + 6000


def test_a_job_without_checkpoints_starts_from_nothing(cloud: FakeCloud, transfer: Transfer, output: Path) -> None:
    assert restore(cloud, transfer, cloud.item(), output) is None
    assert cloud.calls == []


@pytest.mark.parametrize("harm", ["missing", "altered", "short", "long", "manifest gone", "manifest altered"])
def test_damage_is_reported_and_the_one_before_it_restored(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path, harm: str
) -> None:
    """Regression (Dreambooth worker): an unpacking that failed was only logged, training began at 0."""
    cloud = cloud_100_200
    objects, blob = cloud.store.objects, cloud.blob_of(200, "model.bin")
    manifest = cloud.manifest_path(cloud.manifest(200))
    if harm == "missing":
        del objects[blob]
    elif harm == "altered":
        objects[blob] = b"x" + objects[blob][1:]
    elif harm == "short":
        objects[blob] = objects[blob][:-1]
    elif harm == "long":
        objects[blob] += b"x"
    elif harm == "manifest gone":
        del objects[manifest]
    else:
        objects[manifest] = objects[manifest].replace(b"model.bin", b"mobel.bin")
    restored = restore(cloud, transfer, cloud.item(), output)
    assert_restored(restored, output, 100)
    assert [(step, epoch) for step, epoch, _ in cloud.damaged] == [(200, 1)]
    assert cloud.damaged[0][2]


def test_a_pack_that_nobody_has_a_url_for_is_damage(cloud_100_200: FakeCloud, transfer: Transfer, output: Path) -> None:
    cloud = cloud_100_200
    cloud.withheld.add(cloud.blob_of(200, "model.bin").removeprefix("/packs/"))
    assert_restored(restore(cloud, transfer, cloud.item(), output), output, 100)
    assert [damage[0] for damage in cloud.damaged] == [200]


def test_a_checkpoint_whose_manifest_the_control_plane_cannot_read_is_damage(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path
) -> None:
    cloud = cloud_100_200
    cloud.raises["blob_urls"] = [refusal("checkpoint_not_found", 404)]
    assert_restored(restore(cloud, transfer, cloud.item(), output), output, 100)
    assert [damage[0] for damage in cloud.damaged] == [200]


def test_a_manifest_that_escapes_is_damage(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path, tmp_path: Path
) -> None:
    cloud = cloud_100_200
    path = cloud.manifest_path(cloud.manifest(200))
    cloud.store.objects[path] = cloud.store.objects[path].replace(b'"model.bin"', b'"../../evil"')
    item = cloud.item()
    item = item.model_copy(update={"resume": [ref.model_copy(update={"manifest_blake3": None}) for ref in item.resume]})
    assert_restored(restore(cloud, transfer, item, output), output, 100)
    assert "evil" not in str(list(tmp_path.rglob("*")))
    assert [damage[0] for damage in cloud.damaged] == [200]


def test_everything_damaged_and_reported_means_starting_anew_loudly(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cloud = cloud_100_200
    for step in (100, 200):
        del cloud.store.objects[cloud.blob_of(step, "model.bin")]
    assert restore(cloud, transfer, cloud.item(), output) is None
    assert [damage[0] for damage in cloud.damaged] == [200, 100]
    assert "starts from step 0" in caplog.text
    assert list(output.iterdir()) == []


def test_damage_that_cannot_be_reported_does_not_start_anew(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path
) -> None:
    cloud = cloud_100_200
    for step in (100, 200):
        del cloud.store.objects[cloud.blob_of(step, "model.bin")]
    cloud.raises["report_damaged"] = [refusal("checkpoint_not_found", 404)]
    with pytest.raises(RestoreFailed, match="step 200"):
        restore(cloud, transfer, cloud.item(), output)


@pytest.mark.parametrize("act", [reply(500), reply(503), reset, truncated(b"x" * 12_000, 10)])
def test_a_network_that_stays_away_is_not_damage(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path, act: object
) -> None:
    """Regression (Kelpie worker): failed downloads were swallowed, training restarted and deleted good checkpoints."""
    cloud = cloud_100_200
    cloud.store.routes["GET", cloud.blob_of(200, "model.bin")] = act  # type: ignore[assignment]
    with pytest.raises(Unreachable):
        restore(cloud, transfer, cloud.item(), output)
    assert cloud.damaged == []
    assert list(output.iterdir()) == []


def test_a_network_that_comes_back_is_waited_for(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path, delays: list[float]
) -> None:
    cloud = cloud_100_200
    blob = cloud.blob_of(200, "model.bin")
    manifest = cloud.manifest_path(cloud.manifest(200))
    cloud.store.script("GET", blob, reset, reply(503), truncated(contents(200)["model.bin"], 5000))
    cloud.store.script("GET", manifest, reply(500), reply(200, b'{"altered": "on the way"}'))
    assert_restored(restore(cloud, transfer, cloud.item(), output), output, 200)
    assert cloud.damaged == []
    assert cloud.store.paths("GET").count(blob) == 4
    assert delays


def test_bytes_altered_on_the_way_are_fetched_again(cloud_100_200: FakeCloud, transfer: Transfer, output: Path) -> None:
    cloud = cloud_100_200
    cloud.store.script("GET", cloud.blob_of(200, "model.bin"), reply(200, b"?" * 12_000))
    assert_restored(restore(cloud, transfer, cloud.item(), output), output, 200)
    assert cloud.damaged == []


def test_a_store_that_refuses_is_not_damage(cloud_100_200: FakeCloud, transfer: Transfer, output: Path) -> None:
    cloud = cloud_100_200
    cloud.store.routes["GET", cloud.blob_of(200, "model.bin")] = reply(403, b"<Code>SignatureDoesNotMatch</Code>")
    with pytest.raises(TransferError):
        restore(cloud, transfer, cloud.item(), output)
    assert cloud.damaged == []


@pytest.mark.parametrize("code", ["lease_lost", "job_canceled"])
@pytest.mark.parametrize("call", ["blob_urls", "report_damaged"])
def test_a_lost_lease_ends_it(cloud_100_200: FakeCloud, transfer: Transfer, output: Path, call: str, code: str) -> None:
    cloud = cloud_100_200
    if call == "report_damaged":
        del cloud.store.objects[cloud.blob_of(200, "model.bin")]
    cloud.raises[call] = [refusal(code)]
    with pytest.raises(LeaseLost):
        restore(cloud, transfer, cloud.item(), output)
    assert list(output.iterdir()) == []


def test_urls_that_ran_out_are_asked_for_again(cloud_100_200: FakeCloud, transfer: Transfer, output: Path) -> None:
    cloud = cloud_100_200
    cloud.store.script("GET", cloud.blob_of(200, "model.bin"), EXPIRED, EXPIRED)
    assert_restored(restore(cloud, transfer, cloud.item(), output), output, 200)
    # what had arrived is not fetched twice
    assert cloud.store.paths("GET").count(cloud.blob_of(200, "frozen.bin")) == 1


def test_urls_that_always_run_out_are_not_damage_and_no_reason_to_go_back(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path
) -> None:
    cloud = cloud_100_200
    cloud.store.routes["GET", cloud.blob_of(200, "model.bin")] = EXPIRED
    with pytest.raises(RestoreFailed, match="run out"):
        restore(cloud, transfer, cloud.item(), output)
    assert cloud.damaged == []
    assert list(output.iterdir()) == []


def test_a_full_disk_is_noticed_before_the_download(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = cloud_100_200
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(DiskFull, match="needs 24000 bytes and leaves 67108864 as a reserve; 1 are free"):
        restore(cloud, transfer, cloud.item(), output)
    assert cloud.damaged == []
    assert cloud.calls == []


def test_canceling_leaves_nothing(cloud_100_200: FakeCloud, transfer: Transfer, output: Path) -> None:
    cloud = cloud_100_200
    cancel = threading.Event()

    def cancel_now(handler: Handler) -> None:
        cancel.set()
        handler.answer(503)

    cloud.store.script("GET", cloud.blob_of(200, "model.bin"), cancel_now)
    with pytest.raises(TransferCanceled):
        restore(cloud, transfer, cloud.item(), output, cancel=cancel)
    assert list(output.iterdir()) == []
    assert cloud.damaged == []


def test_what_lies_in_its_place_is_replaced(cloud_100_200: FakeCloud, transfer: Transfer, output: Path) -> None:
    cloud = cloud_100_200
    (output / "checkpoint-200").mkdir(parents=True)
    (output / "checkpoint-200" / "stale").touch()
    (output / ".restore-200-1").mkdir()
    (output / ".restore-200-1" / "leftover").touch()
    assert_restored(restore(cloud, transfer, cloud.item(), output), output, 200)


def test_many_packs_are_asked_for_in_pieces(
    cloud_100_200: FakeCloud, transfer: Transfer, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = cloud_100_200
    monkeypatch.setattr("gpu_client.checkpoints.restore.checkpoint_restore.MAX_MISSING_PER_ANSWER", 1)
    assert_restored(restore(cloud, transfer, cloud.item(), output), output, 200)
    assert cloud.calls == ["blob_urls", "blob_urls"]


def test_what_a_worker_commits_comes_back(cloud: FakeCloud, transfer: Transfer, output: Path, tmp_path: Path) -> None:
    """A restore returns the files that the product's own commit stored."""
    for step in (100, 200):
        place = write_files(tmp_path / "made" / str(step), contents(step))
        commit_checkpoint(cloud, transfer, cloud.item(epoch=1), place, step)
    assert_restored(restore(cloud, transfer, cloud.item(), output), output, 200)
    assert cloud.damaged == []

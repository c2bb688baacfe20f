"""Outputs: collected or reported as missing, uploaded or refused with an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.contract.objects.parts import MAX_PARTED_BYTES
from gpu_client.checkpoints.local.directory_files import BadDirectory
from gpu_client.checkpoints.save import artifacts
from gpu_client.checkpoints.save.artifacts import MissingOutput, collect_outputs, upload_artifacts
from gpu_client.transport.errors import FileChanged, LeaseLost, Unreachable, UrlExpired
from gpu_client.transport.net import digests
from gpu_client.transport.net.digests import digest_bytes
from gpu_client.transport.transfer.manager import Transfer
from tests.kits.files.declared_files import PART, large
from tests.kits.files.directories import write_files
from tests.unit.checkpoints.fake_cloud import EXPIRED, FakeCloud, refusal
from tests.unit.transport.scripted_server import reply


@pytest.fixture
def output(tmp_path: Path) -> Path:
    files = {"model.bin": b"model", "samples/0.png": b"0", "samples/more/1.png": b"1", "log": b""}
    return write_files(tmp_path / "output", files)


def test_files_and_directories(output: Path) -> None:
    files = collect_outputs(output, ["samples", "model.bin"])
    assert list(files) == ["model.bin", "samples/0.png", "samples/more/1.png"]
    assert files["samples/more/1.png"].read_bytes() == b"1"
    assert collect_outputs(output, []) == {}


def test_all_missing_ones_are_named(output: Path) -> None:
    (output / "empty").mkdir()
    (output / "dangling").symlink_to("nowhere")
    with pytest.raises(MissingOutput, match=r"adapter\.bin, empty, dangling") as caught:
        collect_outputs(output, ["model.bin", "adapter.bin", "empty", "dangling"])
    assert caught.value.paths == ("adapter.bin", "empty", "dangling")
    with pytest.raises(MissingOutput):
        collect_outputs(output / "absent", ["model.bin"])


@pytest.mark.parametrize("output_name", ["link", "dirlink/model.bin", "holder", "pipe"])
def test_what_leads_outside_or_is_no_file_is_refused(output: Path, tmp_path: Path, output_name: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "model.bin").write_bytes(b"secret")
    (output / "link").symlink_to(tmp_path / "outside" / "model.bin")
    (output / "dirlink").symlink_to(tmp_path / "outside")
    (output / "holder").mkdir()
    (output / "holder" / "inner").symlink_to(tmp_path / "outside" / "model.bin")
    os.mkfifo(output / "pipe")
    with pytest.raises(BadDirectory):
        collect_outputs(output, [output_name])


def test_links_within_the_output_are_followed(output: Path) -> None:
    (output / "best").mkdir()
    (output / "best" / "model.bin").symlink_to("../model.bin")
    (output / "final").symlink_to("model.bin")
    files = collect_outputs(output, ["best", "final"])
    assert [files[name].read_bytes() for name in ("best/model.bin", "final")] == [b"model", b"model"]


def test_too_many(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_client.checkpoints.save.artifacts.MAX_ARTIFACTS", 1)
    with pytest.raises(BadDirectory, match="2 files"):
        collect_outputs(output, ["samples"])


def test_uploaded_and_declared(cloud: FakeCloud, transfer: Transfer, output: Path) -> None:
    files = collect_outputs(output, ["model.bin", "log"])
    declared = upload_artifacts(cloud, transfer, cloud.item(), files)
    assert cloud.store.objects == {"/artifacts/model.bin": b"model", "/artifacts/log": b""}
    digest = digest_bytes(b"model")
    assert [(artifact.path, artifact.size_bytes) for artifact in declared] == [("log", 0), ("model.bin", 5)]
    assert (declared[1].crc64nvme, declared[1].blake3) == (digest.crc64nvme, digest.blake3)
    # again, after a lost `complete`: nothing is sent twice
    assert upload_artifacts(cloud, transfer, cloud.item(), files) == declared
    assert len(cloud.store.paths("PUT")) == 2


def test_a_large_one_goes_up_in_parts(
    cloud: FakeCloud, transfer: Transfer, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "PARTS_FROM_BYTES", PART)
    monkeypatch.setattr(digests, "part_bytes_of", lambda _: PART)
    (output / "model.bin").write_bytes(large(3))
    files = collect_outputs(output, ["model.bin", "log"])
    cloud.store.script("PUT", "/artifacts/model.bin.2", EXPIRED)
    declared = upload_artifacts(cloud, transfer, cloud.item(), files)
    assert cloud.store.objects == {"/artifacts/model.bin": large(3), "/artifacts/log": b""}
    assert cloud.calls == ["declare_artifacts"] * 3
    assert [artifact.parts for artifact in declared] == [None, None], "complete need not hear of parts"
    assert declared[1].crc64nvme == digest_bytes(large(3)).crc64nvme
    # again, after a lost `complete`: nothing is sent twice
    cloud.store.seen.clear()
    assert upload_artifacts(cloud, transfer, cloud.item(), files) == declared
    assert cloud.store.seen == []


def test_none_cost_no_call(cloud: FakeCloud, transfer: Transfer) -> None:
    assert upload_artifacts(cloud, transfer, cloud.item(), {}) == []
    assert cloud.calls == []


def test_a_failed_upload_is_never_declared_done(cloud: FakeCloud, transfer: Transfer, output: Path) -> None:
    """Regression (Dreambooth worker): the model failed to upload, and complete was sent anyway."""
    cloud.store.routes["PUT", "/artifacts/model.bin"] = reply(500)
    with pytest.raises(Unreachable):
        upload_artifacts(cloud, transfer, cloud.item(), collect_outputs(output, ["model.bin"]))
    assert cloud.store.objects == {}


def test_urls_that_ran_out(cloud: FakeCloud, transfer: Transfer, output: Path) -> None:
    files = collect_outputs(output, ["model.bin"])
    cloud.store.script("PUT", "/artifacts/model.bin", EXPIRED, EXPIRED)
    upload_artifacts(cloud, transfer, cloud.item(), files)
    assert cloud.calls == ["declare_artifacts"] * 3
    cloud.store.objects.clear()
    cloud.store.routes["PUT", "/artifacts/model.bin"] = EXPIRED
    with pytest.raises(UrlExpired):
        upload_artifacts(cloud, transfer, cloud.item(), files)


def test_a_lost_lease(cloud: FakeCloud, transfer: Transfer, output: Path) -> None:
    cloud.raises["declare_artifacts"] = [refusal("lease_lost")]
    with pytest.raises(LeaseLost):
        upload_artifacts(cloud, transfer, cloud.item(), collect_outputs(output, ["model.bin"]))
    assert cloud.store.seen == []


def test_a_file_that_vanishes(cloud: FakeCloud, transfer: Transfer, output: Path) -> None:
    files = collect_outputs(output, ["model.bin"])
    (output / "model.bin").unlink()
    with pytest.raises(FileChanged):
        upload_artifacts(cloud, transfer, cloud.item(), files)


def test_an_output_too_large_for_any_store_is_the_jobs_failure_and_is_not_hashed_first(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output too large for any store fails the job; as a node fault it went from machine to machine."""
    with (output / "huge").open("wb") as file:
        file.truncate(MAX_PARTED_BYTES + 1)  # sparse
    monkeypatch.setattr(artifacts, "hash_files", lambda *_, **__: pytest.fail("hashed"))
    with pytest.raises(BadDirectory, match="'huge' has 5497558138881 bytes; at most 5497558138880"):
        collect_outputs(output, ["huge"])


def test_an_output_whose_path_is_too_long_is_the_jobs_failure(output: Path) -> None:
    parts = ["x" * 200] * 4
    place = output.joinpath("deep", *parts)
    place.parent.mkdir(parents=True)
    place.write_text("x")
    with pytest.raises(BadDirectory, match="has 808 bytes; 1 to 800 are allowed"):
        collect_outputs(output, ["deep"])


def test_optional_outputs_may_be_missing_and_give_way_to_the_others(output: Path) -> None:
    left_out: list[str] = []
    optional = ["absent", "samples", "model.bin"]
    files = collect_outputs(output, ["model.bin"], optional, on_left_out=left_out.append)
    assert list(files) == ["model.bin", "samples/0.png", "samples/more/1.png"] and left_out == []
    for number in range(artifacts.MAX_ARTIFACTS - 2):
        (output / "samples" / f"{number}.jpg").write_bytes(b"")
    files = collect_outputs(output, ["model.bin"], ["samples", "log"], on_left_out=left_out.append)
    assert list(files) == ["log", "model.bin"], "one that has no room is left out as a whole, and the next one is not"
    assert left_out == ["samples is left out: the outputs are 501 files; at most 500 are allowed"]
    with pytest.raises(BadDirectory, match="501 files"):
        collect_outputs(output, ["model.bin", "samples"])


def test_an_optional_output_may_not_lead_outside(output: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (output / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(BadDirectory):
        collect_outputs(output, ["model.bin"], ["link"])

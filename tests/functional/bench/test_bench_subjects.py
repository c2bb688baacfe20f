"""Test that each measured program restores the files that it saved: Baton on the bench's control plane, the rivals."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.checkpoints.rivals import curl
from bench.checkpoints.rivals.kelpie_mirror import KelpieProcess, MirrorRival
from bench.checkpoints.subjects import Bench, store_client
from bench.sink.sink_process import running_sink
from tests.kits.network.certificates import throwaway_certificate

pytestmark = pytest.mark.processes

SIZE_BYTES = 21 * 2**20
"""Size of two parts of the rivals' uploads, and a bit."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("bench"), quick=True) as running:
        yield running


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    (directory / "sub").mkdir()
    (directory / "weights.bin").write_bytes(os.urandom(SIZE_BYTES))
    (directory / "sub" / "ü b.json").write_bytes(b"{}")
    (directory / "empty").write_bytes(b"")
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_ours(bench: Bench, source: Path, tmp_path: Path) -> None:
    worker = bench.ours()
    committed = worker.save(source, 1)
    assert committed.uploaded_packs == 1
    assert worker.plane.put_requests == 2, "the pack and the manifest"
    assert worker.save(source, 2).uploaded_bytes == 0
    assert worker.plane.put_requests == 3
    worker.fetch(tmp_path)
    assert content(tmp_path / "checkpoint-2") == content(source)
    bench.forget()
    assert not list((bench.scratch / "sink").iterdir())
    assert worker.save(source, 3).uploaded_packs == 1, "it is sent anew"
    worker.close()


def test_the_zip(bench: Bench, source: Path, tmp_path: Path) -> None:
    rival = bench.zip()
    assert rival.save(source, "one") > SIZE_BYTES
    rival.fetch("one", tmp_path)
    assert content(tmp_path) == content(source)


@pytest.mark.usefixtures("kelpie_packages")
def test_the_mirror(bench: Bench, source: Path, tmp_path: Path) -> None:
    rival = bench.mirror()
    saved = rival.save(source, "one")
    fetched = rival.fetch("one", tmp_path)
    assert content(tmp_path) == content(source)
    assert min(saved.wall_s, saved.cpu_s, fetched.wall_s, fetched.cpu_s) > 0


@pytest.mark.usefixtures("kelpie_packages")
def test_a_mirror_that_fails_says_why(bench: Bench, tmp_path: Path) -> None:
    with KelpieProcess(bench.url, tmp_path / "log") as process:
        with pytest.raises(RuntimeError, match="NoSuchBucket"):
            MirrorRival(process, "no-such-bucket").fetch("one", tmp_path)
        with pytest.raises(RuntimeError, match="ENOENT"):
            MirrorRival(process, bench.bucket()).save(tmp_path / "absent", "one")


@pytest.mark.skipif(curl.CURL is None, reason="there is no curl")
def test_curl_over_tls(source: Path, tmp_path: Path) -> None:
    certificate = throwaway_certificate(tmp_path / "both.pem")
    with running_sink(tmp_path / "sink", tls=certificate) as endpoint:
        client = store_client(endpoint, certificate)
        client.create_bucket(Bucket="bench")
        cost = curl.put(f"{endpoint}/bench", [source / "weights.bin", source / "empty"], certificate)
        assert min(cost.wall_s, cost.cpu_s) > 0
        found = client.get_object(Bucket="bench", Key="weights.bin")["Body"].read()
        assert found == (source / "weights.bin").read_bytes()
        with pytest.raises(RuntimeError, match="curl ended with 22"):
            curl.put(f"{endpoint}/absent", [source / "empty"], certificate)
        client.close()

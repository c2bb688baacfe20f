"""A base model on the hub: a refusal is the job's fault, an unreachable hub is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from dreambooth_runs import failure_of

from baton.contract.jobs.job import FailureClass
from gpu_client.training import dreambooth_lora

pytestmark = pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks` argument is deprecated:UserWarning")

MODEL = "nobody/nothing"


class Hub:
    """A hub that answers everything alike."""

    def __init__(self) -> None:
        self.status = 503
        self.code = ""
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.asked.append(self.path)
                self.send_response(hub.status)
                if hub.code:
                    self.send_header("X-Error-Code", hub.code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_HEAD  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        """Make the hub unreachable."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Instead of the real one; nothing is in the cache, and no time passes between two tries."""
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    for name in ("huggingface_hub.constants.HF_HUB_CACHE", "diffusers.utils.constants.HF_MODULES_CACHE"):
        monkeypatch.setattr(name, str(tmp_path / "cache"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    yield hub
    hub.close()


@pytest.fixture(autouse=True)
def nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dreambooth_lora, "compute_denoising_loss", lambda *_: pytest.fail("training has begun"))


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_hub_that_does_not_answer_is_no_fault_of_the_job(
    status: int,
    hub: Hub,
    parameters: dict[str, Any],
    data_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub.status = status
    changed = parameters | {"pretrained_model_name_or_path": MODEL}
    failure = failure_of(tmp_path / "out", data_dir, changed, capsys)
    assert failure.failure_class is FailureClass.TRANSFER_FAILED, failure
    assert failure.reason.startswith(f"the base model {MODEL} cannot be fetched: the hub cannot be reached")
    assert hub.asked


def test_a_hub_that_cannot_be_reached(
    hub: Hub, parameters: dict[str, Any], data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.close()
    changed = parameters | {"pretrained_model_name_or_path": "models/base"}
    failure = failure_of(tmp_path / "out", data_dir, changed, capsys)
    assert failure.failure_class is FailureClass.TRANSFER_FAILED
    # The user may have meant the name as a path.
    assert "models/base cannot be fetched: the hub cannot be reached" in failure.reason
    assert "there is no directory of that name, here or among the inputs" in failure.reason


def test_a_machine_that_must_not_ask_the_hub(
    parameters: dict[str, Any],
    data_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    changed = parameters | {"pretrained_model_name_or_path": MODEL}
    assert failure_of(tmp_path / "out", data_dir, changed, capsys).failure_class is FailureClass.TRANSFER_FAILED


def test_the_vae_too(
    hub: Hub, parameters: dict[str, Any], data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = parameters | {"pretrained_vae_model_name_or_path": MODEL}
    failure = failure_of(tmp_path / "out", data_dir, changed, capsys)
    assert failure.failure_class is FailureClass.TRANSFER_FAILED
    assert failure.reason.startswith(f"the VAE {MODEL} cannot be fetched: the hub cannot be reached")


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, "RepoNotFound"), (403, "GatedRepo"), (404, "RevisionNotFound"), (404, "EntryNotFound"), (403, "")],
    ids=["unknown", "gated", "revision", "no pipeline", "forbidden"],
)
def test_what_the_hub_says_is_the_jobs_business(
    status: int,
    code: str,
    hub: Hub,
    parameters: dict[str, Any],
    data_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub.status, hub.code = status, code
    changed = parameters | {"pretrained_model_name_or_path": MODEL}
    failure = failure_of(tmp_path / "out", data_dir, changed, capsys)
    assert failure.failure_class is FailureClass.BAD_INPUT, failure
    assert failure.reason.startswith(f"the base model {MODEL} cannot be loaded")

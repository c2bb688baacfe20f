"""An unanswered submission keeps its idempotency key; an answered submission does not."""

from __future__ import annotations

import os
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest

from gpu_client.cli.core.session import CliSession
from gpu_client.cli.jobs import submit as submit_module
from gpu_client.cli.jobs.submit import KEY_LIFETIME_S, idempotency_key
from gpu_client.cli.main import main
from gpu_client.transport.errors import ApiError, BatonError, UnexpectedAnswer, Unreachable
from tests.unit.cli.cli_kit import ID, a_job


def interrupted(directory: Path, *asked: str, by: BaseException) -> str:
    with pytest.raises(type(by)), idempotency_key(directory, *asked) as key:
        raise by
    return key


@pytest.mark.parametrize("by", [KeyboardInterrupt(), Unreachable("nobody")])
def test_after_an_interruption_the_same_job_has_the_same_key(tmp_path: Path, by: BaseException) -> None:
    first = interrupted(tmp_path, "job", by=by)
    with idempotency_key(tmp_path, "another job") as other:
        assert other != first
    with idempotency_key(tmp_path, "job") as again:
        assert again == first
    with idempotency_key(tmp_path, "job") as later:
        assert later != first
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_an_outcome(tmp_path: Path) -> None:
    first = interrupted(tmp_path, "job", by=ApiError(code="wrong_scope", status=403, message="no"))
    with idempotency_key(tmp_path, "job") as again:
        assert again != first


@pytest.mark.parametrize(
    ("by", "code"), [(KeyboardInterrupt(), 130), (UnexpectedAnswer("a proxy's page"), 0), (Unreachable("nobody"), 0)]
)
def test_a_submission_is_answered_before_the_prices_of_its_machines_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    by: KeyboardInterrupt | BatonError,
    code: int,
) -> None:
    keys: list[str] = []

    class Client:
        def submit(self, _job: object, *, idempotency_key: str) -> object:
            keys.append(idempotency_key)
            return a_job()

        def fleet(self, _name: str) -> object:
            raise by

    monkeypatch.setattr(submit_module, "connect", lambda _profile: nullcontext(Client()))
    places = {name: str(tmp_path / name) for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME")}
    environ = {**places, "BATON_API_URL": "https://baton.example", "BATON_API_KEY": "baton_id_secret"}
    options = ["--recipe", "digits@1", "--rent", "--budget", "2", "--provider", "vast"]
    for _ in range(2):
        assert main(["submit", *options], CliSession(environ=environ)) == code
        assert capsys.readouterr().out == f"{ID}\n"
    assert len(set(keys)) == 2 and list((tmp_path / "XDG_STATE_HOME").rglob("submissions/*")) == []


def test_two_at_once_are_two_jobs(tmp_path: Path) -> None:
    with idempotency_key(tmp_path, "job") as first, idempotency_key(tmp_path, "job") as second:
        assert first != second


def test_after_a_day_it_is_another_job(tmp_path: Path) -> None:
    first = interrupted(tmp_path, "job", by=KeyboardInterrupt())
    (record,) = tmp_path.iterdir()
    long_ago = record.stat().st_mtime - KEY_LIFETIME_S - 5
    os.utime(record, (long_ago, long_ago))
    with idempotency_key(tmp_path, "job") as again:
        assert again != first


def test_a_damaged_record_is_replaced(tmp_path: Path) -> None:
    interrupted(tmp_path, "job", by=KeyboardInterrupt())
    (record,) = tmp_path.iterdir()
    record.write_text("nonsense " * 50)
    second = interrupted(tmp_path, "job", by=KeyboardInterrupt())
    assert record.read_text() == second


def test_nothing_of_the_job_is_in_the_record(tmp_path: Path) -> None:
    key = interrupted(tmp_path / "new", "prompt", by=KeyboardInterrupt())
    (record,) = (tmp_path / "new").iterdir()
    assert record.read_text() == key
    assert "prompt" not in record.name
    assert stat.S_IMODE(record.stat().st_mode) == 0o600

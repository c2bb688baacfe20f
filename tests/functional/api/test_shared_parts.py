"""Parts of a shared file from interrupted attempts: later attempts at the job receive them."""

from __future__ import annotations

from typing import Any

import pytest
from test_sharing import JOB, MODEL, PATH, PLACE, claimed, done, inputs

from baton.contract.names import CHECKPOINTS_BUCKET, DATA_BUCKET
from functions.api.objects import shared_outputs
from tests.kits.api.harness import TENANT, Api, Held

PARTS = f"{PATH}.parts"
WORKER: dict[str, Any] = {"runs_plans": "true", "vram_gib": 24, "disk_gib": 100}


def lose(api: Api) -> None:
    """Lose the job's machine: the sweeper ends the expired lease."""
    for _ in range(2):
        api.clock.advance(4000)
        api.sweep()


def next_attempt(api: Api, held: Held) -> Held:
    new = api.claim(**WORKER, machine_id=f"m-{held.epoch + 1}")
    assert (new.id, new.epoch) == (held.id, held.epoch + 1)
    return new


def parts(held: Held) -> dict[str, bytes]:
    """Fetch the parts that a job receives from earlier attempts, by path below the folder of the parts."""
    found = [item for item in inputs(held) if item["path"].startswith(f".baton/shared/{PARTS}/")]
    assert all(item["shared"] for item in found)
    return {
        item["path"].removeprefix(f".baton/shared/{PARTS}/"): held.api.send("GET", item["url"]).text.encode("latin-1")
        for item in found
    }


def test_the_next_attempt_is_given_the_parts_that_a_lost_one_has_shown(api: Api) -> None:
    api.put_object(DATA_BUCKET, "timber/1.png", b"dog")
    first = claimed(api)
    first.store_artifacts({f"{PARTS}/00000.zip": b"first", f"{PARTS}/00010.zip": b"second", "validation/1.png": b"p"})
    assert parts(first) == {}, "its own are no news to it"
    lose(api)
    second = next_attempt(api, first)
    assert next(item["path"] for item in inputs(second)) == "instance/1.png"
    assert parts(second) == {"1/00000.zip": b"first", "1/00010.zip": b"second"}
    second.store_artifacts({f"{PARTS}/00020.zip": b"third"})
    second.release(reason="shutdown").ok()
    third = next_attempt(api, second)
    assert parts(third) == {"1/00000.zip": b"first", "1/00010.zip": b"second", "2/00020.zip": b"third"}
    third.complete({**MODEL, PATH: b"all"}).ok()
    assert parts(claimed(api)) == {}, "parts are nobody else's"


def test_they_come_besides_what_another_job_has_left(api: Api) -> None:
    first = claimed(api)
    first.store_artifacts({f"{PARTS}/00000.zip": b"first"})
    lose(api)
    second = next_attempt(api, first)
    done(api, b"of another job")
    places = [item["path"] for item in inputs(second)]
    assert places == [PLACE, f".baton/shared/{PARTS}/1/00000.zip"]


def test_with_a_checkpoint_nothing_is_listed(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    first = claimed(api)
    first.store_artifacts({f"{PARTS}/00000.zip": b"first"})
    first.commit(0).ok()
    lose(api)
    second = next_attempt(api, first)
    listed = count_lists(api, monkeypatch)
    assert parts(second) == {}
    assert listed == []


def test_nothing_is_listed_for_a_first_attempt_or_a_job_that_shares_nothing(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = count_lists(api, monkeypatch)
    inputs(claimed(api))
    other = claimed(api, with_prior_preservation=False)
    lose(api)
    again = [api.claim(**WORKER, machine_id=f"n-{number}") for number in range(2)]
    assert {held.epoch for held in again} == {2}
    inputs(next(held for held in again if held.id == other.id))
    assert listed == []
    inputs(next(held for held in again if held.id != other.id))
    assert len(listed) == 1


def test_there_is_a_limit(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_outputs, "MAX_PARTS", 2)
    first = claimed(api)
    first.store_artifacts({f"{PARTS}/0000{number}.zip": b"x" for number in range(4)})
    lose(api)
    assert sorted(parts(next_attempt(api, first))) == ["1/00000.zip", "1/00001.zip"]


def test_beyond_the_limit_the_newest_attempts_parts_are_given(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempt 10 comes before attempt 2 in the order of keys, and all of attempt 1 before both."""
    monkeypatch.setattr(shared_outputs, "MAX_PARTS", 3)
    monkeypatch.setattr(shared_outputs, "_KEYS_PER_PAGE", 3)
    held = claimed(api)
    for number in range(11):
        held.store_artifacts({f"{PARTS}/{number:03}{half}.zip": b"x" for half in "ab"})
        held.release(reason="shutdown").ok()
        held = next_attempt(api, held)
    listed = count_lists(api, monkeypatch)
    assert sorted(parts(held)) == ["10/009a.zip", "11/010a.zip", "11/010b.zip"]
    assert len(listed) == 8


def test_of_files_without_end_not_all_are_looked_at(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_outputs, "_KEYS_PER_PAGE", 2)
    monkeypatch.setattr(shared_outputs, "_MAX_PAGES", 2)
    first = claimed(api)
    first.store_artifacts({f"{PARTS}/0000{number}.zip": b"x" for number in range(5)})
    lose(api)
    assert sorted(parts(next_attempt(api, first))) == [f"1/0000{number}.zip" for number in range(4)]
    assert "too many outputs to search" in caplog.text


def test_names_that_only_look_like_parts_are_none(api: Api) -> None:
    first = claimed(api)
    first.store_artifacts({f"{PATH}.parts-of-mine/1.zip": b"x", f"other/{PARTS}/1.zip": b"x", PARTS: b"a file"})
    lose(api)
    assert [item for item in inputs(next_attempt(api, first)) if item["shared"]] == []


def test_another_tenant_is_given_nothing_of_them(api: Api) -> None:
    first = claimed(api)
    first.store_artifacts({f"{PARTS}/00000.zip": b"first"})
    api.post("/job", JOB, key="rival_submit").ok()
    query = {"machine_id": "m-1", **WORKER}
    (item,) = api.get("/work", headers={"x-lease-aware": "1"}, query=query, key="rival_worker").ok()
    api.post("/release", {"job_id": item["id"]}, headers={"x-lease-token": item["lease_token"]}, key="rival_worker")
    (item,) = api.get("/work", headers={"x-lease-aware": "1"}, query=query, key="rival_worker").ok()
    assert item["epoch"] == 2
    page = api.get(f"/job/{item['id']}/inputs", headers={"x-lease-token": item["lease_token"]}, key="rival_worker")
    assert page.ok()["inputs"] == []


def count_lists(api: Api, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prefixes of the bucket of checkpoints that are listed from now on."""
    store = api.context.objects
    real, prefixes = store.list, []

    def listing(tenant: str, bucket: str, prefix: str, **keywords: Any) -> Any:
        assert tenant == TENANT
        if bucket == CHECKPOINTS_BUCKET:
            prefixes.append(prefix)
        return real(tenant, bucket, prefix, **keywords)

    monkeypatch.setattr(store, "list", listing)
    return prefixes

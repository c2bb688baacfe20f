"""Shared outputs of complete jobs: published, delivered to later jobs, and failures."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from blake3 import blake3

from baton.contract.errors import ErrorCode
from baton.contract.names import CHECKPOINTS_BUCKET, DATA_BUCKET
from functions.domain.errors import StorageUnavailable
from tests.kits.api.harness import TENANT, Api, Held

PATH = "class_images.zip"
PLACE = f".baton/shared/{PATH}"
MODEL = {"pytorch_lora_weights.safetensors": b"weights"}
JOB: dict[str, Any] = {
    "recipe": "dreambooth-lora-sd@2",
    "parameters": {
        "instance_prompt": "a photo of a timberdog",
        "class_prompt": "a photo of a dog",
        "with_prior_preservation": True,
    },
    "inputs": [{"prefix": "timber/", "into": "instance"}],
}


def claimed(api: Api, **changed: Any) -> Held:
    """A job that shares class images; keywords change its parameters."""
    api.submit(**{**JOB, "parameters": {**JOB["parameters"], **changed}})
    return api.claim(runs_plans="true", vram_gib=24, disk_gib=100)


def done(api: Api, images: bytes = b"images", **changed: Any) -> Held:
    held = claimed(api, **changed)
    held.complete({**MODEL, PATH: images}).ok()
    return held


def inputs(held: Held, **query: Any) -> list[dict[str, Any]]:
    answer = held.api.get(f"/job/{held.id}/inputs", headers=held.headers, query=query, key="worker").ok()
    found: list[dict[str, Any]] = answer["inputs"]
    return found if answer["next_cursor"] is None else found + inputs(held, cursor=answer["next_cursor"])


def given(held: Held) -> list[bytes]:
    """Fetch the shared files that a job receives from other jobs."""
    shared = [item for item in inputs(held) if item["shared"]]
    return [held.api.send("GET", item["url"]).text.encode("latin-1") for item in shared]


def key_of(held: Held, path: str = PATH) -> str:
    return f"jobs/{held.id}/artifacts/{held.epoch}/{path}"


def test_a_later_job_is_given_what_a_complete_one_has_left(api: Api) -> None:
    api.put_object(DATA_BUCKET, "timber/1.png", b"dog")
    first = claimed(api)
    assert [item["path"] for item in inputs(first)] == ["instance/1.png"]
    first.complete({**MODEL, PATH: b"images"}).ok()
    second = claimed(api, instance_prompt="another dog", num_class_images=7)
    own, shared = inputs(second)
    assert (own["path"], own["shared"], own["blake3"]) == ("instance/1.png", False, None)
    assert (shared["path"], shared["shared"], shared["size_bytes"]) == (PLACE, True, 6)
    assert shared["key"] == key_of(first) and shared["blake3"] == blake3(b"images").hexdigest()
    assert given(second) == [b"images"]
    assert [artifact["path"] for artifact in api.job(first.id)["artifacts"]] == [*MODEL, PATH]


@pytest.mark.parametrize(
    "changed",
    [
        {"class_prompt": "a cat"},
        {"resolution": 768},
        {"seed": 1},
        {"variant": "fp16"},
        {"guidance_scale": 3.0},
        {"mixed_precision": "no"},
        {"pretrained_model_name_or_path": "other/model"},
        {"pretrained_vae_model_name_or_path": "other/vae"},
        {"with_prior_preservation": False},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_job_with_another_key_is_given_nothing(api: Api, changed: dict[str, Any]) -> None:
    done(api)
    assert given(claimed(api, **changed)) == []


def test_what_lies_below_many_inputs_comes_once_and_last(api: Api) -> None:
    done(api)
    for number in range(3):
        api.put_object(DATA_BUCKET, f"timber/{number}.png")
    api.submit(**{**JOB, "inputs": [*JOB["inputs"], {"prefix": "nothing/", "into": "class"}]})
    held = api.claim(runs_plans="true", vram_gib=24, disk_gib=100)
    assert [item["path"] for item in inputs(held)] == [*(f"instance/{number}.png" for number in range(3)), PLACE]


def test_another_tenant_never_sees_it(api: Api) -> None:
    done(api)
    api.post("/job", JOB, key="rival_submit").ok()
    query = {"machine_id": "m-1", "runs_plans": "true", "vram_gib": 24, "disk_gib": 100}
    (item,) = api.get("/work", headers={"x-lease-aware": "1"}, query=query, key="rival_worker").ok()
    headers = {"x-lease-token": item["lease_token"]}
    page = api.get(f"/job/{item['id']}/inputs", headers=headers, key="rival_worker").ok()
    assert page["inputs"] == [] and page["next_cursor"] is None
    assert given(claimed(api)) == [b"images"]


def test_what_ends_otherwise_offers_nothing(api: Api) -> None:
    for end in ("failed", "canceled", "released"):
        held = claimed(api, seed=7)
        held.store_artifacts({**MODEL, PATH: b"images"})
        if end == "failed":
            held.fail().ok()
        elif end == "released":
            held.release(reason="shutdown").ok()
        if end != "canceled":
            assert api.job(held.id)["state"] == "pending"
        api.post(f"/job/{held.id}/stop").ok()
        held.complete().refused(ErrorCode.JOB_CANCELED, None)
    assert api.memory is not None and api.memory.state.shared == {}


def test_an_attempt_that_lost_its_job_offers_nothing(api: Api) -> None:
    lost = claimed(api)
    declared = lost.store_artifacts({**MODEL, PATH: b"of the lost one"})
    api.clock.advance(4000)
    api.sweep()
    api.clock.advance(4000)
    api.sweep()
    new = api.claim(runs_plans="true", vram_gib=24, disk_gib=100, machine_id="m-2")
    assert new.id == lost.id and new.epoch == 2
    answer = lost.post("/complete", {"job_id": lost.id, "artifacts": declared})
    assert answer.error["code"] == ErrorCode.LEASE_LOST.value
    assert given(claimed(api)) == []
    new.complete({**MODEL, PATH: b"of the new one"}).ok()
    assert given(claimed(api)) == [b"of the new one"]


def test_of_jobs_that_ran_at_the_same_time_the_larger_file_stays(api: Api) -> None:
    jobs = [(claimed(api), images) for images in (b"two images", b"one", b"three more images", b"two others")]
    api.clock.advance(1)
    found = []
    for held, images in jobs:
        held.complete({**MODEL, PATH: images}).ok()
        found += given(claimed(api))
    assert found == [b"two images", b"two images", b"three more images", b"three more images"]


def test_what_a_later_job_could_not_use_is_replaced(api: Api) -> None:
    done(api, b"images of the model as it was")
    api.clock.advance(1)
    later = claimed(api)
    assert given(later) == [b"images of the model as it was"]
    later.complete({**MODEL, PATH: b"of the new model"}).ok()
    assert given(claimed(api)) == [b"of the new model"]
    api.clock.advance(1)
    claimed(api).complete(MODEL).ok()
    assert given(claimed(api)) == [b"of the new model"], "who needed no other leaves none"


def test_what_is_gone_is_not_given_and_the_next_one_takes_its_place(api: Api) -> None:
    first = done(api, b"many images")
    api.context.objects.delete(TENANT, CHECKPOINTS_BUCKET, key_of(first))
    assert given(claimed(api)) == []
    done(api, b"few")
    assert given(claimed(api)) == [b"few"]


def test_a_retry_of_the_job_takes_nothing_away(api: Api) -> None:
    first = done(api)
    api.post(f"/job/{first.id}/retry").ok()
    again = api.claim(runs_plans="true", vram_gib=24, disk_gib=100)
    assert again.id == first.id and given(again) == [b"images"]
    again.commit(100).ok()
    again.store_artifacts({**MODEL, PATH: b"other images"})
    again.complete({**MODEL, PATH: b"other images"}).ok()
    assert given(claimed(api)) == [b"other images"]
    assert api.objects()[key_of(first)] == b"images", "nobody deletes what somebody may be reading"


def test_a_repeated_complete_offers_it_once(api: Api) -> None:
    held = claimed(api)
    declared = held.store_artifacts({**MODEL, PATH: b"images"})
    body = {"job_id": held.id, "artifacts": declared}
    first = held.post("/complete", body).ok()
    with api.unchanged():
        assert held.post("/complete", body).ok() == first
    assert given(claimed(api)) == [b"images"]


def test_a_job_is_complete_though_it_cannot_be_offered(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*_: Any, **__: Any) -> Any:
        raise StorageUnavailable("throttled")

    held = claimed(api)
    declared = held.store_artifacts({**MODEL, PATH: b"images"})
    body = {"job_id": held.id, "artifacts": declared}
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(api.context.shared, "replace", away)
        assert held.post("/complete", body).ok()["state"] == "complete"
    assert "are not published" in caplog.text
    assert given(claimed(api)) == []
    assert held.post("/complete", body).ok()["state"] == "complete"
    assert given(claimed(api)) == [b"images"], "a repeated call makes it good"


def test_a_job_that_shares_nothing_asks_for_nothing(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("get_many", "replace"):
        monkeypatch.delattr(type(api.context.shared), name)
    for job in ({"command": ["train"]}, {"recipe": "digits@1", "inputs": [{"prefix": "digits/"}]}):
        api.submit(**job)
        held = api.claim(runs_plans="true")
        assert not any(item["shared"] for item in inputs(held))
        outputs = dict.fromkeys(held.item["outputs"], b"x")
        held.complete(outputs).ok()
    with pytest.raises(AttributeError):
        held = claimed(api)
        api.context.shared.get_many(TENANT, [])


def test_a_share_with_a_false_digest_is_replaced_by_the_next_job(api: Api) -> None:
    """A reader refuses it by its digest; the job that could not use it leaves a sound one."""
    false = blake3(b"other bytes").hexdigest()
    liar = claimed(api)
    declared = liar.store_artifacts({**MODEL, PATH: b"images, and more of them"})
    lie = [{**one, "blake3": false} if one["path"] == PATH else one for one in declared]
    liar.post("/complete", {"job_id": liar.id, "artifacts": lie}).ok()
    api.clock.advance(1)
    victim = claimed(api)
    (shared,) = inputs(victim)
    assert shared["blake3"] == false, "so that its reader finds out"
    victim.complete({**MODEL, PATH: b"its own"}).ok()
    (sound,) = inputs(claimed(api))
    assert (sound["key"], sound["blake3"]) == (key_of(victim), blake3(b"its own").hexdigest())


def test_a_false_digest_gives_no_job_anothers_file(api: Api) -> None:
    """Files are known by job and attempt: the digest of another job's file gives no access to the file."""
    owner = done(api, b"the owner's")
    liar = claimed(api, class_prompt="a cat")
    declared = liar.store_artifacts({**MODEL, PATH: b"the liar's!"})
    lie = [{**one, "blake3": blake3(b"the owner's").hexdigest()} if one["path"] == PATH else one for one in declared]
    liar.post("/complete", {"job_id": liar.id, "artifacts": lie}).ok()
    assert given(claimed(api)) == [b"the owner's"]
    (other,) = inputs(claimed(api, class_prompt="a cat"))
    assert other["key"] == key_of(liar) != key_of(owner)
    assert given(claimed(api, class_prompt="a cat")) == [b"the liar's!"], "which its digest gives away"

"""The original's payload: every field with default and bounds, refusals, and the answer for the original's clients."""

from __future__ import annotations

from typing import Any

import pytest

from functions.api.jobs.legacy_api import RECIPE
from tests.functional.api.calls import reasons_by_field
from tests.functional.api.original_client import JOB_BODY
from tests.kits.api.harness import Api

FLAT: dict[str, Any] = {"instance_prompt": "a timberdog", "instance_data_prefix": "timber/"}
DEFAULTS: dict[str, Any] = {
    "class_prompt": None,
    "class_data_prefix": None,
    "max_train_steps": 500,
    "num_train_epochs": 1,
    "train_batch_size": 1,
    "learning_rate": 2e-6,
    "use_8bit_adam": False,
    "mixed_precision": "fp16",
    "resolution": 1024,
    "gradient_accumulation_steps": 4,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "train_text_encoder": True,
    "text_encoder_lr": 5e-6,
    "gradient_checkpointing": False,
    "with_prior_preservation": False,
    "prior_loss_weight": 1.0,
    "num_class_images": 100,
    "sample_batch_size": 4,
    "validation_prompt": None,
    "validation_epochs": 50,
    "checkpointing_steps": 100,
    "center_crop": False,
    "random_flip": False,
}
"""Default of every field of the original's job except the two required ones."""
OTHERS: dict[str, Any] = {
    "class_prompt": "a dog",
    "class_data_prefix": "dogs/",
    "max_train_steps": 1400,
    "num_train_epochs": 3,
    "train_batch_size": 2,
    "learning_rate": 1e-6,
    "use_8bit_adam": True,
    "mixed_precision": "bf16",
    "resolution": 768,
    "gradient_accumulation_steps": 1,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 10,
    "train_text_encoder": False,
    "text_encoder_lr": 1e-5,
    "gradient_checkpointing": True,
    "with_prior_preservation": True,
    "prior_loss_weight": 0.5,
    "num_class_images": 50,
    "sample_batch_size": 8,
    "validation_prompt": "a timberdog in space",
    "validation_epochs": 10,
    "checkpointing_steps": 50,
    "center_crop": True,
    "random_flip": True,
}
PREFIXES = {"instance_data_prefix", "class_data_prefix"}
BEYOND: list[tuple[str, list[Any]]] = [
    ("instance_prompt", ["", "x" * 1025, 1, None]),
    ("instance_data_prefix", ["", "../up", "/etc", 1, None]),
    ("class_prompt", ["x" * 1025, 1]),
    ("class_data_prefix", ["../up", 1]),
    ("max_train_steps", [0, -5, 10**7 + 1, 1.5, "500", True, None]),
    ("num_train_epochs", [0, 10**6 + 1]),
    ("train_batch_size", [0, 4097]),
    ("learning_rate", [0, -1e-6, 10.1, "2e-6"]),
    ("use_8bit_adam", [1, "true"]),
    ("mixed_precision", ["fp8", False]),
    ("resolution", [56, 1020, 8200]),
    ("gradient_accumulation_steps", [0, 4097]),
    ("lr_scheduler", ["wild", ""]),
    ("lr_warmup_steps", [-1, 10**7 + 1]),
    ("train_text_encoder", [0]),
    ("text_encoder_lr", [0, 11]),
    ("gradient_checkpointing", ["no"]),
    ("with_prior_preservation", [1]),
    ("prior_loss_weight", [-0.1, 1001]),
    ("num_class_images", [-1, 100_001]),
    ("sample_batch_size", [0, 1025]),
    ("validation_prompt", ["x" * 1025]),
    ("validation_epochs", [0, 10**6 + 1]),
    ("checkpointing_steps", [0, 10**7 + 1]),
    ("center_crop", ["yes"]),
    ("random_flip", [2]),
]
ROW = {
    *("id", "status", "started_at", "created_at", "completed_at", "canceled_at", "failed_at", "last_heartbeat"),
    *("pretrained_model_name_or_path", "pretrained_vae_model_name_or_path", "training_script", "resume_from"),
    *("checkpoint_bucket", "checkpoint_prefix", "model_bucket", "model_key", "data_bucket", "num_failures"),
    *("instance_data_keys", "class_data_keys", *FLAT, *DEFAULTS),
}
"""Fields of a row of the original's `GET /work`."""
OF_LEASES = {"lease_token", "epoch", "lease_duration_s", "heartbeat_interval_s", "plan", "parameters", "command"}


def test_it_becomes_the_recipe_with_its_defaults(api: Api) -> None:
    view = api.post("/job", FLAT).ok()
    assert view["recipe"] == RECIPE == "dreambooth-lora-sdxl@1"
    assert view["command"] == ["python", "-m", "gpu_client.training.dreambooth_lora", "--config", "${BATON_PARAMS}"]
    assert view["inputs"] == [{"prefix": "timber/", "into": "instance"}]
    assert "pytorch_lora_weights.safetensors" in view["outputs"]
    assert DEFAULTS.items() <= view.items()
    set_ = {name: value for name, value in DEFAULTS.items() if value is not None and name != "num_train_epochs"}
    assert set_.items() <= view["parameters"].items()
    assert not {"num_train_epochs", "class_prompt", "validation_prompt", *PREFIXES} & view["parameters"].keys()
    assert view["pretrained_model_name_or_path"] == view["parameters"]["pretrained_model_name_or_path"]
    assert view["pretrained_vae_model_name_or_path"] == view["parameters"]["pretrained_vae_model_name_or_path"]


def test_every_field_reaches_the_trainer_and_is_read_back(api: Api) -> None:
    assert OTHERS.keys() == DEFAULTS.keys()
    assert not [name for name, value in OTHERS.items() if DEFAULTS[name] == value]
    view = api.post("/job", {**FLAT, **OTHERS}).ok()
    assert (FLAT | OTHERS).items() <= view.items()
    not_parameters = {*PREFIXES, "max_train_steps"}  # epochs replace steps
    sent = {name: value for name, value in OTHERS.items() if name not in not_parameters}
    assert sent.items() <= view["parameters"].items() and "max_train_steps" not in view["parameters"]
    assert [ref["prefix"] for ref in view["inputs"]] == ["timber/", "dogs/"]
    held = api.claim()
    assert held.item["parameters"] == view["parameters"]


@pytest.mark.parametrize(
    ("sent", "counts"),
    [
        ({}, {"max_train_steps": 500}),
        ({"max_train_steps": 7}, {"max_train_steps": 7}),
        ({"num_train_epochs": 1}, {"max_train_steps": 500}),
        ({"num_train_epochs": 1, "max_train_steps": 7}, {"max_train_steps": 7}),
        ({"num_train_epochs": 2}, {"num_train_epochs": 2}),
        ({"num_train_epochs": 3, "max_train_steps": 7}, {"num_train_epochs": 3}),
    ],
)
def test_more_than_one_epoch_replaces_the_steps(api: Api, sent: dict[str, Any], counts: dict[str, Any]) -> None:
    view = api.post("/job", {**FLAT, **sent}).ok()
    lengths = ("num_train_epochs", "max_train_steps")
    assert {name: view["parameters"][name] for name in lengths if name in view["parameters"]} == counts
    asked = {"num_train_epochs": 1, "max_train_steps": 500} | sent
    assert {name: view[name] for name in lengths} == asked, "read back as it was sent"


@pytest.mark.parametrize(("field", "values"), BEYOND, ids=[field for field, _ in BEYOND])
def test_what_is_out_of_bounds_or_of_another_type_is_refused(api: Api, field: str, values: list[Any]) -> None:
    for value in values:
        with api.unchanged():
            answer = api.post("/job", {**FLAT, field: value})
        assert answer.status in (400, 422), (value, answer.text)
        assert set(reasons_by_field(answer.error)) == {field} and answer.error["field"] == field, (value, answer.text)


def test_every_field_has_a_case_above() -> None:
    assert {field for field, _ in BEYOND} == {*FLAT, *DEFAULTS}


@pytest.mark.parametrize("prompt", [None, "", "  "])
def test_prior_preservation_without_a_class_is_accepted_and_left_to_the_originals_workers(
    api: Api, prompt: str | None
) -> None:
    """The API accepts a job without a class, as in the original's documentation, and passes the job on unchanged."""
    view = api.post("/job", {**JOB_BODY, "with_prior_preservation": True, "class_prompt": prompt}).ok()
    assert (view["with_prior_preservation"], view["class_prompt"]) == (True, prompt)
    # Baton's agent has no class that it could preserve.
    assert view["parameters"]["with_prior_preservation"] is False
    (work,) = api.get("/work", query={"machine_id": "m-1"}).ok()
    assert (work["with_prior_preservation"], work["class_prompt"], work["class_data_keys"]) == (True, prompt, [])


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"with_prior_preservation": True, "num_class_images": 0, "class_prompt": "a dog"}, {"num_class_images"}),
        ({"lr_warmup_steps": 501}, {"lr_warmup_steps"}),
        ({"lr_warmup_steps": 8, "max_train_steps": 7, "num_train_epochs": 1}, {"lr_warmup_steps"}),
        ({"lr_scheduler": "polynomial", "learning_rate": 1e-7}, {"learning_rate"}),
    ],
)
def test_fields_that_contradict_each_other_are_refused(api: Api, change: dict[str, Any], fields: set[str]) -> None:
    with api.unchanged():
        answer = api.post("/job", {**FLAT, **change})
        assert answer.status == 422, answer.text
    assert set(reasons_by_field(answer.error)) == fields and answer.error["field"] in fields


def test_a_warm_up_is_not_measured_by_steps_that_do_not_count(api: Api) -> None:
    api.post("/job", {**FLAT, "lr_warmup_steps": 8, "max_train_steps": 7, "num_train_epochs": 2}).ok()


def test_all_that_is_out_of_bounds_is_told_at_once_and_a_misspelled_field_too(api: Api) -> None:
    with api.unchanged():
        bad = {"max_train_steps": -5, "learning_rate": 0, "resolution": 1020, "stpes": 3}
        answer = api.post("/job", {**FLAT, **bad})
    assert answer.status == 422, answer.text
    assert set(reasons_by_field(answer.error)) == set(bad)


def test_no_prompt_may_be_said_as_an_empty_one(api: Api) -> None:
    empty = {"class_prompt": "", "validation_prompt": ""}
    view = api.post("/job", {**FLAT, **empty}).ok()
    assert empty.items() <= view.items() and not empty.keys() & view["parameters"].keys()
    assert view["class_data_prefix"] is None and len(view["inputs"]) == 1


def test_it_needs_no_declared_gpu(api: Api) -> None:
    job = api.post("/job", FLAT).ok()
    assert job["requirements"]["min_vram_gib"] is None
    (work,) = api.get("/work", query={"machine_id": "m-1"}).ok()
    assert work["id"] == job["id"] and "plan" not in work and work["instance_data_keys"] == []


def test_a_client_that_knows_no_leases_is_handed_the_flat_shape(api: Api) -> None:
    body = {**FLAT, **OTHERS}
    job = api.post("/job", body).ok()
    peeked = api.get("/work/peek", query={"machine_id": "m-1"}).ok()
    (work,) = api.get("/work", query={"machine_id": "m-1"}).ok()
    for row in (*peeked, work):
        assert row["id"] == job["id"] and row.keys() == ROW
        assert {name: row[name] for name in body} == body
        assert not OF_LEASES & row.keys()
    api.post(f"/job/{job['id']}/stop").ok()
    api.post("/job", FLAT).ok()
    aware = api.claim().item
    assert aware.keys() >= OF_LEASES

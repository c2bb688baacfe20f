"""Recipes: registered once, shown, and rendered into jobs."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from functions.recipes import built_in_document, built_in_ids
from tests.kits.api.harness import NOW, Api

DOCUMENT = """\
name: pair
version: 1
description: Two steps.
parameters:
  steps: {type: integer, default: 10, minimum: 1}
  warmup: {type: integer, default: 0}
  word: {type: string, required: true, max_length: 5}
  both: {type: boolean, default: true}
rules:
  - {require: parameters.warmup <= parameters.steps, fields: [warmup], message: is too long, remedy: Shorten it.}
requirements: {min_vram_gib: 8, min_disk_gib: 20}
inputs:
  - {into: pictures, description: Pictures.}
health: {no_progress_timeout_s: 600}
steps:
  - {name: first, run: [python, first.py, "{{ parameters.word }}"], when: parameters.both}
  - name: second
    run: [python, second.py, "--steps={{ parameters.steps }}", "{{ dirs.data }}/pictures"]
    environment: {WORD: "{{ parameters.word }}", MINE: recipe}
    timeout_s: 60
outputs:
  - {path: a.bin, min_bytes: 5}
  - {path: b.bin, when: parameters.both}
"""
JOB: dict[str, Any] = {
    "recipe": "pair@1",
    "parameters": {"word": "hello"},
    "inputs": [{"prefix": "p/", "into": "pictures"}],
}


@pytest.fixture
def pushed(api: Api) -> Api:
    api.post("/recipes", {"document": DOCUMENT}).ok()
    return api


def reasons(error: dict[str, Any]) -> dict[str, str]:
    assert all(problem["remedy"] for problem in error["problems"]), error
    return {problem["field"]: problem["reason"] for problem in error["problems"]}


def test_a_recipe_is_registered_and_shown_as_it_is(api: Api) -> None:
    view = api.post("/recipes", {"document": DOCUMENT}).ok()
    assert api.get("/recipes/pair@1").ok() == view
    recipe = view.pop("recipe")
    assert recipe["parameters"]["word"]["required"] and recipe["parameters"]["steps"]["default"] == 10
    assert recipe["inputs"] == [{"into": "pictures", "required": True, "description": "Pictures."}]
    assert view == {
        "id": "pair@1",
        "description": "Two steps.",
        "built_in": False,
        "created_at": NOW,
        "document": DOCUMENT,
    }
    assert api.get("/recipes/pair%401").ok() == {**view, "recipe": recipe}


def test_the_same_document_again_is_fine_another_one_is_refused(pushed: Api) -> None:
    with pushed.unchanged():
        pushed.clock.advance(60)
        assert pushed.post("/recipes", {"document": DOCUMENT}).ok()["created_at"] == NOW
        other = pushed.post("/recipes", {"document": DOCUMENT + "# a comment\n"})
        other.refused(ErrorCode.RECIPE_EXISTS, "document")
    pushed.post("/recipes", {"document": DOCUMENT.replace("version: 1", "version: 2")}).ok()
    assert pushed.get("/recipes/pair@1").ok()["document"] == DOCUMENT


def test_a_document_with_faults_is_refused_with_all_of_them(api: Api) -> None:
    bad = DOCUMENT.replace("{{ parameters.word }}", "{{ parameters.wort }}").replace("min_bytes: 5", "min_bites: 5")
    with api.unchanged():
        error = api.post("/recipes", {"document": bad}).refused(ErrorCode.INVALID_RECIPE, "document")
    assert "line 16, column" in error["message"] and "2 more" in error["message"]
    assert [(one["field"], one["line"]) for one in error["problems"]] == [
        ("steps.0.run.2", 16),
        ("steps.1.environment.WORD", 19),
        ("outputs.0.min_bites", 22),
    ]
    assert [bool(one["reason"] and one["remedy"] and one["column"]) for one in error["problems"]] == [True] * 3


@pytest.mark.parametrize("version", [1, 2])
def test_names_of_built_in_recipes_are_taken(api: Api, version: int) -> None:
    document = str(built_in_document("digits@1")).replace("version: 1", f"version: {version}")
    with api.unchanged():
        api.post("/recipes", {"document": document}).refused(ErrorCode.RECIPE_EXISTS, "document")


def test_recipes_are_listed_built_in_ones_first_then_own_by_name_and_version(pushed: Api) -> None:
    for version in (10, 9):
        pushed.post("/recipes", {"document": DOCUMENT.replace("version: 1", f"version: {version}")}).ok()
    pushed.post("/recipes", {"document": DOCUMENT.replace("name: pair", "name: alone")}).ok()
    page = pushed.get("/recipes").ok()
    assert [one["id"] for one in page["recipes"]] == [*built_in_ids(), "alone@1", "pair@1", "pair@9", "pair@10"]
    assert page["next_cursor"] is None and "document" not in page["recipes"][-1]
    found, cursor = [], None
    for _ in range(4):
        query = {"limit": 1, **({"cursor": cursor} if cursor else {})}
        page = pushed.get("/recipes", query=query).ok()
        found += [one["id"] for one in page["recipes"] if not one["built_in"]]
        cursor = page["next_cursor"]
    assert found == ["alone@1", "pair@1", "pair@9", "pair@10"] and cursor is None
    pushed.get("/recipes", query={"cursor": "x"}).refused(ErrorCode.INVALID_CURSOR, "cursor")


def test_tenants_do_not_see_each_others_recipes(pushed: Api) -> None:
    pushed.get("/recipes/pair@1", key="rival_submit").refused(ErrorCode.RECIPE_NOT_FOUND, "recipe")
    pushed.post("/job", JOB, key="rival_submit").refused(ErrorCode.UNKNOWN_RECIPE, "recipe")
    listed = pushed.get("/recipes", key="rival_submit").ok()["recipes"]
    assert all(one["built_in"] for one in listed)
    pushed.post("/recipes", {"document": DOCUMENT + "# mine\n"}, key="rival_submit").ok()
    assert pushed.get("/recipes/pair@1").ok()["document"] == DOCUMENT


@pytest.mark.parametrize("name", ["pair", "pair@0", "pair@01", "Pair@1", "pair@1000000", "a%20b@1", "pair@1@1"])
def test_what_is_no_recipes_name(pushed: Api, name: str) -> None:
    pushed.get(f"/recipes/{name}").refused(ErrorCode.RECIPE_NOT_FOUND, "recipe")


def test_the_steps_are_rendered_into_the_job_and_handed_out(pushed: Api) -> None:
    body = {**JOB, "environment": {"MINE": "job"}, "requirements": {"min_disk_gib": 30}}
    view = pushed.post("/job", body).ok()
    first, second = view["plan"]["steps"]
    assert first["command"] == ["python", "first.py", "hello"] == view["command"]
    assert second["command"] == ["python", "second.py", "--steps=10", "${BATON_DATA_DIR}/pictures"]
    assert (second["environment"], second["timeout_s"]) == ({"WORD": "hello", "MINE": "recipe"}, 60)
    assert view["environment"] == {"MINE": "job"}
    assert view["outputs"] == ["a.bin", "b.bin"]
    assert view["requirements"]["min_vram_gib"] == 8 and view["requirements"]["min_disk_gib"] == 30
    assert view["policy"]["no_progress_timeout_s"] == 600
    assert view["parameters"] == {"steps": 10, "warmup": 0, "word": "hello", "both": True}
    fit = {"vram_gib": 24, "disk_gib": 50}
    pushed.no_work(**fit)
    held = pushed.claim(runs_plans=True, **fit)
    assert held.item["plan"] == view["plan"] and held.item["no_progress_timeout_s"] == 600


def test_a_job_of_one_plain_step_goes_to_workers_that_know_no_plans(pushed: Api) -> None:
    single = {"word": "hello", "both": False}
    view = pushed.post("/job", {**JOB, "parameters": single, "requirements": {"min_vram_gib": 0}}).ok()
    assert [step["name"] for step in view["plan"]["steps"]] == ["second"]
    assert view["outputs"] == ["a.bin"]
    held = pushed.claim(disk_gib=20)
    assert held.item["command"][:2] == ["python", "second.py"]
    assert held.item["environment"] == {"WORD": "hello", "MINE": "recipe"}


def test_an_optional_output_that_the_job_names_is_one_that_it_must_have(api: Api) -> None:
    optional = "  - {path: grid.png, format: png, required: false}\n  - {path: notes.txt, required: false}\n"
    api.post("/recipes", {"document": DOCUMENT + optional}).ok()
    plan = api.post("/job", JOB).ok()["plan"]
    assert [check["path"] for check in plan["outputs"]] == ["a.bin", "b.bin"]
    assert [check["path"] for check in plan["optional_outputs"]] == ["grid.png", "notes.txt"]
    view = api.post("/job", {**JOB, "outputs": ["a.bin", "grid.png"]}).ok()
    assert view["outputs"] == ["a.bin", "grid.png"]
    assert [(check["path"], check["format"]) for check in view["plan"]["outputs"]] == [
        ("a.bin", None), ("grid.png", "png"),
    ]  # fmt: skip
    assert view["plan"]["optional_outputs"] == []


def test_outputs_that_the_job_names_are_checked_as_the_recipe_says(pushed: Api) -> None:
    view = pushed.post("/job", {**JOB, "outputs": ["a.bin", "more.txt"]}).ok()
    assert view["outputs"] == ["a.bin", "more.txt"]
    assert [check["path"] for check in view["plan"]["outputs"]] == ["a.bin"]


def test_a_job_keeps_the_plan_it_was_given(pushed: Api) -> None:
    job = pushed.post("/job", JOB).ok()
    pushed.post("/recipes", {"document": DOCUMENT.replace("version: 1", "version: 2").replace("first.py", "x.py")}).ok()
    assert pushed.job(job["id"])["plan"] == job["plan"]


def test_every_fault_of_a_submission_is_told_at_once(pushed: Api) -> None:
    body = {"recipe": "pair@1", "parameters": {"wrod": "x", "steps": 0, "warmup": "1"}}
    with pushed.unchanged():
        error = pushed.post("/job", body).refused(ErrorCode.INVALID_VALUE, "parameters.wrod")
    assert reasons(error) == {
        "parameters.wrod": "is not a parameter of pair@1",
        "parameters.steps": "must be at least 1",
        "parameters.warmup": "must be a whole number",
        "parameters.word": "is required",
        "inputs": "the input for 'pictures' is missing",
    }
    assert "Did you mean 'word'?" in error["message"] and "4 more" in error["message"]


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"recipe": "pair@2"}, "recipe", None),
        ({"recipe": "pair"}, "recipe", None),
        ({"parameters": {"word": 5}}, "parameters.word", "must be a string"),
        ({"parameters": {"word": "too long"}}, "parameters.word", "must have at most 5 characters"),
        ({"parameters": {"word": "a", "warmup": 11}}, "parameters.warmup", "is too long"),
        ({"inputs": [{"prefix": "", "into": "pictures"}]}, "inputs", "the input for 'pictures' has an empty prefix"),
        ({"inputs": [{"prefix": "p/", "into": "other"}]}, "inputs", "the input for 'pictures' is missing"),
    ],
)
def test_bad_input_is_refused_before_anything_is_stored(
    pushed: Api, change: dict[str, Any], field: str, reason: str | None
) -> None:
    with pushed.unchanged():
        answer = pushed.post("/job", {**JOB, **change})
    assert answer.status == 422 and answer.error["field"] == field, answer.text
    if reason is not None:
        assert reasons(answer.error) == {field: reason}


def test_parameters_that_lead_out_of_the_jobs_directory_are_refused(api: Api) -> None:
    document = """{name: save, version: 1, description: d, parameters: {to: {type: string, default: a}},
                   steps: [{name: s, run: [save, "{{ dirs.output }}/{{ parameters.to }}"]}]}"""
    api.post("/recipes", {"document": document}).ok()
    api.post("/job", {"recipe": "save@1", "parameters": {"to": "b/../c"}}).ok()
    with api.unchanged():
        error = api.post("/job", {"recipe": "save@1", "parameters": {"to": "../../etc/cron.d/x"}})
        assert "leads out of the job's directory" in error.refused(ErrorCode.INVALID_VALUE, "steps.0.run.1")["message"]


def test_one_job_of_a_batch_with_faults_names_its_place(pushed: Api) -> None:
    with pushed.unchanged():
        body = {"jobs": [JOB, {**JOB, "parameters": {"steps": 0}}]}
        error = pushed.post("/jobs/batch", body).refused(ErrorCode.INVALID_VALUE, "jobs.1.parameters.steps")
    assert set(reasons(error)) == {"jobs.1.parameters.steps", "jobs.1.parameters.word"}
    assert len(pushed.post("/jobs/batch", {"jobs": [JOB] * 3}).ok()) == 3


def test_any_command_in_any_image(api: Api) -> None:
    body = {
        "recipe": "command@1",
        "parameters": {"command": ["python", "train.py", "--to", "$BATON_OUTPUT_DIR", "{{ not a template }}"]},
        "requirements": {"image": "ghcr.io/acme/trainer"},
        "outputs": ["model"],
    }
    view = api.post("/job", body).ok()
    assert view["command"] == body["parameters"]["command"]  # type: ignore[index]
    api.no_work(image="ghcr.io/acme/other:1")
    api.no_work()
    assert api.claim(image="ghcr.io/acme/trainer:7").item["command"] == view["command"]
    with api.unchanged():
        api.post("/job", {"recipe": "command@1"}).refused(ErrorCode.INVALID_VALUE, "parameters.command")
        api.post("/job", {"recipe": "command@1", "parameters": {"command": []}}).refused(
            ErrorCode.INVALID_VALUE, "parameters.command"
        )


@pytest.mark.parametrize(("recipe", "vram_gib"), [("dreambooth-lora-sdxl@2", 16), ("dreambooth-lora-sd@2", 8)])
def test_the_dreambooth_recipes_ask_for_the_memory_that_they_need(api: Api, recipe: str, vram_gib: int) -> None:
    body = {
        "recipe": recipe,
        "parameters": {"instance_prompt": "a"},
        "inputs": [{"prefix": "t/", "into": "instance"}],
    }
    assert api.post("/job", body).ok()["requirements"]["min_vram_gib"] == vram_gib


@pytest.mark.parametrize(
    ("place", "named", "opened"),
    [
        ("baton:shapes", [], ["shapes"]),
        ("baton:shapes", ["more", "shapes"], ["more", "shapes"]),
        ("s3://bucket/shapes", ["more"], ["more"]),
        ("/mnt/ring", [], []),
    ],
)
def test_a_generator_may_use_the_ring_that_it_is_for(api: Api, place: str, named: list[str], opened: list[str]) -> None:
    job = {"recipe": "generator@1", "parameters": {"function": "a:b", "ring": place}, "rings": named}
    assert api.post("/job", job).ok()["rings"] == opened


def test_a_ring_that_can_have_no_such_name_is_refused(api: Api) -> None:
    job = {"recipe": "generator@1", "parameters": {"function": "a:b", "ring": "baton:No Ring"}}
    error = api.post("/job", job).refused(ErrorCode.INVALID_VALUE, "parameters")
    assert reasons(error) == {"parameters": "baton:No Ring is no place of a ring"}

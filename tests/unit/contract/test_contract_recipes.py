"""Recipes: what parameters they take, and the plan they become."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from baton.contract.recipes.calls import RecipeView
from baton.contract.recipes.model import Parameter, Recipe
from baton.contract.recipes.plan import CommandOrder, OutputCheck, RunPlan, StepOrder
from baton.contract.recipes.rendering import MAX_PLAN_CHARS, escape_of, input_faults, parameter_faults, plan_of


@pytest.mark.parametrize(
    ("spec", "value", "problem"),
    [
        ({"type": "integer"}, 3, None),
        ({"type": "integer"}, 3.0, "must be a whole number"),
        ({"type": "integer"}, True, "must be a whole number"),
        ({"type": "integer"}, "3", "must be a whole number"),
        ({"type": "integer", "minimum": 1}, 0, "must be at least 1"),
        ({"type": "integer", "minimum": 1}, 1, None),
        ({"type": "integer", "maximum": 10_000_000}, 10_000_001, "must be at most 10000000"),
        ({"type": "integer", "maximum": 1_234_567}, 1_234_568, "must be at most 1234567"),
        ({"type": "integer", "multiple_of": 8}, 1020, "must be a multiple of 8"),
        ({"type": "integer", "multiple_of": 8}, 1024, None),
        ({"type": "number"}, 3, None),
        ({"type": "number"}, 2e-6, None),
        ({"type": "number"}, False, "must be a number"),
        ({"type": "number"}, "0.1", "must be a number"),
        ({"type": "number"}, float("nan"), "must be finite"),
        ({"type": "number"}, float("inf"), "must be finite"),
        ({"type": "number", "minimum": 1e-8}, 0, "must be at least 1e-08"),
        ({"type": "number", "exclusive_minimum": 0}, 0, "must be more than 0"),
        ({"type": "number", "exclusive_minimum": 0}, 1e-300, None),
        ({"type": "number", "exclusive_maximum": 1}, 1, "must be less than 1"),
        ({"type": "number", "exclusive_maximum": 1}, 1.0, "must be less than 1"),
        ({"type": "number", "exclusive_maximum": 1}, 0.999999, None),
        ({"type": "string"}, "x", None),
        ({"type": "string"}, 1, "must be a string"),
        ({"type": "string", "max_length": 3}, "abcd", "must have at most 3 characters"),
        ({"type": "string", "min_length": 1}, "", "must not be empty"),
        ({"type": "string", "min_length": 2}, "a", "must have at least 2 characters"),
        ({"type": "string"}, "a\0b", "must not contain a NUL character"),
        ({"type": "string", "choices": ["fp16", "bf16"]}, "fp8", "must be one of fp16, bf16"),
        ({"type": "string", "choices": ["fp16", "bf16"]}, "bf16", None),
        ({"type": "strings"}, ["a", ""], None),
        ({"type": "strings"}, "a", "must be a list of strings"),
        ({"type": "strings"}, ["a", 1], "must be a string in item 1"),
        ({"type": "strings", "max_items": 1}, ["a", "b"], "must have at most 1 items"),
        ({"type": "strings", "required": True}, [], "must not be empty"),
        ({"type": "boolean"}, True, None),
        ({"type": "boolean"}, 1, "must be true or false"),
        ({"type": "boolean"}, "true", "must be true or false"),
        ({"type": "integer"}, None, None),
        ({"type": "integer", "required": True}, None, "must not be null"),
        ({"type": "string"}, ["x"], "must be a string"),
        ({"type": "number"}, {"x": 1}, "must be a number"),
    ],
)
def test_problem_of_a_value(spec: dict[str, Any], value: object, problem: str | None) -> None:
    assert Parameter(**spec).problem(value) == problem


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 9, "multiple_of": 2}, "a whole number, at least 1, at most 9, a"),
        ({"type": "number", "exclusive_minimum": 0}, "a number, more than 0"),
        ({"type": "number", "minimum": 0, "exclusive_maximum": 1}, "a number, at least 0, less than 1"),
        ({"type": "string", "choices": ["a", "b"]}, "one of a, b"),
        ({"type": "string", "min_length": 1, "max_length": 5}, "text, 1 to 5 characters"),
        ({"type": "boolean"}, "true or false"),
    ],
)
def test_what_is_expected_in_words(spec: dict[str, Any], said: str) -> None:
    assert Parameter(**spec).expected().startswith(said)


def recipe(**fields: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "digits",
            "version": 1,
            "description": "Digits",
            "parameters": {
                "steps": {"type": "integer", "default": 600, "minimum": 1},
                "warmup": {"type": "integer", "default": 0},
                "prompt": {"type": "string", "required": True},
                "shuffle": {"type": "boolean", "default": False},
                "note": {"type": "string"},
                "more": {"type": "strings"},
            },
            "rules": [
                {
                    "require": "parameters.warmup <= parameters.steps",
                    "fields": ["warmup", "steps"],
                    "message": "must not be more than steps",
                    "remedy": "Make it shorter.",
                }
            ],
            "inputs": [{"into": "pictures", "description": "Pictures."}, {"into": "masks", "required": False}],
            "steps": [{"name": "train", "run": ["python", "-m", "digits"]}],
            **fields,
        }
    )


def test_every_fault_of_the_parameters_is_told_at_once_with_reason_and_remedy() -> None:
    faults = parameter_faults(recipe(), {"promt": "red", "steps": 0})
    assert [(fault.field, fault.reason) for fault in faults] == [
        ("parameters.promt", "is not a parameter of digits@1"),
        ("parameters.steps", "must be at least 1"),
        ("parameters.prompt", "is required"),
    ]
    assert [fault.remedy for fault in faults] == [
        "Did you mean 'prompt'?",
        "Give a whole number, at least 1.",
        "Give text, at most 4096 characters.",
    ]
    assert parameter_faults(recipe(), {"prompt": "dog", "steps": None}) == []


def test_what_may_be_chosen_is_told_once() -> None:
    chosen = {"precision": {"type": "string", "required": True, "choices": ["fp16", "bf16"]}}
    (wrong,) = parameter_faults(recipe(parameters=chosen, rules=[]), {"precision": "fp8"})
    assert (wrong.reason, wrong.remedy) == ("is none of its choices", "Give one of fp16, bf16.")
    (missing,) = parameter_faults(recipe(parameters=chosen, rules=[]), {})
    assert (missing.reason, missing.remedy) == ("is required", "Give one of fp16, bf16.")
    (no_text,) = parameter_faults(recipe(parameters=chosen, rules=[]), {"precision": 8})
    assert (no_text.reason, no_text.remedy) == ("must be a string", "Give one of fp16, bf16.")


@pytest.mark.parametrize(
    ("many", "remedy"),
    [
        (0, "The recipe has no parameters."),
        (3, "There are p00, p01, p02."),
        (21, "`baton recipes docs digits@1` lists its 21 parameters."),
    ],
)
def test_of_an_unknown_parameter_the_known_ones_are_told_if_they_are_few(many: int, remedy: str) -> None:
    known = {f"p{number:02}": {"type": "integer"} for number in range(many)}
    (fault,) = parameter_faults(recipe(parameters=known, rules=[]), {"unlike": 1})
    assert fault.remedy == remedy


def test_a_rule_between_parameters_counts_defaults_too() -> None:
    (fault,) = parameter_faults(recipe(), {"prompt": "dog", "warmup": 601})
    assert fault[:3] == ("parameters.warmup", "must not be more than steps", "Make it shorter.")
    assert parameter_faults(recipe(), {"prompt": "dog", "warmup": 601, "steps": 601}) == []


def test_a_broken_rule_is_told_with_other_faults_unless_it_reads_what_is_at_fault() -> None:
    def told(given: dict[str, Any]) -> list[str]:
        return [fault.field for fault in parameter_faults(recipe(), given)]

    assert told({"warmup": 601, "promt": "red"}) == ["parameters.promt", "parameters.prompt", "parameters.warmup"]
    assert told({"warmup": 601, "prompt": "dog", "steps": 0}) == ["parameters.steps"]
    assert told({"warmup": "601", "prompt": 5}) == ["parameters.warmup", "parameters.prompt"]


@pytest.mark.parametrize(
    ("inputs", "reasons"),
    [
        ({"pictures": "dog/"}, []),
        ({"pictures": "dog/", "masks": "m/", "other": "x/"}, []),
        ({}, ["the input for 'pictures' is missing"]),
        ({"pictures": ""}, ["the input for 'pictures' has an empty prefix"]),
        ({"masks": ""}, ["the input for 'pictures' is missing", "the input for 'masks' has an empty prefix"]),
    ],
)
def test_faults_of_inputs(inputs: dict[str, str], reasons: list[str]) -> None:
    assert [fault.reason for fault in input_faults(recipe(), inputs)] == reasons


def test_filled_takes_defaults_for_what_is_absent_or_null() -> None:
    default = {"steps": 600, "warmup": 0, "prompt": "dog", "shuffle": False}
    assert recipe().filled({"prompt": "dog"}) == default
    assert recipe().filled({"prompt": "dog", "steps": None}) == default
    given = {"prompt": "dog", "steps": 5, "shuffle": True, "note": "n"}
    assert recipe().filled(given) == {**default, **given}


def planned(given: dict[str, Any] | None = None, **fields: Any) -> RunPlan:
    plan, faults = plan_of(recipe(**fields), {"prompt": "dog", **(given or {})}, ["pictures"])
    assert faults == [] and plan is not None
    return plan


def command(run: list[str], given: dict[str, Any] | None = None) -> list[str]:
    return planned(given, steps=[{"name": "train", "run": run}]).steps[0].command


def test_arguments_are_rendered_and_never_taken_apart_or_quoted() -> None:
    """The original wrapped prompts in quotes that ended up in the prompt: no shell is used."""
    prompt = "a dog; rm -rf ' \" $HOME\nnext"
    run = ["train", "--prompt={{ parameters.prompt }}", "{{ parameters.prompt }}", "--steps", "{{ parameters.steps }}"]
    assert command(run, {"prompt": prompt}) == ["train", f"--prompt={prompt}", prompt, "--steps", "600"]


def test_a_lone_expression_may_become_several_arguments_or_none() -> None:
    run = [
        "train",
        "{{ ['--shuffle'] if parameters.shuffle else [] }}",
        "{{ parameters.note }}",
        "{{ parameters.more }}",
        "{{ ['--note', parameters.note] if parameters.note is not none else [] }}",
    ]
    assert command(run) == ["train"]
    given = {"shuffle": True, "note": "{{ x }}", "more": ["a b", "c"]}
    assert command(run, given) == ["train", "--shuffle", "{{ x }}", "a b", "c", "--note", "{{ x }}"]


def test_places_are_left_for_the_worker_to_fill_in() -> None:
    run = ["train", "{{ dirs.data }}/pictures", "--out={{ dirs.output }}", "{{ dirs.parameters }}", "{{ job.id }}"]
    assert command(run) == [
        *("train", "${BATON_DATA_DIR}/pictures", "--out=${BATON_OUTPUT_DIR}", "${BATON_PARAMS}", "${BATON_JOB_ID}")
    ]


def test_a_step_whose_condition_does_not_hold_is_left_out() -> None:
    steps = [
        {"name": "masks", "run": ["a"], "when": "'masks' in inputs"},
        {"name": "shuffle", "run": ["b"], "when": "parameters.shuffle"},
        {"name": "train", "run": ["c"], "when": "'prompt' in given"},
    ]
    assert [step.name for step in planned(steps=steps).steps] == ["train"]
    assert [step.name for step in planned({"shuffle": True}, steps=steps).steps] == ["shuffle", "train"]


def test_the_plan_says_all_that_a_worker_needs() -> None:
    plan = planned(
        steps=[
            {
                "name": "train",
                "run": ["a"],
                "environment": {"STEPS": "{{ parameters.steps }}"},
                "timeout_s": 60,
                "retries": 2,
                "retry_wait_s": 1,
                "keeps": ["x"],
                "checkpoints": "none",
                "outputs": [{"path": "x", "min_files": 3}, {"path": "y", "required": False}],
            }
        ],
        outputs=[
            {"path": "m", "min_bytes": 5, "format": "json"},
            {"path": "s", "when": "parameters.shuffle"},
            {"path": "o", "required": False, "format": "png"},
            {"path": "p", "required": False, "when": "parameters.shuffle"},
        ],
        health={"check": {"run": ["nvidia-smi"], "timeout_s": 9}},
        cleanup=[{"run": ["rm", "{{ parameters.prompt }}"]}],
    )
    (step,) = plan.steps
    assert step == StepOrder(
        name="train",
        command=["a"],
        environment={"STEPS": "600"},
        timeout_s=60,
        retries=2,
        retry_wait_s=1,
        keeps=["x"],
        checkpoints="none",
        outputs=[{"path": "x", "min_files": 3}],
        optional_outputs=[{"path": "y"}],
    )
    assert [check.model_dump() for check in plan.outputs] == [
        {"path": "m", "min_bytes": 5, "min_files": 0, "format": "json"}
    ]
    assert plan.optional_outputs == [OutputCheck(path="o", format="png")]
    assert plan.check == CommandOrder(command=["nvidia-smi"], timeout_s=9)
    assert plan.cleanup == [CommandOrder(command=["rm", "dog"])]


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({}, False),
        ({"steps": [{"name": "a", "run": ["a"], "retries": 1, "environment": {"A": "b"}}]}, False),
        ({"steps": [{"name": "a", "run": ["a"], "environment": {"A": "{{ dirs.data }}"}}]}, True),
        ({"steps": [{"name": "a", "run": ["a"]}, {"name": "b", "run": ["b"]}]}, True),
        ({"health": {"check": {"run": ["a"]}}}, True),
        ({"cleanup": [{"run": ["a"]}]}, True),
        ({"outputs": [{"path": "a", "required": False}]}, False),
    ],
)
def test_what_an_old_worker_cannot_run(fields: dict[str, Any], needs: bool) -> None:
    assert planned(**fields).needs_plan is needs


@pytest.mark.parametrize(
    ("fields", "given", "field", "reason"),
    [
        ({"run": ["{{ parameters.note }}"]}, {}, "steps.0.run", "names no program"),
        ({"run": ["a", "{{ dirs.output }}/{{ parameters.note }}"]}, {"note": "../../x"}, "steps.0.run.1", "leads out"),
        ({"run": ["a"], "environment": {"A": "${BATON_DATA_DIR}/.."}}, {}, "steps.0.environment.A", "leads out"),
        ({"run": ["a", "--{{ parameters.note }}"]}, {}, "steps.0.run.1", "is not set"),
        ({"run": ["a", "{{ parameters.steps + parameters.prompt }}"]}, {}, "steps.0.run.1", "numbers"),
        ({"run": ["a"], "when": "parameters.steps"}, {}, "steps.0.when", "neither true nor false"),
        ({"run": ["a"], "when": "parameters.shuffle"}, {}, "parameters", "no step is left"),
        ({"run": ["a", "{{ parameters.more }}", "{{ parameters.more }}"]}, {"more": ["x"] * 200}, "steps.0.run", "401"),
        ({"run": ["a", *["{{ parameters.note }}"] * 20]}, {"note": "x" * 4000}, "parameters", str(MAX_PLAN_CHARS)),
    ],
)
def test_what_can_become_no_plan(fields: dict[str, Any], given: dict[str, Any], field: str, reason: str) -> None:
    plan, faults = plan_of(recipe(steps=[{"name": "s", **fields}]), {"prompt": "dog", **given})
    assert plan is None
    assert faults[0].field == field and reason in faults[0].reason and faults[0].remedy


@pytest.mark.parametrize(
    ("text", "escape"),
    [
        ("${BATON_OUTPUT_DIR}/a/../b", None),
        ("${BATON_OUTPUT_DIR}/a/../../b", "${BATON_OUTPUT_DIR}/a/../../b"),
        ("--x=$BATON_DATA_DIR/..", "$BATON_DATA_DIR/.."),
        ("$BATON_DATA_DIR/a:$BATON_OUTPUT_DIR/../b", "$BATON_OUTPUT_DIR/../b"),
        ("$BATON_DATA_DIR/./..a/...", None),
        ("../x", "../x"),  # programs start in the job's directory
        ("..", ".."),
        ("--to=a/../../x", "a/../../x"),
        ("a:../lib", "../lib"),
        ("a/../x", None),
        ("v1..v2", None),
        ("/opt/x/../y", None),
        ("https://example.org/../x", None),
        ("{{parameters.two_folders}}/../../x", None),
        ("is ../x a path or a part of what is said?", None),
        ("$HOME/../x", None),
        ("${BATON_OUTPUT_DIR}/my run/../b", None),
        ("${BATON_OUTPUT_DIR}/my run/../../b", "${BATON_OUTPUT_DIR}/my run/../../b"),
        ("--x=$BATON_OUTPUT_DIR/lr=1,2/../../b", "$BATON_OUTPUT_DIR/lr=1,2/../../b"),
        ("$BATON_DATA_DIR/a:/opt/x/../..", None),
        ("$BATON_DATA_DIR/{{ parameters.two_folders }}/../../x", None),
        ("cp $BATON_DATA_DIR/a b && cd ../../..", None),
    ],
)
def test_what_leads_out_of_the_jobs_directories(text: str, escape: str | None) -> None:
    assert escape_of(text) == escape


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "Digits"),
        ("version", 0),
        ("description", ""),
        ("steps", []),
        ("steps", [{"name": "a", "run": []}]),
        ("steps", [{"name": "a", "run": ["a\0"]}]),
        ("steps", [{"name": "a", "run": ["a"], "timeout_s": 0}]),
        ("steps", [{"name": "a", "run": ["a"], "retries": 11}]),
        ("steps", [{"name": "a", "run": ["a"], "shell": "a"}]),
        ("steps", [{"name": "a", "run": "a"}]),
        ("outputs", [{"path": "../x"}]),
        ("outputs", [{"path": "a", "format": "exe"}]),
        ("inputs", [{"into": "../x"}]),
        ("parameters", {"mode": {"type": "strange"}}),
        ("parameters", {"mode": {"type": "string", "choices": []}}),
        ("parameters", {"--evil=1": {"type": "string"}}),
    ],
)
def test_recipes_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        recipe(**{field: value})


def test_id() -> None:
    assert recipe(version=12).id == "digits@12"


def test_the_answer_of_a_control_plane_without_forms_is_read() -> None:
    """A new client meets an older control plane until its update."""
    answer = {"id": "digits@1", "description": "", "built_in": True, "document": "name: digits"}
    assert RecipeView.model_validate(answer).recipe is None

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.jobs.job import InputRef, JobSubmit
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.jobs.submit import SubmitOptions, build_job, parse_input, parse_job_file, parse_setting

DIGITS = {"recipe": "digits@1"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("steps=600", 600),
        ("rate=2e-3", 0.002),
        ("fast=true", True),
        ("nothing=null", None),
        ("prompt=a photo of timberdog", "a photo of timberdog"),
        ('text="600"', "600"),
        ("empty=", ""),
        ("equation=a=b", "a=b"),
        ("list=[1, 2]", [1, 2]),
        ("broken=[1,", "[1,"),
    ],
)
def test_settings(text: str, value: object) -> None:
    assert parse_setting(text) == (text.partition("=")[0], value)


@pytest.mark.parametrize("text", ["steps", "=600", ""])
def test_settings_that_are_none(text: str) -> None:
    with pytest.raises(CliError, match="is not NAME=VALUE"):
        parse_setting(text)


def test_inputs() -> None:
    assert parse_input("digits/") == {"prefix": "digits/"}
    assert parse_input("sets/digits/:digits/train") == {"prefix": "sets/digits/", "into": "digits/train"}
    with pytest.raises(CliError, match="has no prefix"):
        parse_input(":digits")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("job.json", '{"recipe": "digits@1", "parameters": {"steps": 600}}'),
        ("job.yaml", "recipe: digits@1\nparameters: {steps: 600}\n"),
        ("-", '{"recipe": "digits@1", "parameters": {"steps": 600}}'),
    ],
)
def test_documents(name: str, text: str) -> None:
    assert parse_job_file(text, name) == {"recipe": "digits@1", "parameters": {"steps": 600}}


def test_what_a_job_file_says_is_what_seems_to_be_said() -> None:
    text = """
        base: &base {mixed_precision: no, learning_rate: 2e-6, seed: 010}
        parameters: {<<: *base, train_text_encoder: false, class_prompt: null, name: on, at: 12:30, day: 2026-01-31}
    """
    assert parse_job_file(text, "job.yaml")["parameters"] == {
        "mixed_precision": "no",
        "learning_rate": 2e-6,
        "seed": 10,
        "train_text_encoder": False,
        "class_prompt": None,
        "name": "on",
        "at": "12:30",
        "day": "2026-01-31",
    }


@pytest.mark.parametrize(
    ("name", "text", "messages"),
    [
        ("job.json", '{"recipe": ', "job.json is not JSON: .* line 1, column 12"),
        ("job.json", "recipe: digits@1", "job.json is not JSON"),
        ("job.yaml", "a: [1, 2", "job.yaml is not YAML: .* line 1"),
        ("job.yaml", "a: !!python/object/apply:os.system ['true']", "job.yaml is not YAML"),
        ("job.yaml", "", "does not describe a job"),
        ("job.yaml", "- recipe", "does not describe a job"),
        ("job.yaml", "just text", "does not describe a job"),
        ("job.json", "[" * 100_000, "nested too deeply|not JSON"),
        ("job.yaml", f"priority: {'9' * 5000}", "too many digits"),
        ("job.json", f'{{"priority": {"9" * 5000}}}', "too many digits"),
    ],
)
def test_documents_that_are_none(name: str, text: str, messages: str) -> None:
    with pytest.raises(CliError, match=messages):
        parse_job_file(text, name)


def test_options_add_to_the_document_and_win_over_it() -> None:
    document: dict[str, Any] = {
        "recipe": "digits@1",
        "queue": "slow",
        "parameters": {"steps": 1, "seed": 7},
        "inputs": [{"prefix": "a/"}],
        "tags": {"who": "me"},
    }
    options = SubmitOptions(
        name="night",
        queue="fast",
        priority=90,
        webhook="abcdefgh1234",
        settings=["steps=600"],
        inputs=["b/:b"],
        tags=["who=you", "x=1"],
    )
    assert build_job(document, options) == JobSubmit(
        recipe="digits@1",
        name="night",
        queue="fast",
        priority=90,
        parameters={"steps": 600, "seed": 7},
        inputs=[InputRef(prefix="a/"), InputRef(prefix="b/", into="b")],
        tags={"who": "you", "x": "1"},
        webhook="abcdefgh1234",
    )
    assert document["parameters"] == {"steps": 1, "seed": 7}, "the document itself is left alone"


@pytest.mark.parametrize(
    ("document", "options", "messages"),
    [
        ({**DIGITS, "parameters": [1]}, SubmitOptions(settings=["a=1"]), "parameters: "),
        ({**DIGITS, "tags": "x"}, SubmitOptions(tags=["a=1"]), "tags: "),
        ({**DIGITS, "inputs": {"prefix": "a/"}}, SubmitOptions(inputs=["b/"]), "inputs: "),
        ({**DIGITS, "inputs": "a/"}, SubmitOptions(inputs=["b/"]), "inputs: "),
        ({**DIGITS, 5: "x"}, SubmitOptions(), "5: "),
        ({**DIGITS, "parameters": {5: "x"}}, SubmitOptions(settings=["a=1"]), "parameters.5"),
    ],
)
def test_what_options_cannot_be_added_to(document: dict[str, Any], options: SubmitOptions, messages: str) -> None:
    with pytest.raises(CliError, match=f"invalid job: .*{messages}"):
        build_job(document, options)


def test_nothing_in_the_file_is_nothing_to_add_to() -> None:
    document = {**DIGITS, "parameters": None, "tags": None, "inputs": None}
    assert build_job(document, SubmitOptions(settings=["a=1"], tags=["b=2"], inputs=["c/"])) == JobSubmit(
        recipe="digits@1", parameters={"a": 1}, tags={"b": "2"}, inputs=[InputRef(prefix="c/")]
    )


def test_what_was_not_said_is_not_sent() -> None:
    assert build_job(dict(DIGITS), SubmitOptions()).model_dump(exclude_unset=True) == DIGITS


@pytest.mark.parametrize(
    ("document", "messages"),
    [
        ({}, "exactly one of 'recipe' and 'command'"),
        ({"recipe": "digits@1", "command": ["x"]}, "exactly one of"),
        (
            {"recipe": "digits"},
            "recipe: 'digits' is not NAME@VERSION, as in digits@1. List the recipes with: baton recipes list$",
        ),
        ({"recipe": 5}, "recipe: must be text, not a number. Put it into quotes.$"),
        ({**DIGITS, "prioritty": 3}, "prioritty: is not a field of jobs. Did you mean 'priority'[?]$"),
        ({**DIGITS, "policy": {"max_fail": 3}}, "policy.max_fail: is not a field of jobs. Did you mean 'max_failures'"),
        ({"command": "python a.py"}, r"command: must be a list, not text. Write \[python, a.py\].$"),
        (
            {**DIGITS, "queue": "No Such"},
            "queue: cannot be a name. Use up to 63 lower-case letters, digits and hyphens",
        ),
        ({**DIGITS, "inputs": ["digits/"]}, r"inputs.0: .*prefix"),
        ({**DIGITS, "priority": 300}, "priority: .*100"),
        ({**DIGITS, "policy": {"max_failures": 0}}, "policy.max_failures: "),
        ({**DIGITS, "inputs": [{"prefix": "../up"}]}, "inputs.0.prefix: "),
        ({**DIGITS, "inputs": [{"into": "a"}]}, "inputs.0.prefix: is missing. Add 'prefix: ...' here."),
        ({**DIGITS, "policy": {"checkpoint_every": "x"}}, r"policy\.checkpoint_every: .*'auto'; or: .*integer"),
    ],
)
def test_no_jobs(document: dict[str, Any], messages: str) -> None:
    with pytest.raises(CliError, match=f"invalid job: .*{messages}"):
        build_job(document, SubmitOptions())


def test_all_that_is_wrong_is_told() -> None:
    with pytest.raises(CliError, match=r"invalid job: 9 problems$") as caught:
        build_job({**DIGITS, **{f"f{n}": 1 for n in range(9)}}, SubmitOptions())
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [f"f{n}" for n in range(9)]
    with pytest.raises(CliError, match="102 problems") as caught:
        build_job({**DIGITS, **{f"f{n}": 1 for n in range(102)}}, SubmitOptions())
    assert len(caught.value.problems) == 101 and caught.value.problems[-1] == "and 2 more"


def test_how_often_to_checkpoint_joins_the_policy_of_the_file() -> None:
    document = {"recipe": "digits@1", "policy": {"max_failures": 5, "checkpoint_every": 60}}
    policy = build_job(document, SubmitOptions(checkpoint_every="auto")).policy
    assert (policy.max_failures, policy.checkpoint_every) == (5, "auto")
    assert build_job({"recipe": "digits@1"}, SubmitOptions(checkpoint_every="15m")).policy.checkpoint_every == 900
    assert build_job(document, SubmitOptions()).policy.checkpoint_every == 60
    for wrong, messages in (("often", "'often' is not a duration"), ("1", r"policy\.checkpoint_every")):
        with pytest.raises(CliError, match=messages):
            build_job(document, SubmitOptions(checkpoint_every=wrong))


def test_options_rent_a_machine() -> None:
    options = SubmitOptions(rent=True, budget_usd=5, max_usd_per_hour=0.5, providers=["vast", "loopback"])
    rent = {"budget_usd": 5, "max_usd_per_hour": 0.5, "providers": ["vast", "loopback"]}
    assert build_job({"command": ["x"]}, options).model_dump(exclude_unset=True)["rent"] == rent
    document = {"command": ["x"], "rent": {"budget_usd": 9, "providers": ["vast"]}}
    job = build_job(document, SubmitOptions(rent=True, budget_usd=3))
    assert job.rent is not None and (job.rent.budget_usd, job.rent.providers) == (3, ["vast"])
    assert build_job(document, SubmitOptions()).rent == JobSubmit.model_validate(document).rent


@pytest.mark.parametrize(
    ("document", "options", "messages"),
    [
        ({}, SubmitOptions(budget_usd=5), "need --rent"),
        ({}, SubmitOptions(rent=True, budget_usd=5), "--rent needs a budget and a provider"),
        ({"rent": {"providers": ["vast"]}}, SubmitOptions(rent=True), "--rent needs a budget and a provider"),
        ({}, SubmitOptions(rent=True, budget_usd=-1, providers=["vast"]), "rent.budget_usd: input should be greater"),
        (
            {"rent": True},
            SubmitOptions(),
            "rent: must be fields with values, not true or false. Write fields like '{budget_usd: ...}'",
        ),
    ],
)
def test_what_cannot_be_rented(document: dict[str, Any], options: SubmitOptions, messages: str) -> None:
    with pytest.raises(CliError, match=messages):
        build_job({"command": ["x"], **document}, options)
